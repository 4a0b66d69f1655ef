"""Pages of 8-bit floats, expanded for kernels that read keys and values in the dtype of the queries: those of a step's
chunks, one layer after the other, into memory that the layers of a cache group share.

R requests, P pages, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, wait_for_previous

ROOM_BYTES = 128 << 20
"""Of keys and values together: 32,768 tokens of 8 heads of 128 dims."""
BLOCK = 4096
"""Elements of a program."""


@dataclass(frozen=True)
class ExpandedStep:
    """Where pages of a step go. ``table`` [R, columns] int32 is a page table of the expanded ones; ``bounds`` [R, 2]
    int32 are the first entry of each request that is read, and the one behind the last: others have any number.
    ``most`` is the largest number of entries; requests before ``first`` have none."""

    table: torch.Tensor
    bounds: torch.Tensor
    most: int
    first: int


@triton.jit(
    do_not_specialize=["from_stride", "to_stride", "bounds_stride"],
    do_not_specialize_on_alignment=["from_ptr", "to_ptr", "bounds_ptr"],
)
def _expand_kernel(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, from_ptr, to_ptr, bounds_ptr, from_stride, to_stride, bounds_stride,
    page_stride_k, page_stride_v, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    # programs of a page are adjacent: first those of its keys, then those of its values
    part, entry, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous(PDL)
    own = bounds_ptr + request * bounds_stride
    entry += tl.load(own)
    if entry < tl.load(own + 1):
        source = tl.load(from_ptr + request.to(tl.int64) * from_stride + entry).to(tl.int64)
        target = tl.load(to_ptr + request.to(tl.int64) * to_stride + entry).to(tl.int64) * SIZE
        parts: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
        at = part % parts * BLOCK + tl.arange(0, BLOCK)
        if part < parts:
            x = tl.load(k_ptr + source * page_stride_k + at, mask=at < SIZE, other=0.0)
            tl.store(k_out_ptr + target + at, x.to(k_out_ptr.dtype.element_ty), mask=at < SIZE)
        else:
            x = tl.load(v_ptr + source * page_stride_v + at, mask=at < SIZE, other=0.0)
            tl.store(v_out_ptr + target + at, x.to(v_out_ptr.dtype.element_ty), mask=at < SIZE)


class ExpandedPages:
    """Room for the expanded pages of one step. ``k`` and ``v`` [P, page_size, K, E] have what `fill` was last called
    with."""

    def __init__(
        self, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *,
        room_bytes: int = ROOM_BYTES
    ):
        self.page_size = page_size
        shape = (page_size, num_kv_heads, head_dim)
        num_pages = max(1, room_bytes // (2 * dtype.itemsize * page_size * num_kv_heads * head_dim))
        self.k, self.v = (torch.empty((num_pages, *shape), dtype=dtype, device=device) for _ in range(2))

    def plan(
        self, query_lens: Sequence[int], kv_lens: Sequence[int], *, first: int = 0, window: int = 0
    ) -> ExpandedStep | None:
        """The pages that chunks of ``query_lens`` at the end of ``kv_lens`` read, those of requests from ``first`` on,
        with a sliding ``window`` (0: all); None where there is no room for them. Does not wait for the device."""
        lens, own = np.array((query_lens, kv_lens), dtype=np.int32), np.arange(len(kv_lens)) >= first
        oldest = np.maximum(lens[1] - lens[0] - window + 1, 0) if window else np.zeros_like(lens[1])
        begins, ends = oldest // self.page_size * own, -(-lens[1] // self.page_size) * own
        counts = ends - begins
        if int(counts.sum()) > len(self.k):
            return None
        # 32 bits throughout: behind a window, the table is as wide as contexts are long
        starts = counts.cumsum(dtype=np.int32) - counts - begins
        table = starts[:, None] + np.arange(int(ends.max()), dtype=np.int32)
        packed = torch.from_numpy(np.concatenate((begins[:, None], ends[:, None], table), axis=1))
        if self.k.is_cuda:
            packed = packed.pin_memory()
        sent = packed.to(self.k.device, non_blocking=True)
        return ExpandedStep(sent[:, 2:], sent[:, :2], int(counts.max()), first)

    def fill(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor, step: ExpandedStep, *,
        pdl: bool = False
    ) -> None:
        """Expand the pages of ``page_table`` [R, *] int32, each of which is contiguous."""
        size, own = self.k[0].numel(), slice(step.first, None)
        source, target, bounds = page_table[own], step.table[own], step.bounds[own]
        _expand_kernel[(2 * ceil_div(size, BLOCK), step.most, len(source))](
            k_pages, v_pages, self.k, self.v, source, target, bounds, source.stride(0), target.stride(0),
            bounds.stride(0), k_pages.stride(0), v_pages.stride(0), SIZE=size, BLOCK=BLOCK, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )
