"""Collectives by own CUDA C++ (``csrc/cuda/collective.cu``, which says how they work).

W ranks, T tokens, D hidden size, S split-K partial sums. A vector is 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_uint64
from dataclasses import dataclass

import torch

from headrace.kernels.collective import MOST_RANKS, UNMEASURED, LentSum, Limits
from headrace.kernels.collective.calls import (
    ABORTED,
    BUDGET,
    CHUNK,
    CONTROL_BYTES,
    HOST_WORDS,
    MOST_BLOCKS,
    TYPES,
    VECTOR,
    Call,
    Gather,
    Kernels,
    Sum,
    is_aligned,
    is_flat,
)
from headrace.kernels.collective.parts import MOST_THREADS, MOST_WIDTH, ceil_div, shape_row
from headrace.kernels.collective.sent import SentSums, room_for

BUDGET_SECONDS = 10.0


@dataclass(frozen=True)
class Room:
    """Bytes of half a mailbox, for sums and for gathers, and of the ring that `SentSums` uses. A sum in two steps takes
    up to twice its size; the ring holds what two sums of a step are."""

    sums: int = 128 << 20
    gathers: int = 8 << 20
    sent: int = 256 << 20

    @property
    def before_sent(self) -> int:
        """Bytes of a mailbox but for the ring and its flags, which come last."""
        return CONTROL_BYTES + 2 * (self.sums + self.gathers)

    def mailbox(self, ranks: int) -> int:
        """Bytes of a mailbox."""
        return self.before_sent + room_for(ranks, self.sent)


ROOM = Room()


class PushCollectives:
    """See `headrace.kernels.collective.Collectives`. ``most_blocks`` bounds the grids, for ranks that share a device.
    """

    def __init__(
        self, mailboxes: Sequence[int], rank: int, device: torch.device, *, room: Room = ROOM,
        limits: Limits = UNMEASURED, most_blocks: int = MOST_BLOCKS,
    ):
        self.rank, self.size, self.room = rank, len(mailboxes), room
        self.limits = limits
        self._kernels = Kernels(self.size, device, most_blocks)
        # late peers, aborted, budget in milliseconds: see `Host` in the source
        self._host = torch.zeros(HOST_WORDS, dtype=torch.int32).pin_memory()
        self._words = (c_int * HOST_WORDS).from_address(self._host.data_ptr())
        self.set_budget(BUDGET_SECONDS)
        addresses = (c_uint64 * MOST_RANKS)(*mailboxes)
        self._call = Call(addresses, self._host.data_ptr(), room.sums, room.gathers, rank)
        self.large = SentSums(self._kernels, self._call, mailboxes, room.before_sent, room.sent)

    def prepare(self, dtype: torch.dtype) -> None:
        """See `Collectives`."""
        self._kernels.prepare(dtype)

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

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `Collectives`."""
        num_bytes = x.numel() * x.element_size()
        steps = self.count_steps(num_bytes, self.limits.sums) if x.dtype in TYPES else 0
        if not steps or num_bytes % VECTOR or not all(map(is_flat, (x,) if more is None else (x, more))):
            return None
        out, vectors = torch.empty_like(x), num_bytes // VECTOR
        threads, per_thread = self._shape_flat(vectors)
        width = threads * per_thread
        call = Sum(
            call=self._call, x=x.data_ptr(), more=0 if more is None else more.data_ptr(), out=out.data_ptr(),
            x_stride=width * VECTOR, rows=ceil_div(vectors, width), width=width, vectors=vectors,
        )
        self._launch(f"sum_{per_thread}_0_{steps}", x.dtype, call.rows, threads, call)
        return out

    def lend_sum(self, num_bytes: int, dtype: torch.dtype) -> LentSum | None:
        """See `Collectives`."""
        is_taken = dtype in TYPES and num_bytes % VECTOR == 0 and self.count_steps(num_bytes, self.limits.sums) == 1
        return LentSum(self.size, self._call, self.large.meet) if is_taken else None

    def _shape_flat(self, vectors: int) -> tuple[int, int]:
        """Threads of a block and vectors of a thread and round: first one for each, over all multiprocessors."""
        if vectors <= self._kernels.num_sms * MOST_THREADS:
            return min(MOST_THREADS, max(64, ceil_div(ceil_div(vectors, self._kernels.num_sms), 32) * 32)), 1
        return MOST_THREADS, 2 if self.size <= 4 else 1

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Collectives`."""
        (rows, inputs), item = stream.shape, stream.element_size()
        steps = self.count_steps(rows * inputs * item, self.limits.fused) if stream.dtype in TYPES else 0
        width = inputs * item // VECTOR
        if (
            not steps or inputs * item % VECTOR or width > MOST_WIDTH or weight.dtype != stream.dtype
            or x.dtype != (stream.dtype if x.dim() == 2 else torch.float32) or x.stride(-1) != 1
            or stream.stride(1) != 1 or not all(map(is_aligned, (x, stream, weight)))
        ):
            return None
        out = torch.empty((rows, inputs), dtype=stream.dtype, device=stream.device)
        per_thread, threads = shape_row(width)
        splits = len(x) if x.dim() == 3 else 0
        call = Sum(
            call=self._call, x=x.data_ptr(), out=out.data_ptr(), stream=stream.data_ptr(), weight=weight.data_ptr(),
            x_stride=x.stride(-2) * x.element_size(), split_stride=x.stride(0) * x.element_size() if splits else 0,
            stream_stride=stream.stride(0) * item, rows=rows, width=width, vectors=rows * width, splits=splits,
            eps=eps, offset=offset,
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
        threads = min(MOST_THREADS, max(64, ceil_div(ceil_div(packets, self._kernels.num_sms), 32) * 32))
        call = Gather(self._call, x.data_ptr(), out.data_ptr(), words, columns, root)
        self._launch(entry, torch.bfloat16, ceil_div(packets, threads), threads, call)

    def _launch(self, entry: str, dtype: torch.dtype, rows: int, threads: int, call: Sum | Gather) -> None:
        self._kernels.launch(entry, dtype, rows, threads, call)
        self.large.meet()
