"""`TransferBackend`: the contract of what writes from one engine's region into that of another; `Region`, the memory
itself where it is the host's (`device_region` has a GPU's); and the registry of backends.

Refuses: deciding what is written where, and checksums: agents do both (service/transfer).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol
from urllib.parse import parse_qsl

import numpy as np

from headrace.base.errors import ConfigError, TransferFailed
from headrace.base.registry import Registry

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which `mmap` does not name."""
ENTRY_POINT_GROUP = "headrace.transfer"


class Copy(NamedTuple):
    """Bytes from ``begin`` of our region on, written to ``target`` of the peer's."""

    begin: int
    target: int
    num_bytes: int


class AnyRegion(Protocol):
    """Memory that an engine shares with its agent. ``data`` is uint8 of its length, or empty where the host cannot read
    it; then its bytes have no checksums."""

    descriptor: int
    num_bytes: int
    data: np.ndarray

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""

    def check(self, begin: int, num_bytes: int) -> None:
        """Raise `TransferFailed` for bytes outside of it."""

    def populate(self, begin: int, num_bytes: int) -> None:
        """Commit memory of the host beforehand, as far as the system can; ``begin`` is that of a system page."""

    def close(self) -> None:
        """Give it up here; others keep it."""


def check_bounds(begin: int, num_bytes: int, size: int) -> None:
    """Raise `TransferFailed` for bytes outside of a region of ``size``."""
    if begin < 0 or num_bytes < 0 or begin + num_bytes > size:
        raise TransferFailed(f"bytes [{begin}, {begin + num_bytes}) are outside of a region of {size}")


class Region:
    """Memory that an engine, its agent and, on the same host, agents of peers map: a file without a name. ``data`` is
    uint8 of its length. Memory is committed where it was written."""

    def __init__(self, descriptor: int, num_bytes: int):
        self.descriptor, self.num_bytes = descriptor, num_bytes
        mapped = mmap.mmap(descriptor, num_bytes)
        self._map: mmap.mmap | None = mapped
        self.data = np.frombuffer(mapped, dtype=np.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> Region:
        """A new one, of zeros. Raises `ConfigError` when the system has no room for it."""
        try:
            if sys.platform == "linux":
                descriptor = os.memfd_create("headrace-transfer", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, descriptor)
                os.ftruncate(descriptor, num_bytes)
                region = cls(descriptor, num_bytes)
                undo.pop_all()
            return region
        except OSError as error:
            raise ConfigError(f"no memory of {num_bytes} bytes for transfers: {error.strerror}") from error

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return int(self.data.ctypes.data)

    def check(self, begin: int, num_bytes: int) -> None:
        """Raise `TransferFailed` for bytes outside of it."""
        check_bounds(begin, num_bytes, self.num_bytes)

    def populate(self, begin: int, num_bytes: int) -> None:
        """See `AnyRegion`."""
        data = self.data  # keeps the mapping if another thread closes the region meanwhile
        if data.size:
            address = ctypes.c_void_p(int(data.ctypes.data) + begin)
            # `mmap.madvise` would hold up all other threads of Python. Kernels before 5.14 refuse, which is no matter.
            ctypes.CDLL(None).madvise(address, ctypes.c_size_t(num_bytes), POPULATE_WRITE)

    def close(self) -> None:
        """Unmap it here; others keep it. What still refers to ``data`` keeps the mapping, too."""
        self.data = np.empty(0, dtype=np.uint8)
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # a tensor refers to it, and unmaps it when it goes
                mapped.close()
        os.close(self.descriptor)


class Destination(Protocol):
    """The region of one peer."""

    def write(self, copies: Sequence[Copy]) -> None:
        """Write, and return when everything is there. Called from a thread, one call at a time. Raises
        `headrace.base.errors.TransferFailed`, after which nothing more is written: copies that began have ended. As
        long as they have not, it does not return: an agent that waits for too long ends, and they with it."""

    def close(self) -> None:
        """Forget the peer; safe to call after it has died."""


class TransferBackend(Protocol):
    """Built once per agent over its region. Every call may raise `TransferFailed`, `__init__` `ConfigError`.
    ``memory`` says whose memory the region is."""

    memory: ClassVar[Literal["host", "device"]]

    def __init__(self, region: AnyRegion, options: Mapping[str, str]): ...

    def handle(self) -> bytes:
        """What a peer needs to `connect`."""

    def connect(self, handle: bytes) -> Destination:
        """Open a peer's region for writing. May block for some seconds."""

    def close(self) -> None:
        """End it; peers can no longer connect."""


TRANSFER_BACKENDS: Registry[type[TransferBackend]] = Registry("transfer backend")

TRANSFER_BACKENDS.add(
    "shared-memory", "headrace.memory.transfer.shared_memory:SharedMemory",
    doc="agents of one host map each other's regions"
)
TRANSFER_BACKENDS.add(
    "cuda-ipc", "headrace.memory.transfer.cuda_ipc:CudaIpc",
    doc="agents of one host map memory of each other's GPUs, and copy over NVLink or PCIe"
)
TRANSFER_BACKENDS.add(
    "nixl", "headrace.memory.transfer.nixl:NixlBackend", doc="NVIDIA's NIXL: RDMA or TCP by UCX; headrace[nixl]"
)
TRANSFER_BACKENDS.add(
    "mooncake", "headrace.memory.transfer.mooncake:MooncakeBackend",
    doc="Mooncake's TransferEngine: RDMA or TCP; headrace[mooncake]"
)
TRANSFER_BACKENDS.add(
    "faulty", "headrace.memory.transfer.faulty:FaultyBackend",
    doc="for tests: shared memory that delays, drops, duplicates, corrupts or refuses writes"
)


def split_backend(text: str) -> tuple[str, dict[str, str]]:
    """``name``, or ``name?option=value&...``, as name and options; raises `ConfigError`."""
    name, mark, query = text.partition("?")
    try:
        options = dict(parse_qsl(query, strict_parsing=True, keep_blank_values=True)) if mark else {}
    except ValueError as error:
        raise ConfigError(
            f"a transfer backend is NAME or NAME?OPTION=VALUE&OPTION=VALUE, got {text!r}",
            param="disaggregation_transfer_backend"
        ) from error
    return name, options


def refuse_unknown(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for options that a backend does not have."""
    for name in options:
        if name not in known:
            listing = ", ".join(known) or "none"
            raise ConfigError(
                f"unknown option {name!r} of the transfer backend; it has: {listing}",
                param="disaggregation_transfer_backend"
            )


def load_backend(text: str) -> tuple[type[TransferBackend], dict[str, str]]:
    """A backend's class and its options, by `split_backend`; raises `PluginError` that lists the known names, or
    `ConfigError`."""
    TRANSFER_BACKENDS.add_installed(ENTRY_POINT_GROUP)
    name, options = split_backend(text)
    return TRANSFER_BACKENDS.load(name), options


def create_backend(text: str, region: AnyRegion) -> TransferBackend:
    """Build a backend; raises as `load_backend` does."""
    kind, options = load_backend(text)
    return kind(region, options)
