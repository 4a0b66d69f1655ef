"""`DeviceRegion`: memory of a GPU that several processes map, by the driver's virtual-memory calls. It is known by a
file descriptor and lives until the last process has unmapped it, so that one that dies, or goes on writing late, harms
nobody: what the driver does not promise of handles from ``cudaIpcGetMemHandle``.

Imports no torch: transfer agents use it. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import check_bounds

GIB = 2**30
PINNED = POSIX_DESCRIPTOR = ON_DEVICE = RECOMMENDED = NON_BLOCKING = 1
READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte), ("rdma_capable", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("windows_data", ctypes.c_void_p), ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Driver:
    """The CUDA driver on one device, in its primary context, which is torch's too. Calls raise `DriverError`."""

    def __init__(self, device: int):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"there is no CUDA driver here: {error}") from error
        self.device = device
        self._context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def enter(self) -> None:
        """Make the device's context that of the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver by its name."""
        status = self._library[name](*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


@functools.cache
def driver_of(device: int) -> Driver:
    """That of a device, by its number in this process."""
    return Driver(device)


class DeviceRegion:
    """``num_bytes`` at ``address`` of a GPU; ``descriptor`` is for other processes. It is unmapped when nothing refers
    to this object any more, tensors made from it included. ``data`` is empty: the host cannot read it."""

    data = np.empty(0, dtype=np.uint8)

    def __init__(self, driver: Driver, descriptor: int, num_bytes: int, allocation: ctypes.c_uint64):
        """Maps ``allocation``, a handle of the driver that this takes over; see `create` and `open`."""
        self.driver, self.descriptor, self.num_bytes = driver, descriptor, num_bytes
        address, size, none = ctypes.c_uint64(), ctypes.c_size_t(_round_up(driver, num_bytes)), ctypes.c_uint64(0)
        try:
            driver.call("cuMemAddressReserve", ctypes.byref(address), size, none, none, none)
            try:
                driver.call("cuMemMap", address, size, none, allocation, none)
                access = _Access(_Location(ON_DEVICE, driver.device), READ_WRITE)
                driver.call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
            except DriverError:
                driver.call("cuMemAddressFree", address, size)
                raise
        finally:
            driver.call("cuMemRelease", allocation)  # the mapping keeps the memory
        self.address = int(address.value)
        weakref.finalize(self, _unmap, driver, address, size).atexit = False  # the end of the process frees it too

    @classmethod
    def create(cls, num_bytes: int, device: int) -> DeviceRegion:
        """A new one, of unknown contents. Raises `ConfigError` when the device has no room, or shares no memory."""
        descriptor = ctypes.c_int(-1)
        try:
            driver = driver_of(device)
            driver.enter()
            allocation, properties = ctypes.c_uint64(), _properties(device)
            size = ctypes.c_size_t(_round_up(driver, num_bytes))
            driver.call("cuMemCreate", ctypes.byref(allocation), size, ctypes.byref(properties), ctypes.c_uint64(0))
            try:
                driver.call(
                    "cuMemExportToShareableHandle", ctypes.byref(descriptor), allocation, POSIX_DESCRIPTOR,
                    ctypes.c_uint64(0)
                )
            except DriverError:
                driver.call("cuMemRelease", allocation)
                raise
            return cls(driver, descriptor.value, num_bytes, allocation)
        except DriverError as error:
            raise ConfigError(
                f"no {num_bytes / 2**20:.0f} MiB of memory of the GPU for transfers ({error}); use shared-memory, or "
                "cuda-ipc?gib=N with less", param="disaggregation_transfer_backend"
            ) from error

    @classmethod
    def open(cls, descriptor: int, num_bytes: int, device: int) -> DeviceRegion:
        """Another process's, mapped for ``device``, by a descriptor that this takes over. Raises `TransferFailed`."""
        allocation = ctypes.c_uint64()
        try:
            driver = driver_of(device)
            driver.enter()
            driver.call(
                "cuMemImportFromShareableHandle", ctypes.byref(allocation), ctypes.c_void_p(descriptor),
                POSIX_DESCRIPTOR
            )
            return cls(driver, descriptor, num_bytes, allocation)
        except DriverError as error:
            os.close(descriptor)
            raise TransferFailed(f"the GPU cannot map the memory of the other process: {error}") from error

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For ``torch.as_tensor``: uint8, writable."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def check(self, begin: int, num_bytes: int) -> None:
        """Raise `TransferFailed` for bytes outside of it."""
        check_bounds(begin, num_bytes, self.num_bytes)

    def populate(self, begin: int, num_bytes: int) -> None:
        """See `AnyRegion`: it is committed."""

    def close(self) -> None:
        """Give nobody else the memory; it is unmapped with this object."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class DeviceCopies:
    """Copies between regions on the copy engines of one device, on a stream of their own."""

    def __init__(self, driver: Driver):
        self._driver, self._stream = driver, ctypes.c_void_p()
        driver.enter()
        driver.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy ``(source address, target address, bytes)`` and wait for the end. From any thread, one at a time; raises
        `TransferFailed`, when what began has ended."""
        try:
            self._driver.enter()
            for source, target, num_bytes in pieces:
                self._driver.call(
                    "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source),
                    ctypes.c_size_t(num_bytes), self._stream
                )
            self._driver.call("cuStreamSynchronize", self._stream)
        except DriverError as error:
            with contextlib.suppress(DriverError):  # a context that is broken writes no more
                self._driver.call("cuStreamSynchronize", self._stream)
            raise TransferFailed(f"a copy between GPUs failed: {error}") from error

    def close(self) -> None:
        """Free the stream; no copy may be under way."""
        self._driver.enter()
        self._driver.call("cuStreamDestroy_v2", self._stream)


def read_region_bytes(options: Mapping[str, str]) -> int:
    """Bytes of the option ``gib``, 0 without it; raises `ConfigError`."""
    try:
        gib = float(options.get("gib", 0))
    except ValueError:
        gib = -1.0
    if not 0 <= gib < 1 << 20 or ("gib" in options and gib == 0):
        raise ConfigError(
            f"gib is a number of GiB above 0, got {options['gib']!r}", param="disaggregation_transfer_backend"
        )
    return int(gib * GIB)


def _properties(device: int) -> _Properties:
    return _Properties(PINNED, POSIX_DESCRIPTOR, _Location(ON_DEVICE, device), None, _AllocationFlags())


def _round_up(driver: Driver, num_bytes: int) -> int:
    """To whole units of what can be mapped."""
    unit = ctypes.c_size_t()
    properties = _properties(driver.device)
    driver.call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), RECOMMENDED)
    return -(-max(1, num_bytes) // unit.value) * unit.value


def _unmap(driver: Driver, address: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
    driver.enter()
    driver.call("cuMemUnmap", address, size)
    driver.call("cuMemAddressFree", address, size)
