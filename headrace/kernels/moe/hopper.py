"""Experts in codes for more than 16 tokens on Hopper, in five kernels: pairs sorted by expert, their rows gathered (in
FP8 for FP8 weights), gate and up with the activation, down with the routing weights, the sum over a token's choices.
Refuses codes that `coded_linear.hopper.multiply` does not take.

T tokens, k choices, N = T * k pairs, X experts, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from headrace.kernels.block_scaled import LARGEST
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.hopper import DEPTH, Gated, Sorted, Tile, multiply
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.moe import CodedStack, coded, count_rows
from headrace.kernels.moe.experts import BLOCK_SUM, FEW_TOKENS, _sum_kernel
from headrace.kernels.moe.triton import group_pairs
from headrace.kernels.rowwise import Gate

MOST_CODE = tl.constexpr(LARGEST)
GATHER_BLOCK, GATHER_ROWS, MANY_PAIRS = 1024, 4, 4096
"""Columns of a program that gathers, and rows where there are more than so many: it then asks for 8 KB at once."""
FEW_MXFP4_TOKENS = 4
"""Up to so many tokens `coded` is faster in MXFP4. On an H200, microseconds with choices and sums, of 4, 6, 8 and 16
tokens: gpt-oss-20b 80, 193, 209, 303 in `coded` and 105, 119, 130, 172 here; DeepSeek-V4-Flash 150, 327, 414, 733 and
129, 177, 221, 380."""


@triton.jit(do_not_specialize=["num_pairs"])
def _gather_kernel(
    x_ptr, order_ptr, ends_ptr, out_ptr, scales_ptr, x_stride, num_pairs, D: tl.constexpr, TOP_K: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EVENS_FIRST: tl.constexpr,
    PDL: tl.constexpr
):
    """Rows of x in the order of pairs, ROWS by BLOCK columns a program; with GROUP in FP8, with a scale [D / GROUP, N]
    for each group. EVENS_FIRST: of each 16 columns the even ones come first; D is then a multiple of 16."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    is_there = row < tl.load(ends_ptr + X - 1)  # entries of pairs without an expert are arbitrary
    mask = is_there[:, None] & (column < D)[None, :]
    token = (tl.load(order_ptr + row, mask=is_there, other=0) // TOP_K).to(tl.int64)
    x = tl.load(x_ptr + token[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    if GROUP:
        groups = tl.reshape(x.to(tl.float32), [ROWS, BLOCK // GROUP, GROUP])
        scale = tl.max(tl.abs(groups), axis=2) / MOST_CODE
        scale = tl.where(scale > 0, scale, 1.0)
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(
            scales_ptr + group[None, :] * num_pairs + row[:, None], scale,
            mask=is_there[:, None] & (group * GROUP < D)[None, :]
        )
        x = tl.reshape(groups / scale[:, :, None], [ROWS, BLOCK])
    if EVENS_FIRST:
        x = tl.reshape(tl.permute(tl.reshape(x, [ROWS, BLOCK // 16, 8, 2]), [0, 1, 3, 2]), [ROWS, BLOCK])
    tl.store(out_ptr + row[:, None].to(tl.int64) * D + column[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, top_k: int, *, evens_first: bool
) -> torch.Tensor:
    """Rows of x [T, D] in the order of pairs, [N, D]; those from the last end on are not written. ``evens_first``: of
    each 16 columns the even ones come first, as `sorted_rows.multiply` wants rows; D is a multiple of 16."""
    out, _ = _gather(x, order, ends, top_k, is_fp8=False, evens_first=evens_first)
    return out


def _gather(
    x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, top_k: int, *, is_fp8: bool, evens_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gather_rows`; in FP8, with a scale [ceil(D / 128), N] for each 128 of a row. Else the second is the first."""
    pairs, width = len(order), x.shape[1]
    out = torch.empty((pairs, width), dtype=torch.float8_e4m3fn if is_fp8 else x.dtype, device=x.device)
    scales = torch.empty((ceil_div(width, DEPTH), pairs), dtype=torch.float32, device=x.device) if is_fp8 else out
    rows = GATHER_ROWS if pairs > MANY_PAIRS else 1
    _gather_kernel[(ceil_div(pairs, rows), ceil_div(width, GATHER_BLOCK))](
        x, order, ends, out, scales, x.stride(0), pairs, D=width, TOP_K=top_k, X=len(ends), ROWS=rows,
        BLOCK=GATHER_BLOCK, GROUP=DEPTH if is_fp8 else 0, EVENS_FIRST=evens_first, PDL=True, num_warps=4,
        launch_pdl=True,
    )
    return out, scales


@cache
def choose_tiles(num_tokens: int, top_k: int, num_experts: int, *, is_fp8: bool) -> tuple[Tile, Tile]:
    """Of gate and up, and of down: enough rows for all pairs of nearly every expert, so that few matrices are read
    twice. Measured on an H200 with up to 256 tokens of gpt-oss-20b and Qwen3-30B-A3B, and 64 of DeepSeek-V4."""
    most, each = count_rows(num_tokens, top_k, num_experts), num_tokens * top_k / num_experts
    rows = next((rows for rows in (8, 16, 32) if most <= rows), 32 if each <= 40 else 64)
    return Tile(rows, 128, 3, num_warps=8) if is_fp8 else Tile(rows, 64, 4), Tile(rows, 128, 4)


def takes(codes: DeviceCodes) -> bool:
    """Whether the products here take stacked codes."""
    if codes.order is not None or codes.zeros is not None:
        return False
    if codes.code is Code.E2M1:
        return codes.has_powers and codes.rows == 1 and codes.in_features % 8 == 0  # rows of x in steps of 16 bytes
    return (
        codes.code is Code.E4M3 and codes.in_features % 16 == 0 and not codes.has_pairs
        and (codes.scales.shape[1] == 1 or codes.group == DEPTH)
    )


def run_experts_pdl(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate,
) -> torch.Tensor:
    """See `CODED_EXPERTS`. Few tokens, and codes that are not taken here, are left to `coded`."""
    few = FEW_MXFP4_TOKENS if gate_up[0].code is Code.E2M1 else FEW_TOKENS
    if len(ids) > few and takes(gate_up[0]) and takes(down[0]):
        return run_many(x, ids, weights, gate_up, down, gate)
    return coded.run_experts_pdl(x, ids, weights, gate_up, down, gate)


def run_many(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate,
    tiles: tuple[Tile, Tile] | None = None,
) -> torch.Tensor:
    """See `CODED_EXPERTS`; F is a multiple of 8. Rows are rounded to FP8 for FP8 weights, with a scale per 128."""
    (num_tokens, top_k), width = ids.shape, x.shape[1]
    num_experts = down[0].out_features // width
    order, _, ends = group_pairs(ids, num_experts, pdl=True)
    is_fp8 = down[0].code is Code.E4M3
    first, second = tiles or choose_tiles(num_tokens, top_k, num_experts, is_fp8=is_fp8)
    gathered = _gather(x, order, ends, top_k, is_fp8=is_fp8)
    rows = Fp8Rows(*gathered) if is_fp8 else gathered[0]
    assert first.outputs == DEPTH or not is_fp8, "a tile's outputs have one scale"
    gated = multiply(rows, *gate_up, first, gated=Gated(*gate), groups=Sorted(ends), is_fp8=is_fp8)
    parts = multiply(gated, *down, second, groups=Sorted(ends, order, weights.flatten()))
    assert isinstance(parts, torch.Tensor), "plain sums"
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    _sum_kernel[(num_tokens, ceil_div(width, BLOCK_SUM))](
        parts, ids, out, D=width, TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), BLOCK=BLOCK_SUM, PDL=True, num_warps=4,
        launch_pdl=True
    )
    return out
