"""Experts whose matrices are kept in codes, from choices to sums, in three kernels, as `experts` does with plain ones.

T tokens, k choices, N = T * k pairs, X experts, D hidden size, F expert intermediate size. Matrices are `DeviceCodes`
with experts stacked, [X * O, I]. A program takes OUTPUTS outputs of one expert for up to ROWS of its pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.pieces import find_constants, multiply, point_at
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.moe import CodedStack, Gate
from headrace.kernels.moe.experts import BLOCK_SUM, FEW_TOKENS, MANY_ROWS, _find_rows, _sum_kernel
from headrace.kernels.moe.triton import group_pairs
from headrace.kernels.rowwise.triton import GATES, apply_gate


@dataclass(frozen=True)
class Tile:
    """A program computes ``outputs`` by ``rows`` pairs."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


@cache
def choose_tile(num_tokens: int, top_k: int, num_experts: int, *, is_half: bool) -> Tile:
    """As `experts.choose_tile`: enough rows for all pairs of nearly every expert."""
    each = num_tokens * top_k / num_experts
    rows = FEW_TOKENS if num_tokens <= FEW_TOKENS or each + 2 * each**0.5 <= FEW_TOKENS else MANY_ROWS
    if not is_half:
        return Tile(rows, 32, 4, 2)
    if rows == FEW_TOKENS:
        return Tile(rows, 64, 4, 5)
    return Tile(rows, 128, 8, 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, out_ptr, x_stride,
    num_tokens, limit, alpha, up_offset, F: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr,
    BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    KIND: tl.constexpr, SHORT: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    WHOLE: tl.constexpr, SAME: tl.constexpr, FAST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    # out [N, F] is indexed by pair: every row has one writer, and no atomics are needed
    wait_for_previous(PDL)
    expert, pair, is_there = _find_rows(
        ids_ptr, order_ptr, ends_ptr, tl.program_id(1), num_tokens, TOP_K, BLOCK_K, X, BLOCK_X, ROWS, FEW
    )
    if expert >= 0:
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        # gate_up [X * 2F, K]: of each expert F rows of gate, then F of up
        row = expert.to(tl.int64) * (2 * F) + column
        gate, up = multiply(
            x_ptr, pair // TOP_K, x_stride, is_there, (codes_ptr, scales_ptr, zeros_ptr, values_ptr), row, row + F,
            column < F, 0, K, True, K, G, STRIDE, GROUP, SHARED, KIND, SHORT, POWERS, PAIRS, HAS_ZEROS, WHOLE,
            SAME, FAST, WIDTH, ROWS, OUTPUTS
        )
        if HAS_BIAS:
            gate += tl.load(bias_ptr + row, mask=column < F, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + row + F, mask=column < F, other=0.0).to(tl.float32)[:, None]
        out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
        tl.store(
            out_ptr + pair[None, :].to(tl.int64) * F + column[:, None], out.to(out_ptr.dtype.element_ty),
            mask=is_there[None, :] & (column < F)[:, None]
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, factors_ptr, out_ptr,
    num_tokens, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr, BLOCK_X: tl.constexpr,
    HAS_BIAS: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    STRIDE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr,
    POWERS: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr, WHOLE: tl.constexpr, SAME: tl.constexpr,
    FAST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):
    wait_for_previous(PDL)
    expert, pair, is_there = _find_rows(
        ids_ptr, order_ptr, ends_ptr, tl.program_id(1), num_tokens, TOP_K, BLOCK_K, X, BLOCK_X, ROWS, FEW
    )
    if expert >= 0:
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        # down [X * D, K]; x is the [N, K] of `_gate_up_kernel`, by pair
        row = expert.to(tl.int64) * D + column
        total, _ = multiply(
            x_ptr, pair, K, is_there, (codes_ptr, scales_ptr, zeros_ptr, values_ptr), row, row, column < D, 0, K, False,
            K, G, STRIDE, GROUP, SHARED, KIND, SHORT, POWERS, PAIRS, HAS_ZEROS, WHOLE, SAME, FAST, WIDTH, ROWS, OUTPUTS
        )
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=column < D, other=0.0).to(tl.float32)[:, None]
        # routing weights are applied here, in float32, so that the sum only adds
        total *= tl.load(factors_ptr + pair, mask=is_there, other=0.0)[None, :]
        tl.store(
            out_ptr + pair[None, :].to(tl.int64) * D + column[:, None], total,
            mask=is_there[None, :] & (column < D)[:, None]
        )


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate, *,
    pdl: bool = False,
) -> torch.Tensor:
    """See `CODED_EXPERTS`."""
    (num_tokens, top_k), width, inner = ids.shape, x.shape[1], down[0].in_features
    num_experts = down[0].out_features // width  # experts are stacked along outputs
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    few, pairs = num_tokens <= FEW_TOKENS, num_tokens * top_k
    # stand-ins where nothing is sorted: the kernels do not read them
    order, _, ends = (ids, ids, ids) if few else group_pairs(ids, num_experts, pdl=pdl)
    # [N, F] in x's dtype, [N, D] in float32, both by pair; rows of pairs without an expert are never written
    gated = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((pairs, width), dtype=torch.float32, device=x.device)
    tile = choose_tile(num_tokens, top_k, num_experts, is_half=x.element_size() == 2)
    # one per pair, or the most that any choice of experts needs: one partly filled tile per expert
    tiles = pairs if few else min(pairs, pairs // tile.rows + num_experts)
    shape = dict(
        TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), X=num_experts, BLOCK_X=next_power_of_2(num_experts), FEW=few,
        ROWS=tile.rows, OUTPUTS=tile.outputs, num_warps=tile.num_warps, num_stages=tile.num_stages, PDL=pdl,
        launch_pdl=pdl,
    )
    codes, bias = gate_up
    _gate_up_kernel[(ceil_div(inner, tile.outputs), tiles)](
        x, *point_at(codes, x.dtype), x if bias is None else bias, ids, order, ends, gated, x.stride(0), num_tokens,
        *gate[1:], F=inner, HAS_BIAS=bias is not None, GATE=GATES[gate.kind], **find_constants(codes, x.dtype), **shape,
    )
    codes, bias = down
    _down_kernel[(ceil_div(width, tile.outputs), tiles)](
        gated, *point_at(codes, x.dtype), x if bias is None else bias, ids, order, ends, weights, parts, num_tokens,
        D=width, HAS_BIAS=bias is not None, **find_constants(codes, x.dtype), **shape,
    )
    _sum_kernel[(num_tokens, ceil_div(width, BLOCK_SUM))](
        parts, ids, out, D=width, TOP_K=top_k, BLOCK_K=shape["BLOCK_K"], BLOCK=BLOCK_SUM, PDL=pdl, num_warps=4,
        launch_pdl=pdl
    )
    return out


run_experts_pdl = partial(run_experts, pdl=True)
