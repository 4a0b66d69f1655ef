"""Experts in MXFP4 for many tokens with activations in FP8 on Hopper, by own CUDA C++ (`sorted_rows`): pairs sorted by
expert, a token's row rounded once and stored for each of its pairs, gate and up with the activation, its rows rounded,
down, the sum over a token's choices. Fewer tokens, whose experts are bound by decoding, keep exact activations.

T tokens, k choices, M = T * k pairs, X experts, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl

from headrace.kernels.block_scaled import LARGEST
from headrace.kernels.coded_linear import reference
from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.coded_linear.hopper import Gated
from headrace.kernels.cuda_source import cache_compiled, fallback
from headrace.kernels.launch import next_power_of_2, wait_for_previous
from headrace.kernels.moe import CodedStack, coded_few, count_rows, is_few, parts, sorted_rows
from headrace.kernels.moe.pair_order import group_pairs
from headrace.kernels.moe.triton import sum_pairs
from headrace.kernels.rowwise import Gate

LEAST_EACH = 64
"""Pairs per expert, on average, from which rows are rounded. Fewer gain little: a step of 128 inputs takes about 220
cycles of a warp's integer pipe, and with 64 rows 256 of the tensor cores in bfloat16."""
TILES = tuple(sorted_rows.Tile(rows, groups, is_fp8=True) for rows, groups in ((96, 4), (128, 2), (224, 2), (256, 2)))
"""That of 224 rows has a stage more than that of 256."""
MOST_CODE, LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(reference.LEAST_SCALE)


@triton.jit
def _round_kernel(
    x_ptr, ids_ptr, place_ptr, ends_ptr, codes_ptr, scales_ptr, x_stride, D: tl.constexpr, TOP_K: tl.constexpr,
    X: tl.constexpr, BLOCK: tl.constexpr, SPREADS: tl.constexpr, PDL: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    last = tl.load(ends_ptr + X - 1)
    if SPREADS or row < last:
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
        scale = tl.max(tl.abs(x), 0) / MOST_CODE
        scale = tl.where(scale > LEAST_SCALE, scale, 1.0)
        codes = (x * tl.div_rn(1.0, scale)).to(codes_ptr.dtype.element_ty)
        for choice in range(TOP_K):
            pair = row * TOP_K + choice
            is_there, to = True, row
            if SPREADS:
                is_there = tl.load(ids_ptr + pair) >= 0  # the place of a pair without an expert is arbitrary
                to = tl.load(place_ptr + pair)
            if is_there:
                tl.store(codes_ptr + to.to(tl.int64) * D + column, codes, mask=column < D)
                tl.store(scales_ptr + to, scale)


def _round(
    x: torch.Tensor, ends: torch.Tensor, ids: torch.Tensor | None, place: torch.Tensor | None, *, pdl: bool
) -> Fp8Rows:
    (num_rows, width), top_k = x.shape, 1 if ids is None else ids.shape[1]
    codes = torch.empty((num_rows * top_k, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows * top_k, dtype=torch.float32, device=x.device)
    if num_rows:
        _round_kernel[(num_rows,)](
            x, ends if ids is None else ids, ends if place is None else place, ends, codes, scales, x.stride(0),
            D=width, TOP_K=top_k, X=len(ends), BLOCK=next_power_of_2(width), SPREADS=ids is not None, PDL=pdl,
            num_warps=8, launch_pdl=pdl,
        )
    return Fp8Rows(codes, scales)


def round_pairs(
    x: torch.Tensor, ids: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, *, pdl: bool = True
) -> Fp8Rows:
    """Rows of x [T, D] in FP8 with a scale each, as `QUANTISE_ROWS` rounds, in the order of pairs: [M, D], with
    ``place`` and ``ends`` of `GROUP_PAIRS` of ``ids`` [T, k], contiguous. Those from the last end on are not
    written."""
    return _round(x, ends, ids, place, pdl=pdl)


def round_rows(x: torch.Tensor, ends: torch.Tensor, *, pdl: bool = True) -> Fp8Rows:
    """Rows x [M, F] in FP8 with a scale each; those from the last end on are neither read nor written."""
    return _round(x, ends, None, None, pdl=pdl)


def choose_tile(num_tokens: int, top_k: int, num_experts: int) -> sorted_rows.Tile:
    """Enough rows for all pairs of nearly every expert, so that few matrices are decoded twice."""
    most = count_rows(num_tokens, top_k, num_experts)
    return next((tile for tile in TILES if most <= tile.rows), TILES[-1])


@cache_compiled
def _can_compile(device: torch.device, gate: str) -> bool:
    """Whether the kernels of all tiles can be compiled and loaded; if not, with a warning. All are, as no request may
    wait for a compiler."""
    with fallback("experts of many tokens keep exact activations"):
        for tile, kind in product(TILES, ("", gate)):
            sorted_rows.find_kernel(tile, kind, device)
        return True
    return False


def run_many(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor | None:
    """See `ROUNDED_EXPERTS`, for any number of tokens; None where these products do not take the codes."""
    (num_tokens, top_k), num_experts, gated = ids.shape, down[0].out_features // x.shape[1], Gated(*gate)
    if not parts.takes(gate_up[0], down[0]):
        return None
    if not _can_compile(x.device, gated.kind):
        return None
    ids, tile = ids.contiguous(), choose_tile(num_tokens, top_k, num_experts)
    _order, place, ends = group_pairs(ids, num_experts)
    inner = sorted_rows.multiply(round_pairs(x, ids, place, ends), *gate_up, ends, tile, gated)
    out = sorted_rows.multiply(round_rows(inner, ends), *down, ends, tile)
    return sum_pairs(out, place, weights, ids, None, pdl=True)


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor:
    """See `ROUNDED_EXPERTS`."""
    num_tokens, top_k = ids.shape
    out = None
    if not is_few(num_tokens, top_k, down[0].out_features // x.shape[1], LEAST_EACH):
        out = run_many(x, ids, weights, gate_up, down, gate)
    return coded_few.run_experts(x, ids, weights, gate_up, down, gate) if out is None else out
