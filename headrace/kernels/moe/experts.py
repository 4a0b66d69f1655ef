"""Experts for decode steps and short chunks, in three kernels: gate and up with the activation, down with the routing
weights, the sum over a token's choices. Bound by reading the chosen experts' matrices once.

T tokens, k choices, N = T * k pairs, X experts, D hidden size, F expert intermediate size. A program takes OUTPUTS
outputs of one expert for up to ROWS of its pairs. Up to `FEW_TOKENS` tokens nothing is sorted: the grid has a program
per pair, and of the pairs with the same expert only the first one's program works, for all of them. The weight is the
left operand of `tl.dot`: it has more rows.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.pieces import load_rows
from headrace.kernels.launch import ceil_div, count_tiles, next_power_of_2, wait_for_previous
from headrace.kernels.moe import Stacked, count_rows
from headrace.kernels.moe.triton import find_tile, group_pairs
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES, apply_gate

FEW_TOKENS = 16
"""Also the least rows of a tensor-core tile: without sorting, a tile has one row per token."""
MANY_ROWS = 64
SHORT_INNER = 512
"""Inputs of down, at most, of `choose_down_tile`."""
BLOCK_SUM = 512


@dataclass(frozen=True)
class Tile:
    """A program computes ``outputs`` by ``rows`` pairs, reading ``inputs`` at a time."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@cache
def choose_tile(num_tokens: int, top_k: int, num_experts: int, *, is_half: bool) -> Tile:
    """Enough rows for all pairs of nearly every expert, so that few matrices are read twice. Measured on an H200: fewer
    than 64 outputs are slower even where only they would occupy all SMs. Only three tiles, all used by decode steps of
    up to 512 rows: other steps need no further compilation."""
    most = count_rows(num_tokens, top_k, num_experts)
    rows = FEW_TOKENS if num_tokens <= FEW_TOKENS or most <= FEW_TOKENS else MANY_ROWS
    if not is_half:
        return Tile(rows, 32, 32, 4, 2)
    if rows == FEW_TOKENS:
        return Tile(rows, 64, 64, 4, 8 if num_tokens <= FEW_TOKENS else 5)
    return Tile(rows, 128, 64, 8, 4)


def choose_down_tile(tile: Tile, inner: int) -> Tile:
    """The tile of down, by that of gate and up. Where ``inner``, F, is short, as of ranks, a program asks for rows and
    fills its pipeline about as long as it reads: then three with four warps on an SM, instead of two with eight."""
    if tile.rows == MANY_ROWS and tile.num_warps == 8 and inner <= SHORT_INNER:
        return replace(tile, num_warps=4, num_stages=3)
    return tile


