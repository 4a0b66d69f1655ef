"""Own CUDA C++, which ``nvrtc.py`` compiles: waited for or found in a dry run, loaded and launched through the driver
API.

Needs neither a CUDA toolkit nor torch's headers. Linux only. Knows no kernel by name.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from headrace.kernels import nvrtc
from headrace.kernels.late import note_compiled
from headrace.kernels.nvrtc import CudaSourceError, Source, describe_for

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# values of the driver API's enumerations, from cuda.h
MOST_SHARED_BYTES = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``"""
CARVEOUT = 9
"""``CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT``, in percent"""
LARGE_CLUSTERS = 14
"""``CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED``"""
TENSOR_TYPES = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
SWIZZLES, PROMOTE_128 = {32: 0, 64: 2, 128: 3, 144: 0}, 2
"""``CU_TENSOR_MAP_SWIZZLE_NONE``, ``_64B`` and ``_128B``, ``CU_TENSOR_MAP_L2_PROMOTION_L2_128B``"""
MAP_BYTES = 128
"""Size of a ``CUtensorMap``, which must be aligned to 64 bytes."""
SM_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor of Hopper, and what the system takes of it for a block."""
MOST_BYTES = SM_BYTES - RESERVED_BYTES
"""Dynamic shared memory of a block, at most."""
LONE_BYTES = SM_BYTES // 2 - RESERVED_BYTES + 128
"""The least that does not fit twice."""


def keep_apart(needed: int) -> int:
    """Dynamic shared memory to ask for, for a block that needs so many bytes and shall be the only one of its kernel on
    a multiprocessor.

    With programmatic dependent launch a kernel's blocks begin while the previous kernel's still run, and are dealt to
    whatever has room at that moment. Where two blocks of a kernel fit, some multiprocessors get two and others none,
    and a kernel that has one for each takes up to twice as long.
    """
    return max(needed, LONE_BYTES)


@cache
def count_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere, where interpreted kernels run."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


NOT_YET = b""
"""The code of a kernel that others are compiling; see `compiled_by`."""


class Compiling:
    """Sources that others compile: ``futures`` of all. In a dry run ``submit`` takes further ones."""

    def __init__(
        self, futures: dict[Source, Future[Any]], submit: Callable[[Source], Future[Any]] | None = None
    ):
        self._futures, self._submit, self._wanted = futures, submit, set[Source]()
        self.unfinished: dict[Any, Any] = {}
        """What functions of `cache_compiled` made in this dry run of kernels that are not compiled: each layer of each
        step asks for it again."""

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run, in which nothing is launched."""
        return self._submit is not None

    def is_wanted(self, source: Source) -> bool:
        """Whether a kernel of this dry run asked for it before."""
        return source in self._wanted

    def want(self, source: Source) -> bool:
        """Whether it is being compiled: in a dry run from now on, and not to be waited for. Else waits for what is
        being compiled."""
        if self._submit is None:
            if source in self._futures:
                wait([self._futures[source]])
            return False
        self._wanted.add(source)
        if source not in self._futures:
            self._futures[source] = self._submit(source)
        return True


_compiling: ContextVar[Compiling | None] = ContextVar("compiling", default=None)
_num_not_yet = 0


FAULTS = CudaSourceError, OSError, AttributeError
"""Of own kernels that cannot be compiled or loaded; the last is of a driver that lacks a function."""


@contextmanager
def compiled_by(compiling: Compiling) -> Iterator[None]:
    """In the body, sources that are not in the cache are looked for in ``compiling``. In a dry run no kernel is
    launched: one that is compiled would read what others, which are not, have left unwritten."""
    token = _compiling.set(compiling)
    try:
        yield
    finally:
        _compiling.reset(token)


def cache_compiled(make: Callable[P, T]) -> Callable[P, T]:
    """As ``functools.cache``, for functions that make kernels: not of those that are `NOT_YET` compiled, nor of what
    depends on them."""
    made: dict[Any, T] = {}

    @wraps(make)
    def find(*args: P.args, **kwargs: P.kwargs) -> T:
        global _num_not_yet
        key, compiling = (args, tuple(sorted(kwargs.items()))), _compiling.get()
        if key in made:
            return made[key]
        unfinished = {} if compiling is None or not compiling.is_dry else compiling.unfinished
        if (make, key) in unfinished:
            _num_not_yet += 1  # nor is what the caller makes of it
            return unfinished[make, key]
        before = _num_not_yet
        found = make(*args, **kwargs)
        if _num_not_yet == before:
            made[key] = found
        else:
            unfinished[make, key] = found
        return found

    return find


@contextmanager
def fallback(instead: str) -> Iterator[None]:
    """Leaves the body where a kernel that it makes cannot be compiled or loaded, also by a driver that lacks a function
    for it. `note_fallback` is then told what runs ``instead``."""
    try:
        yield
    except FAULTS as error:
        note_fallback(instead, error)


_fallen_back: dict[str, str] = {}


def note_fallback(instead: str, error: Exception) -> None:
    """Warn of what runs ``instead`` as a kernel fails with ``error``. If it is an own one that cannot be compiled or
    loaded, keep that for `fallen_back`."""
    logger.warning("%s: %s", instead, error)
    if isinstance(error, FAULTS):
        _fallen_back.setdefault(instead, str(error).partition("\n")[0])


def fallen_back() -> tuple[str, ...]:
    """What runs instead of own kernels in this process, as these could not be compiled or loaded, with the first line
    of the error; once for each. Empty unless something is wrong: whatever is measured otherwise is of other kernels."""
    return tuple(f"{instead}: {reason}" for instead, reason in _fallen_back.items())


def compile_source(name: str, options: tuple[str, ...]) -> bytes:
    """The cubin of ``csrc/cuda/<name>.cu``, from the cache or compiled in seconds; `NOT_YET` in a dry run. ``options``
    are nvcc's and include the architecture. Raises `CudaSourceError`."""
    global _num_not_yet
    compiling, source = _compiling.get(), (name, options)
    if compiling is not None and compiling.is_wanted(source):  # asked again for every layer and step
        _num_not_yet += 1
        return NOT_YET
    library = nvrtc.open_nvrtc()
    path = nvrtc.locate(library, name, options)
    if not os.path.exists(path) and compiling is not None and compiling.want(source):
        _num_not_yet += 1
        return NOT_YET
    if os.path.exists(path):  # False also without permission to look
        return path.read_bytes()
    began = time.perf_counter()
    code = nvrtc.compile_into(path, library, name, options)
    note_compiled(f"{name}.cu {' '.join(options)}", time.perf_counter() - began)
    return code


def describe_source(name: str, device: torch.device, /, **macros: int) -> Source:
    """``csrc/cuda/<name>.cu`` with these macros, whose names are in capitals there, for a device."""
    return describe_for(name, torch.cuda.get_device_capability(device), **macros)


def load_kernel(
    name: str, device: torch.device, shared_bytes: int = 0, entry: str = "", /, **macros: int
) -> CudaKernel:
    """The kernel ``entry``, by default of the source's name, of what `describe_source` describes; compiled in seconds
    unless cached. Raises `CudaSourceError` and `OSError`."""
    with torch.cuda.device(device):
        return CudaKernel(compile_source(*describe_source(name, device, **macros)), entry or name, shared_bytes)


@cache
def _open_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: Any) -> None:
    """Call a function of the driver API. Raises `CudaSourceError`, and `OSError` without a driver."""
    driver = _open_driver()
    error = getattr(driver, name)(*arguments)
    if error:
        text = c_char_p()
        driver.cuGetErrorString(error, byref(text))
        raise CudaSourceError(f"{name}: {(text.value or b'unknown').decode()}")


def _enter_context(device: int) -> None:
    """Give this thread torch's context of a device, unless it has one: a thread that has called nothing of CUDA's
    runtime yet has none, although torch knows its device."""
    context = c_void_p()
    call_driver("cuCtxGetCurrent", byref(context))
    if context.value is None:
        call_driver("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
        call_driver("cuCtxSetCurrent", context)


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``, of which the first word of the value is used, or three for the size of a cluster."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("num_attributes", ctypes.c_uint),
    )


