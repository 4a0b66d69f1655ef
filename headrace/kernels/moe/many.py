"""Experts in codes for many tokens on Hopper, by own CUDA C++: pairs sorted by expert, their rows gathered, gate and up
with the activation, down, the sum over a token's choices. MXFP4 is multiplied with plain rows, FP8 with rows in FP8.

T tokens, k choices, X experts, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

from itertools import product

import torch

from headrace.kernels.coded_linear import wide
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.fp8_triton import quantise_rows_pdl
from headrace.kernels.coded_linear.hopper import Gated
from headrace.kernels.cuda_source import cache_compiled, fallback
from headrace.kernels.moe import CodedStack, count_rows, hopper, is_few, parts, sorted_rows
from headrace.kernels.moe.pair_order import group_pairs
from headrace.kernels.moe.triton import sum_pairs
from headrace.kernels.rowwise import Gate

FP8_TILE = wide.Tile(256)
LEAST_FP8_EACH, LEAST_MXFP4_EACH = 64, 24
"""Pairs per expert, on average, from which this is faster than `hopper` on an H200."""
MXFP4_ROWS = (48, 64, 96, 128, 256)
"""Of tiles. Experts of fewer rows are left to `parts`."""
PROBE = (16, "")
"""Rows and gate of the kernel that FP8, which `wide` multiplies, is tried with: it tells if there is a compiler."""


def choose_tile(num_tokens: int, top_k: int, num_experts: int) -> sorted_rows.Tile:
    """Of MXFP4: enough rows for all pairs of nearly every expert, so that few matrices are decoded twice. More would
    leave fewer stages: 250 tokens of gpt-oss-20b, of which some experts have more than 48 rows, take 241 us by tiles of
    48 and 245 of 64; spread evenly 198 and 214."""
    most = count_rows(num_tokens, top_k, num_experts)
    return _tile_of(next((rows for rows in MXFP4_ROWS if most <= rows), MXFP4_ROWS[-1]))


def _tile_of(rows: int) -> sorted_rows.Tile:
    return sorted_rows.Tile(rows, 4 if rows <= 96 else 2)


def takes(gate_up: DeviceCodes, down: DeviceCodes) -> bool:
    """Whether the products here take these stacked codes."""
    if parts.takes(gate_up, down):
        return True
    if any(codes.order is not None or codes.has_zeros or codes.in_features % 16 for codes in (gate_up, down)):
        return False
    if any(codes.code is not Code.E4M3 for codes in (gate_up, down)):
        return False
    if all(codes.num_groups == 1 and len(codes.scales) == codes.out_features for codes in (gate_up, down)):
        return True
    return all(
        codes.num_groups > 1 and (codes.rows, codes.group) == (128, 128) and codes.in_features % 128 == 0
        for codes in (gate_up, down)
    )


@cache_compiled
def _can_compile(device: torch.device, code: Code, gate: str) -> bool:
    """Whether own CUDA C++ can be compiled and loaded; if not, with a warning. For MXFP4, compiles all that steps of
    any size need: those of a start are small or the largest, and no request may wait for a compiler."""
    wanted = product(MXFP4_ROWS, ("", gate)) if code is Code.E2M1 else [PROBE]
    with fallback("experts of many tokens run in Triton, or dequantised"):
        for rows, kind in wanted:
            sorted_rows.find_kernel(_tile_of(rows), kind, device)
        return True
    return False


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor | None:
    """See `MANY_CODED_EXPERTS`."""
    (num_tokens, top_k), width = ids.shape, x.shape[1]
    num_experts = down[0].out_features // width
    code, gated = gate_up[0].code, Gated(*gate)
    if not takes(gate_up[0], down[0]) or not _can_compile(x.device, code, gated.kind):
        return None
    order, place, ends = group_pairs(ids, num_experts)
    rows = hopper.gather_rows(x, order, ends, top_k, evens_first=code is Code.E2M1)
    if code is Code.E2M1:
        tile = choose_tile(num_tokens, top_k, num_experts)
        inner = sorted_rows.multiply(rows, *gate_up, ends, tile, gated)
        out = sorted_rows.multiply(inner, *down, ends, tile)
    else:
        out = _run_fp8(rows, ends, gate_up, down, gated)
    return sum_pairs(out, place, weights, ids, None, pdl=True)


def run_experts_pdl(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor:
    """See `CODED_EXPERTS`. MXFP4 of some tokens is left to `parts`; fewer tokens, and codes that are not taken here, to
    `hopper`."""
    (num_tokens, top_k), num_experts = ids.shape, down[0].out_features // x.shape[1]
    is_mxfp4 = gate_up[0].code is Code.E2M1
    least = LEAST_MXFP4_EACH if is_mxfp4 else LEAST_FP8_EACH
    out = None
    if is_mxfp4 and num_tokens > hopper.FEW_MXFP4_TOKENS:
        out = parts.run_experts(x, ids, weights, gate_up, down, gate)
    if out is None and not is_few(num_tokens, top_k, num_experts, least):
        out = run_experts(x, ids, weights, gate_up, down, gate)
    return hopper.run_experts_pdl(x, ids, weights, gate_up, down, gate) if out is None else out


def _run_fp8(
    rows: torch.Tensor, ends: torch.Tensor, gate_up: CodedStack, down: CodedStack, gated: Gated
) -> torch.Tensor:
    group = 128 if gate_up[0].num_groups > 1 else 0
    first = quantise_rows_pdl(rows, group)
    if group:
        second = wide.multiply_to_rows(first, *gate_up, gated=gated, ends=ends)
    else:
        second = quantise_rows_pdl(wide.multiply(first, *gate_up, FP8_TILE, gated=gated, ends=ends))
    return wide.multiply(second, *down, FP8_TILE, ends=ends)
