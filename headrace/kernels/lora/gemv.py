"""A product of one row or two that also multiplies them with ``a`` of their adapters, in one launch: another would
take longer than reading ``a``; on Hopper (``csrc/cuda/plain_rows.cu``) with all that adapters add.

M rows, N outputs, K inputs, P parts, R ranks of a part.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, wait_for_previous
from headrace.kernels.linear import Norm
from headrace.kernels.linear.rows import LowRank, multiply, normalise_multiply
from headrace.kernels.linear.triton import gemv_rows, gemv_tile, multiply_rows
from headrace.kernels.lora import WHOLE_ROWS, LowRankBank, Reduced, SlotRows
from headrace.kernels.lora.gated import gated_linear


@triton.jit
def _gemv_shrink_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, a_ptr, ranks_ptr, order_ptr, slots_ptr, sums_ptr, x_stride, N: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    # adapters first: they read more before they can begin
    CHUNKS: tl.constexpr = (P * R + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if program >= M * CHUNKS:
        multiply_rows(
            program - M * CHUNKS, x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, N, K, M, BLOCK_N, BLOCK_K, STAGES,
            HAS_BIAS, PDL,
        )
    else:
        place, r = program // CHUNKS, program % CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
        row, slot = tl.load(order_ptr + place), tl.load(slots_ptr + place)
        k = tl.arange(0, BLOCK_K)
        rank = tl.load(ranks_ptr + slot * P + r // R, mask=(slot >= 0) & (r < P * R), other=0)
        # of a part's R rows those up to the adapter's rank are there, rounded up to what expand reads
        is_there = r % R < (rank + 15) // 16 * 16
        a_at = a_ptr + (slot * (P * R) + r)[:, None] * K
        a = tl.load(a_at + k[None, :], mask=is_there[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        sums = tl.sum(a * x[None, :], axis=1)
        for at in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            inside = at + k < K
            a = tl.load(a_at + (at + k)[None, :], mask=is_there[:, None] & inside[None, :], other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row * x_stride + at + k, mask=inside, other=0.0).to(tl.float32)
            sums += tl.sum(a * x[None, :], axis=1)
        tl.store(sums_ptr + place * (P * R) + r, sums, mask=is_there)


def linear_shrink(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bank: LowRankBank, rows: SlotRows, *,
    pdl: bool = False
) -> tuple[torch.Tensor, Reduced] | None:
    """See `LINEAR_SHRINK`."""
    (count, width), outputs = x.shape, weight.shape[0]
    if not 0 < count <= gemv_rows(weight.numel()) or x.stride(1) != 1 or x.dtype != bank.a.dtype:
        return None
    _, parts, ranks, _ = bank.a.shape
    tile = gemv_tile(outputs, width)
    out = torch.empty((count, outputs), dtype=x.dtype, device=x.device)
    sums = torch.empty((1, count, parts * ranks), dtype=torch.float32, device=x.device)
    programs = count * ceil_div(parts * ranks, tile.outputs) + ceil_div(outputs, tile.outputs)
    _gemv_shrink_kernel[(programs,)](
        x, weight, x if bias is None else bias, out, bank.a, bank.ranks, rows.order, rows.slots, sums, x.stride(0),
        N=outputs, K=width, P=parts, R=ranks, M=count, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
        STAGES=tile.num_stages, HAS_BIAS=bias is not None, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )
    return out, Reduced(sums)


linear_shrink_pdl = partial(linear_shrink, pdl=True)


def adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bank: LowRankBank, rows: SlotRows,
    activation: str = "", before: tuple[torch.Tensor, Norm] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """See `ADAPTED_LINEAR`."""
    if rows.num_rows > WHOLE_ROWS:
        whole = None if before is not None else gated_linear(x, weight, bias, bank, rows, activation)
        return None if whole is None else (whole, None)
    if bank.published is None:
        return None
    additions = LowRank(bank.a, bank.b, bank.ranks, bank.ends, rows.order, rows.slots, bank.published)
    if before is not None:
        return normalise_multiply(x, *before, weight, bias, activation, additions)
    out = multiply(x, weight, bias, activation, additions=additions)
    return None if out is None else (out, None)