DEPENDENT = _LaunchAttribute(6, 0, 1)
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``"""


@cache
def _describe_cluster(size: int) -> _LaunchAttribute:
    """``CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION``"""
    cluster = _LaunchAttribute(4, 0, size)
    cluster.rest[0] = cluster.rest[1] = 1
    return cluster


@cache
def _list_attributes(is_dependent: bool, cluster: int) -> ctypes.Array[_LaunchAttribute]:
    """Those that apply, from the first on."""
    found = [DEPENDENT] if is_dependent else []
    if cluster > 1:
        found.append(_describe_cluster(cluster))
    return (_LaunchAttribute * 2)(*found)


def current_stream(device: int) -> int:
    """The handle of torch's current stream of a device, in a tenth of the time that `torch.cuda.current_stream` takes.
    """
    return torch._C._cuda_getCurrentRawStream(device)


class CudaKernel:
    """A kernel of a cubin, loaded into torch's current context for the life of the process, and the most dynamic shared
    memory that a launch takes, in bytes. Usable on the device that was current when it was made. Launches do nothing in
    a dry run (`compiled_by`), and of code that is `NOT_YET` compiled."""

    def __init__(self, code: bytes, entry: str, shared_bytes: int):
        self.shared_bytes, self._is_loaded = shared_bytes, code != NOT_YET
        if not self._is_loaded:
            return
        torch.cuda.current_stream()  # initialises CUDA
        self._device = torch.cuda.current_device()
        self._module, self._function = c_void_p(), c_void_p()
        _enter_context(self._device)
        call_driver("cuModuleLoadData", byref(self._module), c_char_p(code))
        call_driver("cuModuleGetFunction", byref(self._function), self._module, entry.encode())
        call_driver("cuFuncSetAttribute", self._function, MOST_SHARED_BYTES, shared_bytes)

    def launch(
        self, programs: int, threads: int, *arguments: Any, is_dependent: bool = False, shared_bytes: int | None = None,
        cluster: int = 1
    ) -> None:
        """Launch ``programs`` blocks of ``threads`` threads on torch's current stream. Arguments are ctypes objects,
        which the driver copies before it returns. With ``is_dependent``, by programmatic dependent launch: see
        `headrace.kernels.launch`. ``shared_bytes``: less than the most. ``cluster``: blocks of a cluster, of a source
        that does not state them. Raises `CudaSourceError`; errors of the kernel itself appear later."""
        compiling = _compiling.get()
        if not self._is_loaded or (compiling is not None and compiling.is_dry):
            return
        places = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        config = _LaunchConfig(
            (programs, 1, 1), (threads, 1, 1), self.shared_bytes if shared_bytes is None else shared_bytes,
            current_stream(self._device), _list_attributes(is_dependent, cluster), int(is_dependent) + (cluster > 1),
        )
        call_driver("cuLaunchKernelEx", byref(config), self._function, places, None)

    def share_multiprocessors(self) -> None:
        """Have multiprocessors give shared memory all that they can, not what a block of this kernel needs, so that
        blocks of another kernel find room beside it. For the thread that made the kernel."""
        if self._is_loaded:
            call_driver("cuFuncSetAttribute", self._function, CARVEOUT, 100)

    def count_resident(self, threads: int) -> int:
        """Blocks of ``threads`` threads that run on a multiprocessor at once."""
        if not self._is_loaded:
            return 1
        count = c_int()
        call_driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(count), self._function, threads,
            c_size_t(self.shared_bytes),
        )
        return count.value

    def count_clusters(self, size: int, threads: int) -> int:
        """Clusters of ``size`` blocks of ``threads`` threads that run at once on the device; launches with up to 16
        blocks in each are allowed from then on."""
        if not self._is_loaded:
            return 1
        call_driver("cuFuncSetAttribute", self._function, LARGE_CLUSTERS, 1)
        count = c_int()
        config = _LaunchConfig(
            (size, 1, 1), (threads, 1, 1), self.shared_bytes, None, ctypes.pointer(_describe_cluster(size)), 1
        )
        call_driver("cuOccupancyMaxActiveClusters", byref(count), self._function, byref(config))
        return count.value

    def describe(self, matrix: torch.Tensor, rows: int, columns: int) -> ctypes.Array[ctypes.c_char]:
        """`describe_boxes` of a half-precision matrix; boxes of ``rows`` by ``columns`` (64, which is 128 bytes)."""
        return describe_boxes(matrix, (rows, columns))


def address_of(tensor: torch.Tensor | None) -> int | None:
    """For a pointer of a kernel's arguments: null for None."""
    return None if tensor is None else tensor.data_ptr()


def describe_boxes(tensor: torch.Tensor, box: tuple[int, ...]) -> ctypes.Array[ctypes.c_char]:
    """`encode_map` of a tensor. It holds the tensor's address: keep the tensor until the kernel has been launched."""
    return encode_map(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), box)


@lru_cache(maxsize=8192)
def encode_map(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
    swizzle: int = 0,
) -> ctypes.Array[ctypes.c_char]:
    """A TMA tensor map of a strided tensor of two to five dimensions of 16-bit numbers or bytes. The last dimension of
    a ``box`` is 64 or 128 bytes, swizzled by as many, or 32 or 144. A narrower one is swizzled by ``swizzle`` bytes if
    told so, and its rows in shared memory are as far apart. Strides of the other dimensions are multiples of 16 bytes.
    Elements outside the tensor read as zero and are not written."""
    # Kept, as steps launched one by one come with the same addresses again: a map takes 25 us. It says nothing of what
    # the memory has. 64 bytes more than a map, to align it; dimensions and strides are given innermost first.
    room, size, rank = ctypes.create_string_buffer(MAP_BYTES + 64), dtype.itemsize, len(box)
    aligned = (ctypes.c_char * MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % 64)
    call_driver(
        "cuTensorMapEncodeTiled", aligned, TENSOR_TYPES[dtype], rank, c_void_p(address),
        (c_uint64 * rank)(*reversed(shape)), (c_uint64 * (rank - 1))(*(s * size for s in reversed(strides[:-1]))),
        (c_uint32 * rank)(*reversed(box)), (c_uint32 * rank)(*(1 for _ in box)), 0,
        SWIZZLES[swizzle or box[-1] * size], PROMOTE_128, 0,
    )
    return aligned
