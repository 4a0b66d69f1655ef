"""Experts whose matrices are kept in codes, from choices to sums, in a few kernels, as `experts` does with plain ones.
Codes cost arithmetic: where outputs give too few programs to hide it, inputs are split among S programs as well.

T tokens, k choices, N = T * k pairs, X experts, D hidden size, F expert intermediate size. Matrices are `DeviceCodes`
with experts stacked, [X * O, I]. A program takes OUTPUTS outputs of one expert for up to ROWS of its pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.device_codes import BLOCK
from headrace.kernels.coded_linear.pieces import find_constants, multiply, point_at
from headrace.kernels.launch import ceil_div, count_tiles, next_power_of_2, wait_for_previous
from headrace.kernels.moe import CodedStack, count_rows
from headrace.kernels.moe.experts import BLOCK_SUM, FEW_TOKENS, MANY_ROWS, _find_rows
from headrace.kernels.moe.triton import group_pairs
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES, apply_gate

LEAST_PROGRAMS = 800
"""Six for each SM of a large GPU."""
BLOCK_GATE = 256
_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True)
class Tile:
    """A program computes ``outputs`` by ``rows`` pairs."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int

    def split(self, width: int, inputs: int, tiles: int) -> int:
        """Programs that share the inputs of each output, if so many tiles of rows have work."""
        splits, programs = 1, ceil_div(width, self.outputs) * tiles
        while programs * splits < LEAST_PROGRAMS and inputs >= 4 * splits * BLOCK:
            splits *= 2
        return splits


@cache
def choose_tile(num_tokens: int, top_k: int, num_experts: int, *, is_half: bool) -> Tile:
    """As `experts.choose_tile`: enough rows for all pairs of nearly every expert."""
    most = count_rows(num_tokens, top_k, num_experts)
    rows = FEW_TOKENS if num_tokens <= FEW_TOKENS or most <= FEW_TOKENS else MANY_ROWS
    if not is_half:
        return Tile(rows, 32, 4, 2)
    if rows == FEW_TOKENS:
        return Tile(rows, 64, 4, 3)
    return Tile(rows, 128, 8, 3)


@triton.jit(do_not_specialize=["num_tokens", "each"])
def _gate_up_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, out_ptr, sums_ptr,
    x_stride, num_tokens, each, limit, alpha, up_offset, IS_SPLIT: tl.constexpr, F: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr, BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
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
        start = tl.program_id(2) * each * _BLOCK
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        # gate_up [X * 2F, K]: of each expert F rows of gate, then F of up
        row = expert.to(tl.int64) * (2 * F) + column
        gate, up = multiply(
            x_ptr, pair // TOP_K, x_stride, is_there, (codes_ptr, scales_ptr, zeros_ptr, values_ptr), row, row + F,
            column < F, start, tl.minimum(start + each * _BLOCK, K), True, K, G, STRIDE, GROUP, SHARED,
            KIND, SHORT, POWERS, PAIRS, HAS_ZEROS, WHOLE, SAME, FAST, WIDTH, ROWS, OUTPUTS
        )
        if HAS_BIAS:
            has_bias = (column < F) & (start == 0)  # of a sum's parts, the first has the bias
            gate += tl.load(bias_ptr + row, mask=has_bias, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + row + F, mask=has_bias, other=0.0).to(tl.float32)[:, None]
        mask = is_there[None, :] & (column < F)[:, None]
        if IS_SPLIT:  # sums [S, N, 2F] float32, which `_gate_kernel` adds
            at = (tl.program_id(2) * num_tokens * TOP_K + pair).to(tl.int64)[None, :] * (2 * F) + column[:, None]
            tl.store(sums_ptr + at, gate, mask=mask)
            tl.store(sums_ptr + at + F, up, mask=mask)
        else:
            out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
            at = pair[None, :].to(tl.int64) * F + column[:, None]
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_kernel(
    sums_ptr, out_ptr, num_pairs, limit, alpha, up_offset, F: tl.constexpr, SPLITS: tl.constexpr, GATE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Add the parts of a pair's sums and apply the activation."""
    pair, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = sums_ptr + (split * num_pairs + pair) * (2 * F) + column
        gate += tl.load(at, mask=column < F, other=0.0)
        up += tl.load(at + F, mask=column < F, other=0.0)
    out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
    tl.store(out_ptr + pair * F + column, out.to(out_ptr.dtype.element_ty), mask=column < F)


@triton.jit(do_not_specialize=["num_tokens", "each"])
def _down_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, factors_ptr, out_ptr,
    num_tokens, each, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr,
    BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr, K: tl.constexpr,
    G: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr,
    SHORT: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr, WHOLE: tl.constexpr,
    SAME: tl.constexpr,
    FAST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):
    wait_for_previous(PDL)
    expert, pair, is_there = _find_rows(
        ids_ptr, order_ptr, ends_ptr, tl.program_id(1), num_tokens, TOP_K, BLOCK_K, X, BLOCK_X, ROWS, FEW
    )
    if expert >= 0:
        start = tl.program_id(2) * each * _BLOCK
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        # down [X * D, K]; x is the [N, K] of `_gate_up_kernel`, by pair
        row = expert.to(tl.int64) * D + column
        total, _ = multiply(
            x_ptr, pair, K, is_there, (codes_ptr, scales_ptr, zeros_ptr, values_ptr), row, row, column < D, start,
            tl.minimum(start + each * _BLOCK, K), False, K, G, STRIDE, GROUP, SHARED, KIND, SHORT, POWERS, PAIRS,
            HAS_ZEROS, WHOLE, SAME, FAST, WIDTH, ROWS, OUTPUTS
        )
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=(column < D) & (start == 0), other=0.0).to(tl.float32)[:, None]
        # routing weights are applied here, in float32, so that the sum only adds
        total *= tl.load(factors_ptr + pair, mask=is_there, other=0.0)[None, :]
        at = (tl.program_id(2) * num_tokens * TOP_K + pair).to(tl.int64)[None, :] * D + column[:, None]
        tl.store(out_ptr + at, total, mask=is_there[None, :] & (column < D)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _add_parts_kernel(
    parts_ptr, ids_ptr, out_ptr, num_tokens, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """As `experts._sum_kernel`, of parts [S, N, D]."""
    token = tl.program_id(0).to(tl.int64)
    choice, column = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    pair = token * TOP_K + choice
    # pairs without an expert were never computed: their rows hold garbage, maybe NaN, and must not be read
    is_there = tl.load(ids_ptr + pair, mask=choice < TOP_K, other=-1) >= 0
    mask = is_there[:, None] & (column < D)[None, :]
    total = tl.zeros([BLOCK_K, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_tokens * TOP_K + pair)[:, None] * D + column[None, :]
        total += tl.load(parts_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + token * D + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < D)


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
    tile = choose_tile(num_tokens, top_k, num_experts, is_half=x.element_size() == 2)
    tiles = pairs if few else count_tiles(pairs, tile.rows, num_experts)
    busy = min(pairs, num_experts)  # tiles that have work, about
    splits, down_splits = tile.split(inner, width, busy), tile.split(width, inner, busy)
    # [N, F] in x's dtype and, by split and pair, [S, N, 2F] and [S, N, D] in float32; rows of pairs without an expert
    # are never written
    gated = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    sums = torch.empty((splits, pairs, 2 * inner), dtype=torch.float32, device=x.device) if splits > 1 else gated
    parts = torch.empty((down_splits, pairs, width), dtype=torch.float32, device=x.device)
    launch = dict(PDL=pdl, launch_pdl=pdl)
    shape = dict(
        TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), X=num_experts, BLOCK_X=next_power_of_2(num_experts), FEW=few,
        ROWS=tile.rows, OUTPUTS=tile.outputs, num_warps=tile.num_warps, num_stages=tile.num_stages, **launch,
    )
    codes, bias = gate_up
    _gate_up_kernel[(ceil_div(inner, tile.outputs), tiles, splits)](
        x, *point_at(codes, x.dtype), x if bias is None else bias, ids, order, ends, gated, sums, x.stride(0),
        num_tokens, _share(width, splits), *gate[1:], IS_SPLIT=splits > 1, F=inner, HAS_BIAS=bias is not None,
        GATE=GATES[gate.kind], **find_constants(codes, x.dtype), **shape,
    )
    if splits > 1:
        _gate_kernel[(pairs, ceil_div(inner, BLOCK_GATE))](
            sums, gated, pairs, *gate[1:], F=inner, SPLITS=splits, GATE=GATES[gate.kind], BLOCK=BLOCK_GATE, num_warps=2,
            **launch
        )
    codes, bias = down
    _down_kernel[(ceil_div(width, tile.outputs), tiles, down_splits)](
        gated, *point_at(codes, x.dtype), x if bias is None else bias, ids, order, ends, weights, parts, num_tokens,
        _share(inner, down_splits), D=width, HAS_BIAS=bias is not None, **find_constants(codes, x.dtype), **shape,
    )
    _add_parts_kernel[(num_tokens, ceil_div(width, BLOCK_SUM))](
        parts, ids, out, num_tokens, D=width, TOP_K=top_k, BLOCK_K=shape["BLOCK_K"], SPLITS=down_splits,
        BLOCK=BLOCK_SUM, num_warps=4, **launch
    )
    return out


def _share(inputs: int, splits: int) -> int:
    """Blocks of inputs of each split; the last may have fewer, even none. Not inputs: kernels must know that these are
    multiples, to read them in words."""
    return ceil_div(inputs, splits * BLOCK)


run_experts_pdl = partial(run_experts, pdl=True)
