"""Collectives by own CUDA C++ (``csrc/cuda/collective.cu``, which says how they work).

W ranks, T tokens, D hidden size, S split-K partial sums. A vector is 16 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from headrace.kernels.collective import MOST_RANKS, UNMEASURED, Limits
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, compile_source

VECTOR, CHUNK = 16, 8
"""Bytes of a vector, and vectors that have one owner: as in the source, like the next three."""
CONTROL_BYTES, MOST_THREADS, MOST_BLOCKS = 16384, 512, 1024
HOST_WORDS = MOST_RANKS + 2
ABORTED, BUDGET = MOST_RANKS, MOST_RANKS + 1
"""Places among the host's words."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
VECTORS = (1, 2, 4)
"""Of a thread and row."""
BUDGET_SECONDS = 10.0


@dataclass(frozen=True)
class Room:
    """Bytes of half a mailbox, for sums and for gathers. A sum in two steps takes up to twice its size."""

    sums: int = 128 << 20
    gathers: int = 8 << 20

    @property
    def mailbox(self) -> int:
        """Bytes of a mailbox."""
        return CONTROL_BYTES + 2 * (self.sums + self.gathers)


ROOM = Room()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. That of `headrace.kernels.launch` needs Triton, and every engine imports this module."""
    return -(-a // b)


class _Call(ctypes.Structure):
    _fields_ = (
        ("mailboxes", c_uint64 * MOST_RANKS), ("host", c_uint64), ("sum_bytes", c_uint64), ("gather_bytes", c_uint64),
        ("rank", c_int),
    )


class _Sum(ctypes.Structure):
    _fields_ = (
        ("call", _Call), ("x", c_void_p), ("out", c_void_p), ("stream", c_void_p), ("weight", c_void_p),
        ("x_stride", c_uint64), ("split_stride", c_uint64), ("stream_stride", c_uint64), ("rows", c_int),
        ("width", c_int), ("vectors", c_int), ("splits", c_int), ("eps", c_float), ("offset", c_float),
    )


class _Gather(ctypes.Structure):
    _fields_ = (
        ("call", _Call), ("x", c_void_p), ("out", c_void_p), ("words", c_uint64), ("columns", c_uint64),
        ("root", c_int),
    )


@cache_compiled
def find_kernel(entry: str, ranks: int, dtype: torch.dtype, device: torch.device) -> CudaKernel:
    """A kernel of the source, compiled (seconds) unless cached. Raises `CudaSourceError` and `OSError`."""
    major, minor = torch.cuda.get_device_capability(device)
    options = (f"-arch=sm_{major}{minor}", "-std=c++17", f"-DWORLD={ranks}", f"-DTYPE={TYPES[dtype]}")
    with torch.cuda.device(device):
        return CudaKernel(compile_source("collective", options), entry, 0)


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % VECTOR == 0 and all(stride * x.element_size() % VECTOR == 0 for stride in x.stride()[:-1])


class PushCollectives:
    """See `headrace.kernels.collective.Collectives`. ``most_blocks`` bounds the grids, for ranks that share a device.
    """

    def __init__(
        self, mailboxes: Sequence[int], rank: int, device: torch.device, *, room: Room = ROOM,
        limits: Limits = UNMEASURED, most_blocks: int = MOST_BLOCKS,
    ):
        self.rank, self.size, self.device, self.room = rank, len(mailboxes), device, room
        self.limits = limits
        self._most_blocks = most_blocks
        # late peers, aborted, budget in milliseconds: see `Host` in the source
        self._host = torch.zeros(HOST_WORDS, dtype=torch.int32).pin_memory()
        self._words = (c_int * HOST_WORDS).from_address(self._host.data_ptr())
        self.set_budget(BUDGET_SECONDS)
        addresses = (c_uint64 * MOST_RANKS)(*mailboxes)
        self._call = _Call(addresses, self._host.data_ptr(), room.sums, room.gathers, rank)
        properties = torch.cuda.get_device_properties(device)
        self._num_sms, self._is_dependent = properties.multi_processor_count, properties.major >= 9

    def prepare(self, dtype: torch.dtype) -> None:
        """See `Collectives`."""
        plain = ("gather", "exchange")
        for entry in (*plain, *(f"sum_{n}_{norm}_{steps}" for n in VECTORS for norm in (0, 1) for steps in (1, 2))):
            find_kernel(entry, self.size, torch.bfloat16 if entry in plain else dtype, self.device)

    def set_budget(self, seconds: float) -> None:
        """See `Collectives`."""
        self._words[BUDGET] = max(1, int(seconds * 1000))

    def abort(self) -> None:
        """See `Collectives`."""
        self._words[ABORTED] = 1

    @property
    def late(self) -> list[int]:
        """Ranks that this one has waited for in vain."""
        return [rank for rank in range(self.size) if self._words[rank]]

    @property
    def failure(self) -> str:
        """See `Collectives`."""
        if not any(self._words[: ABORTED + 1]):
            return ""
        if late := self.late:
            return f"rank {self.rank} waited in vain for rank {', '.join(map(str, late))}"
        return "collectives were aborted"

    def two_step_bytes(self, num_bytes: int) -> int:
        """Room that a sum in two steps takes: see `Half` in the source."""
        chunks = ceil_div(num_bytes, VECTOR * CHUNK)
        return num_bytes + (self.size - 1) * (ceil_div(chunks, self.size) + 1) * CHUNK * VECTOR

    def count_steps(self, num_bytes: int, limit: int) -> int:
        """In how many steps a tensor is summed, 1 or 2; 0: not here."""
        if num_bytes == 0 or num_bytes > limit:
            return 0
        if num_bytes <= self.limits.one_step and num_bytes * (self.size - 1) <= self.room.sums:
            return 1
        return 2 if self.two_step_bytes(num_bytes) <= self.room.sums else 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives`."""
        num_bytes = x.numel() * x.element_size()
        steps = self.count_steps(num_bytes, self.limits.sums) if x.dtype in TYPES else 0
        if not steps or num_bytes % VECTOR or not x.is_contiguous() or x.data_ptr() % VECTOR:
            return None
        out, vectors = torch.empty_like(x), num_bytes // VECTOR
        threads, per_thread = self._shape_flat(vectors)
        width = threads * per_thread
        call = _Sum(
            self._call, x.data_ptr(), out.data_ptr(), 0, 0, width * VECTOR, 0, 0, ceil_div(vectors, width), width,
            vectors, 0, 0.0, 0.0,
        )
        self._launch(f"sum_{per_thread}_0_{steps}", x.dtype, call.rows, threads, call)
        return out

    def _shape_flat(self, vectors: int) -> tuple[int, int]:
        """Threads of a block and vectors of a thread and round: first one for each, over all multiprocessors."""
        if vectors <= self._num_sms * MOST_THREADS:
            return min(MOST_THREADS, max(64, ceil_div(ceil_div(vectors, self._num_sms), 32) * 32)), 1
        return MOST_THREADS, 2 if self.size <= 4 else 1

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Collectives`."""
        (rows, inputs), item = stream.shape, stream.element_size()
        steps = self.count_steps(rows * inputs * item, self.limits.fused) if stream.dtype in TYPES else 0
        width = inputs * item // VECTOR
        if (
            not steps or inputs * item % VECTOR or width > MOST_THREADS * VECTORS[-1] or weight.dtype != stream.dtype
            or x.dtype != (stream.dtype if x.dim() == 2 else torch.float32) or x.stride(-1) != 1
            or stream.stride(1) != 1 or not all(map(_is_aligned, (x, stream, weight)))
        ):
            return None
        out = torch.empty((rows, inputs), dtype=stream.dtype, device=stream.device)
        per_thread = next(count for count in VECTORS if width <= count * MOST_THREADS)
        threads = ceil_div(ceil_div(width, per_thread), 32) * 32
        splits = len(x) if x.dim() == 3 else 0
        call = _Sum(
            self._call, x.data_ptr(), out.data_ptr(), stream.data_ptr(), weight.data_ptr(),
            x.stride(-2) * x.element_size(), x.stride(0) * x.element_size() if splits else 0, stream.stride(0) * item,
            rows, width, rows * width, splits, eps, offset,
        )
        self._launch(f"sum_{per_thread}_1_{steps}", stream.dtype, rows, threads, call)
        return out, stream

    def all_gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives`."""
        if not self._can_gather(x) or x.shape[-1] * x.element_size() % 4:
            return None
        out = torch.empty((*x.shape[:-1], self.size * x.shape[-1]), dtype=x.dtype, device=x.device)
        self._gather(x, out, -1)
        return out

    def exchange(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives`."""
        if not x.is_contiguous() or not self._can_gather(x[0]) or x[0].numel() * x.element_size() % 4:
            return None
        out = torch.empty_like(x)
        self._gather(x[0], out, -1, "exchange")
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives`."""
        if not self._can_gather(x) or x.numel() * x.element_size() % 4:
            return None
        self._gather(x, x, 0)
        return x

    def _can_gather(self, x: torch.Tensor) -> bool:
        # a packet carries as many bytes of tags as of data
        num_bytes = x.numel() * x.element_size()
        room = 2 * (num_bytes + 4) * (self.size - 1) <= self.room.gathers
        return 0 < num_bytes <= self.limits.gathers and room and x.is_contiguous() and x.data_ptr() % 4 == 0

    def _gather(self, x: torch.Tensor, out: torch.Tensor, root: int, entry: str = "gather") -> None:
        """``x``: what goes to each rank; in an exchange the part for the first of them."""
        words = x.numel() * x.element_size() // 4
        is_flat = x.dim() == 0 or root >= 0 or entry == "exchange"
        columns = words if is_flat else x.shape[-1] * x.element_size() // 4
        packets = ceil_div(words, 2)
        threads = min(MOST_THREADS, max(64, ceil_div(ceil_div(packets, self._num_sms), 32) * 32))
        call = _Gather(self._call, x.data_ptr(), out.data_ptr(), words, columns, root)
        self._launch(entry, torch.bfloat16, ceil_div(packets, threads), threads, call)

    def _launch(self, entry: str, dtype: torch.dtype, rows: int, threads: int, call: ctypes.Structure) -> None:
        kernel = find_kernel(entry, self.size, dtype, self.device)
        # all blocks at once: they wait for the same blocks of other ranks
        most = min(self._most_blocks, count_resident(kernel, threads) * self._num_sms, MOST_BLOCKS)
        kernel.launch(min(rows, most), threads, call, is_dependent=self._is_dependent)


@cache
def count_resident(kernel: CudaKernel, threads: int) -> int:
    """`CudaKernel.count_resident`, remembered."""
    return kernel.count_resident(threads)