@triton.jit
def _find_rows(
    ids_ptr, order_ptr, ends_ptr, tile, num_tokens, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr,
    BLOCK_X: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr
):
    """``(expert, pair [ROWS], mask [ROWS])`` of a tile; expert -1 where it has no work. Pair n is choice n % k of token
    n // k. With FEW, ``order`` and ``ends`` are not read."""
    row = tl.arange(0, ROWS)
    if FEW:  # a tile per pair
        expert = tl.load(ids_ptr + tile).to(tl.int32)  # -1 for a padding token's pair: then no work as well
        choice = tl.arange(0, BLOCK_K)
        known = (row < num_tokens)[:, None] & (choice < TOP_K)[None, :]
        pairs = row[:, None] * TOP_K + choice[None, :]
        is_mine = known & (tl.load(ids_ptr + pairs, mask=known, other=-1).to(tl.int32) == expert)
        # a row is a token: its pair with this expert, -1 if it has none (no token chooses an expert twice)
        pair = tl.max(tl.where(is_mine, pairs, -1), 1)
        # of the programs of pairs with the same expert only the first one's works
        first = tl.min(tl.min(tl.where(is_mine, pairs, 1 << 30), 1), 0)
        return tl.where(first == tile, expert, -1), tl.maximum(pair, 0), pair >= 0
    else:
        expert, first, last = find_tile(ends_ptr, tile, X, BLOCK_X, ROWS)
        pair = tl.load(order_ptr + first + row, mask=first + row < last, other=0)
        return tl.where(expert < X, expert, -1), pair, first + row < last


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, out_ptr, x_stride, num_tokens, limit, alpha, up_offset,
    F: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr,
    BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):
    # out [N, F] is indexed by pair: every row has one writer, and no atomics are needed
    wait_for_previous(PDL)
    expert, pair, is_there = _find_rows(
        ids_ptr, order_ptr, ends_ptr, tl.program_id(1), num_tokens, TOP_K, BLOCK_K, X, BLOCK_X, ROWS, FEW
    )
    if expert >= 0:
        token = pair // TOP_K
        column, inner = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        # gate_up [X, 2F, D]: F rows of gate, then F of up; both products share the tile of x
        gate_at = weight_ptr + (expert.to(tl.int64) * (2 * F) + column[:, None]) * D + inner[None, :]
        gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for done in range(0, D, INPUTS):
            is_inside = inner < D - done
            mask = (column < F)[:, None] & is_inside[None, :]
            x = load_rows(x_ptr + done, token, x_stride, inner, is_there, is_inside)
            # accumulators are [OUTPUTS, ROWS], transposed: the weight is the left operand
            gate = tl.dot(tl.load(gate_at + done, mask=mask, other=0.0), x, gate, input_precision="ieee")
            up = tl.dot(tl.load(gate_at + F * D + done, mask=mask, other=0.0), x, up, input_precision="ieee")
        if HAS_BIAS:
            bias_at = bias_ptr + expert * (2 * F) + column
            gate += tl.load(bias_at, mask=column < F, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_at + F, mask=column < F, other=0.0).to(tl.float32)[:, None]
        out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
        tl.store(
            out_ptr + pair[None, :].to(tl.int64) * F + column[:, None], out.to(out_ptr.dtype.element_ty),
            mask=is_there[None, :] & (column < F)[:, None]
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, factors_ptr, out_ptr, num_tokens, D: tl.constexpr,
    F: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, X: tl.constexpr, BLOCK_X: tl.constexpr,
    HAS_BIAS: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    expert, pair, is_there = _find_rows(
        ids_ptr, order_ptr, ends_ptr, tl.program_id(1), num_tokens, TOP_K, BLOCK_K, X, BLOCK_X, ROWS, FEW
    )
    if expert >= 0:
        column, inner = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        # down [X, D, F]; x is the [N, F] of `_gate_up_kernel`, by pair
        weight_at = weight_ptr + (expert.to(tl.int64) * D + column[:, None]) * F + inner[None, :]
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for done in range(0, F, INPUTS):
            is_inside = inner < F - done
            x = load_rows(x_ptr + done, pair, F, inner, is_there, is_inside)
            weight = tl.load(weight_at + done, mask=(column < D)[:, None] & is_inside[None, :], other=0.0)
            total = tl.dot(weight, x, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias_ptr + expert * D + column, mask=column < D, other=0.0).to(tl.float32)[:, None]
        # routing weights are applied here, in float32, so that the sum only adds
        total *= tl.load(factors_ptr + pair, mask=is_there, other=0.0)[None, :]
        tl.store(
            out_ptr + pair[None, :].to(tl.int64) * D + column[:, None], total,
            mask=is_there[None, :] & (column < D)[:, None]
        )


@triton.jit
def _sum_kernel(
    x_ptr, ids_ptr, out_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    choice, column = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    # rows [k, BLOCK] of float32, summed in the same order whatever else is in the batch
    pair = token * TOP_K + choice
    # pairs without an expert were never computed: their rows hold garbage, maybe NaN, and must not be read
    is_there = tl.load(ids_ptr + pair, mask=choice < TOP_K, other=-1) >= 0
    x = tl.load(x_ptr + pair[:, None] * D + column[None, :], mask=is_there[:, None] & (column < D)[None, :], other=0.0)
    tl.store(out_ptr + token * D + column, tl.sum(x, 0).to(out_ptr.dtype.element_ty), mask=column < D)


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stacked, down: Stacked, gate: Gate, *,
    pdl: bool = False,
) -> torch.Tensor:
    """See `RUN_EXPERTS`."""
    (num_tokens, top_k), (num_experts, width, inner) = ids.shape, down[0].shape
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
    tiles = pairs if few else count_tiles(pairs, tile.rows, num_experts)
    down_tile = choose_down_tile(tile, inner)
    shape = dict(
        TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), X=num_experts, BLOCK_X=next_power_of_2(num_experts), F=inner,
        D=width, FEW=few, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, PDL=pdl, launch_pdl=pdl,
    )
    weight, bias = gate_up
    _gate_up_kernel[(ceil_div(inner, tile.outputs), tiles)](
        x, weight, x if bias is None else bias, ids, order, ends, gated, x.stride(0), num_tokens, *gate[1:],
        HAS_BIAS=bias is not None, GATE=GATES[gate.kind], num_warps=tile.num_warps, num_stages=tile.num_stages, **shape,
    )
    weight, bias = down
    _down_kernel[(ceil_div(width, tile.outputs), tiles)](
        gated, weight, x if bias is None else bias, ids, order, ends, weights, parts, num_tokens,
        HAS_BIAS=bias is not None, num_warps=down_tile.num_warps, num_stages=down_tile.num_stages, **shape,
    )
    _sum_kernel[(num_tokens, ceil_div(width, BLOCK_SUM))](
        parts, ids, out, D=width, TOP_K=top_k, BLOCK_K=shape["BLOCK_K"], BLOCK=BLOCK_SUM, PDL=pdl, num_warps=4,
        launch_pdl=pdl
    )
    return out


run_experts_pdl = partial(run_experts, pdl=True)
