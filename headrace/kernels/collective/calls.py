"""What kernels of ``csrc/cuda/collective.cu`` are called with, and `Kernels`, which launches them.

A vector is 16 bytes.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache

import torch

from headrace.kernels.collective import MOST_RANKS, parts
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, compile_source, load_kernel

VECTOR, CHUNK = 16, 8
"""Bytes of a vector, and vectors that have one owner: as in the source, like the next two."""
CONTROL_BYTES, MOST_BLOCKS = 16384, 1024
HOST_WORDS = MOST_RANKS + 2
ABORTED, BUDGET = MOST_RANKS, MOST_RANKS + 1
"""Places among the host's words."""
TYPES = {getattr(torch, name): number for name, number in parts.TYPES.items()}


class Call(ctypes.Structure):
    """``Ranks`` of the source. The next ones have their names there."""

    _fields_ = (
        ("mailboxes", c_uint64 * MOST_RANKS), ("host", c_uint64), ("sum_bytes", c_uint64), ("gather_bytes", c_uint64),
        ("rank", c_int),
    )


class Sum(ctypes.Structure):
    """Of tensors [rows, width] of any ranks, added up."""

    _fields_ = (
        ("call", Call), ("x", c_void_p), ("more", c_void_p), ("out", c_void_p), ("stream", c_void_p),
        ("weight", c_void_p), ("x_stride", c_uint64), ("split_stride", c_uint64), ("stream_stride", c_uint64),
        ("rows", c_int), ("width", c_int), ("vectors", c_int), ("splits", c_int), ("eps", c_float), ("offset", c_float),
    )


class Sent(ctypes.Structure):
    """A sum of what copies have brought."""

    _fields_ = (("sum", Sum), ("flags", c_uint64), ("slots", c_uint64), ("slot_bytes", c_uint64), ("mark", c_uint32))


class Gather(ctypes.Structure):
    """A gather, an exchange or a broadcast."""

    _fields_ = (
        ("call", Call), ("x", c_void_p), ("out", c_void_p), ("words", c_uint64), ("columns", c_uint64),
        ("root", c_int),
    )


@cache
def begin_compiling(ranks: int, dtype: torch.dtype, device: torch.device) -> list[Future[bytes]]:
    """Compile all kernels for a type into the cache on disk, a thread for each part: NVRTC does not hold Python's lock.
    Results raise `CudaSourceError` and `OSError`."""
    sources = parts.list_sources(ranks, TYPES[dtype], torch.cuda.get_device_capability(device))
    threads = ThreadPoolExecutor(len(sources), "collectives")
    compiled = [threads.submit(compile_source, *source) for source in sources]
    threads.shutdown(wait=False)
    return compiled


@cache_compiled
def find_kernel(entry: str, ranks: int, dtype: torch.dtype, device: torch.device) -> CudaKernel:
    """A kernel of the source, compiled (seconds) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel(parts.SOURCE, device, 0, entry, **parts.list_macros(entry, ranks, TYPES[dtype]))


class Kernels:
    """Those for ``ranks`` on one of their devices. ``most_blocks`` bounds the grids, for ranks that share it."""

    def __init__(self, ranks: int, device: torch.device, most_blocks: int = MOST_BLOCKS):
        self.ranks, self.device, self._most_blocks = ranks, device, most_blocks
        properties = torch.cuda.get_device_properties(device)
        self.num_sms, self._is_dependent = properties.multi_processor_count, properties.major >= 9

    def prepare(self, dtype: torch.dtype) -> None:
        """See `Collectives.prepare`."""
        for compiled in begin_compiling(self.ranks, dtype, self.device):
            compiled.result()
        for entry in parts.ENTRIES:
            find_kernel(entry, self.ranks, dtype, self.device)

    def launch(self, entry: str, dtype: torch.dtype, rows: int, threads: int, call: ctypes.Structure) -> None:
        """Launch a kernel with a block for each row, or fewer that take several."""
        kernel = find_kernel(entry, self.ranks, dtype, self.device)
        # all blocks at once: they wait for the same blocks of other ranks
        most = min(self._most_blocks, count_resident(kernel, threads) * self.num_sms, MOST_BLOCKS)
        kernel.launch(min(rows, most), threads, call, is_dependent=self._is_dependent)


@cache
def count_resident(kernel: CudaKernel, threads: int) -> int:
    """`CudaKernel.count_resident`, remembered."""
    return kernel.count_resident(threads)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether every row begins at a whole vector."""
    return x.data_ptr() % VECTOR == 0 and all(stride * x.element_size() % VECTOR == 0 for stride in x.stride()[:-1])


def is_flat(x: torch.Tensor) -> bool:
    """Whether it is one row of memory that begins at a whole vector."""
    return x.is_contiguous() and x.data_ptr() % VECTOR == 0
