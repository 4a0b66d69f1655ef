"""Routing, sorting of (token, expert) pairs by expert, grouped products in which each program finds its expert itself
(the host never waits for row counts), and the weighted sum over a token's experts.

T tokens, k choices, N = T * k pairs, X experts.
"""

from functools import partial
from typing import Unpack

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, count_tiles, next_power_of_2, wait_for_previous
from headrace.kernels.moe import RouteShape
from headrace.kernels.moe.reference import LEAST_SUM
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATE_BLOCK, GATES, apply_gate

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
OWN_BLOCK = 512
LEAST = tl.constexpr(-3.0e38)  # replaces NaN: chosen last, but before those already chosen (-inf), so never twice


@triton.jit
def _score(logits, SCORE: tl.constexpr):
    """Logits [X] float32 to scores, by `SCORES`."""
    if SCORE == 0:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORE == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        # sqrt(log(1 + exp(x))): x itself above 20, as in F.softplus; the series of log below -8, where 1 + exp(x) would
        # round away most of exp(x)
        power = tl.exp(tl.minimum(logits, 20.0))
        softplus = tl.where(logits < -8.0, power - 0.5 * power * power, tl.log(1.0 + power))
        scores = tl.sqrt(tl.where(logits > 20.0, logits, softplus))
    return scores


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, logits_stride, scale, least_sum, X: tl.constexpr, BLOCK_X: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, SCORE: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    """One program per token: scores [X], choice and weights [k] stay in registers."""
    token = tl.program_id(0).to(tl.int64)
    at, nth = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    bias = tl.load(bias_ptr + at, mask=at < X, other=0.0) if HAS_BIAS else 0.0
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + token * logits_stride + at, mask=at < X, other=-float("inf")).to(tl.float32)
    scores = _score(logits, SCORE)
    # softmax keeps order, so logits choose as well, and exactly where tiny scores would tie at 0
    choice = logits if SCORE == 0 and not HAS_BIAS else scores + bias
    choice = tl.where(at < X, tl.where(choice > LEAST, choice, LEAST), -float("inf"))
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    # top-k by repeated argmax: k is small, and a row's scores stay in registers
    for i in tl.static_range(TOP_K):
        best = tl.min(tl.where(choice == tl.max(choice, 0), at, BLOCK_X), 0)
        ids = tl.where(nth == i, best, ids)
        weights = tl.where(nth == i, tl.sum(tl.where(at == best, scores, 0.0), 0), weights)
        choice = tl.where(at == best, -float("inf"), choice)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + least_sum)
    tl.store(ids_ptr + token * TOP_K + nth, ids.to(tl.int64), mask=nth < TOP_K)
    tl.store(weights_ptr + token * TOP_K + nth, weights * scale, mask=nth < TOP_K)


def route(
    logits: torch.Tensor, choice_bias: torch.Tensor | None, *, pdl: bool = False, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ROUTE`; of equal scores the first expert wins."""
    (num_tokens, num_experts), top_k = logits.shape, shape["top_k"]
    assert shape["num_groups"] == 1, "see the registry"
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, logits if choice_bias is None else choice_bias, ids, weights, logits.stride(0), shape["scale"],
            LEAST_SUM, X=num_experts, BLOCK_X=next_power_of_2(num_experts), TOP_K=top_k, BLOCK_K=next_power_of_2(top_k),
            SCORE=SCORES[shape["score"]], RENORMALISE=shape["renormalise"], HAS_BIAS=choice_bias is not None, PDL=pdl,
            num_warps=1 if num_experts <= 256 else 4, launch_pdl=pdl,
        )
    return ids, weights


@triton.jit
def _hash_route_kernel(
    logits_ptr, table_ptr, token_ids_ptr, ids_ptr, weights_ptr, logits_stride, scale, least_sum, X: tl.constexpr,
    BLOCK_X: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SCORE: tl.constexpr, RENORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at, nth = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    row = tl.load(token_ids_ptr + token).to(tl.int64) * TOP_K
    ids = tl.load(table_ptr + row + nth, mask=nth < TOP_K, other=-1)
    logits = tl.load(logits_ptr + token * logits_stride + at, mask=at < X, other=-float("inf")).to(tl.float32)
    scores = tl.where(at < X, _score(logits, SCORE), 0.0)
    weights = tl.sum(tl.where(ids[:, None] == at[None, :], scores[None, :], 0.0), 1)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + least_sum)
    tl.store(ids_ptr + token * TOP_K + nth, ids, mask=nth < TOP_K)
    tl.store(weights_ptr + token * TOP_K + nth, weights * scale, mask=nth < TOP_K)


def hash_route(
    logits: torch.Tensor, table: torch.Tensor, token_ids: torch.Tensor, *, score: str, renormalise: bool, scale: float,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `HASH_ROUTE`; the table is contiguous."""
    (num_tokens, num_experts), top_k = logits.shape, table.shape[1]
    assert table.is_contiguous() and table.dtype == torch.int64
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _hash_route_kernel[(num_tokens,)](
            logits, table, token_ids, ids, weights, logits.stride(0), scale, LEAST_SUM, X=num_experts,
            BLOCK_X=next_power_of_2(num_experts), TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), SCORE=SCORES[score],
            RENORMALISE=renormalise, PDL=pdl, num_warps=1 if num_experts <= 256 else 4, launch_pdl=pdl,
        )
    return ids, weights


route_pdl, hash_route_pdl = partial(route, pdl=True), partial(hash_route, pdl=True)


@triton.jit(do_not_specialize=["num_pairs", "first", "count"])
def _own_kernel(ids_ptr, out_ptr, num_pairs, first, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) - first
    tl.store(out_ptr + pair, tl.where((own >= 0) & (own < count), own, -1), mask=pair < num_pairs)


def own_experts(ids: torch.Tensor, first: int, count: int, *, pdl: bool = False) -> torch.Tensor:
    """See `OWN_EXPERTS`."""
    ids = ids.contiguous()
    out, num_pairs = torch.empty_like(ids), ids.numel()
    if num_pairs:
        _own_kernel[(ceil_div(num_pairs, OWN_BLOCK),)](
            ids, out, num_pairs, first, count, BLOCK=OWN_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


own_experts_pdl = partial(own_experts, pdl=True)

AT_ONCE = (1024, 4096)
"""Pairs that `_group_kernel` takes at once; more than the last it takes in turns. Three kernels to compile."""


@triton.jit
def find_tile(ends_ptr, tile, X: tl.constexpr, BLOCK_X: tl.constexpr, ROWS: tl.constexpr):
    """``(expert, first row, one past the expert's last row)`` of tile number ``tile``, when each expert's rows
    (``ends`` [X], see `GROUP_PAIRS`) are cut into tiles of ROWS; expert X beyond the last tile. Every program computes
    this from all ends: the device need not prepare a list of tiles."""
    at = tl.arange(0, BLOCK_X)
    end = tl.load(ends_ptr + at, mask=at < X, other=0)
    start = tl.load(ends_ptr + at - 1, mask=(at > 0) & (at < X), other=0)
    # [X]: tiles of each expert; a tile's expert is the number of experts whose tiles all come before it
    tiles = tl.where(at < X, (end - start + ROWS - 1) // ROWS, 0)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (at < X)).to(tl.int32), 0)
    tiles_before = tl.sum(tl.where(at < expert, tiles, 0), 0)
    first = tl.sum(tl.where(at == expert, start, 0), 0) + (tile - tiles_before) * ROWS
    return expert, first, tl.sum(tl.where(at == expert, end, 0), 0)


@triton.jit
def _load_chosen(ids_ptr, at, num_pairs, X: tl.constexpr):
    """Expert ids; X for -1 (no expert), X + 1 beyond the last pair."""
    chosen = tl.load(ids_ptr + at, mask=at < num_pairs, other=X + 1).to(tl.int32)
    return tl.where(chosen < 0, X, chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    ids_ptr, order_ptr, place_ptr, ends_ptr, num_pairs, X: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
    PDL: tl.constexpr
):
    """A counting sort with one program per expert, and the last one, X, for pairs without an expert. Each program reads
    all ids: they are few and in L2, and nothing needs to be exchanged between programs. With ONCE they are BLOCK at
    most, and stay in registers."""
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if ONCE:
        chosen = _load_chosen(ids_ptr, at, num_pairs, X)
        is_mine = chosen == expert
        place = tl.sum((chosen < expert).to(tl.int32), 0) + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, at, mask=is_mine)
        tl.store(place_ptr + at, place, mask=is_mine)
        if expert < X:
            tl.store(ends_ptr + expert, tl.sum((chosen <= expert).to(tl.int32), 0))
    else:
        before, count = 0, 0
        # first pass: how many pairs come before this expert's, and how many are its own
        for done in range(0, num_pairs, BLOCK):
            chosen = _load_chosen(ids_ptr, done + at, num_pairs, X)
            before += tl.sum((chosen < expert).to(tl.int32), 0)
            count += tl.sum((chosen == expert).to(tl.int32), 0)
        if expert < X:
            tl.store(ends_ptr + expert, before + count)
        if count > 0:
            # second pass: its pairs in order, so that the sort is stable
            for done in range(0, num_pairs, BLOCK):
                is_mine = _load_chosen(ids_ptr, done + at, num_pairs, X) == expert
                mine = is_mine.to(tl.int32)
                place = before + tl.cumsum(mine, 0) - 1
                tl.store(order_ptr + place, done + at, mask=is_mine)
                tl.store(place_ptr + done + at, place, mask=is_mine)
                before += tl.sum(mine, 0)


def group_pairs(
    ids: torch.Tensor, num_experts: int, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `GROUP_PAIRS`; ``ids`` contiguous."""
    pairs = ids.numel()
    order, place = (torch.empty(pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    block = next((size for size in AT_ONCE if pairs <= size), AT_ONCE[-1])
    _group_kernel[(num_experts + 1,)](
        ids, order, place, ends, pairs, X=num_experts, BLOCK=block, ONCE=pairs <= block, PDL=pdl,
        num_warps=max(1, block // 512), launch_pdl=pdl
    )
    return order, place, ends


@triton.jit
def _sum_pairs_kernel(
    rows_ptr, place_ptr, weights_ptr, ids_ptr, bias_ptr, out_ptr, D: tl.constexpr, TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    # one program per token and BLOCK columns
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The kernel before made rows of pairs, and others before that one all else, which is there without a wait.
    places, weights, experts = (), (), ()
    for choice in tl.static_range(TOP_K):
        places += (tl.load(place_ptr + token * TOP_K + choice).to(tl.int64),)
        weights += (tl.load(weights_ptr + token * TOP_K + choice),)
        experts += (tl.load(ids_ptr + token * TOP_K + choice),)
    wait_for_previous(PDL)
    rows = ()
    for choice in tl.static_range(TOP_K):
        # rows of pairs without an expert are undefined, maybe NaN
        mask = (column < D) & (experts[choice] >= 0)
        rows += (tl.load(rows_ptr + places[choice] * D + column, mask=mask, other=0.0),)
    total = tl.zeros([BLOCK], tl.float32)
    # fixed order of choices: the same sum whatever else is in the batch
    for choice in tl.static_range(TOP_K):
        if HAS_BIAS:
            mask = (column < D) & (experts[choice] >= 0)
            bias = tl.load(bias_ptr + experts[choice] * D + column, mask=mask, other=0.0).to(tl.float32)
            total += weights[choice] * (rows[choice].to(tl.float32) + bias)
        else:
            total += weights[choice] * rows[choice].to(tl.float32)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


def sum_pairs(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, *,
    pdl: bool = False,
) -> torch.Tensor:
    """See `SUM_PAIRS`. With ``pdl`` the kernel before made ``rows``, and none since the one before that anything else.
    """
    (num_tokens, top_k), width = weights.shape, rows.shape[1]
    out = torch.empty((num_tokens, width), dtype=rows.dtype, device=rows.device)
    if num_tokens:
        block = min(1024, next_power_of_2(width))  # 16 bytes a thread, so that all its loads are on their way at once
        _sum_pairs_kernel[(num_tokens, ceil_div(width, block))](
            rows, place, weights, ids, rows if bias is None else bias, out, D=width, TOP_K=top_k,
            HAS_BIAS=bias is not None, BLOCK=block, PDL=pdl, num_warps=max(1, block // 256), launch_pdl=pdl
        )
    return out


@triton.jit
def _gate_pairs_kernel(
    x_ptr, bias_ptr, experts_ptr, out_ptr, limit, alpha, up_offset, F: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, BLOCK: tl.constexpr
):
    # x [N, 2F]: gate in the first half of a row, up in the second
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * (2 * F) + column
    gate = tl.load(at, mask=column < F, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=column < F, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias_at = bias_ptr + tl.load(experts_ptr + row) * (2 * F) + column
        gate += tl.load(bias_at, mask=column < F, other=0.0).to(tl.float32)
        up += tl.load(bias_at + F, mask=column < F, other=0.0).to(tl.float32)
    out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
    tl.store(out_ptr + row * F + column, out.to(out_ptr.dtype.element_ty), mask=column < F)


def gate_pairs(x: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, gate: Gate) -> torch.Tensor:
    """See `GATE_PAIRS`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _gate_pairs_kernel[(rows, ceil_div(width, GATE_BLOCK))](
            x, x if bias is None else bias, experts, out, *gate[1:], F=width, HAS_BIAS=bias is not None,
            GATE=GATES[gate.kind], BLOCK=GATE_BLOCK, num_warps=4,
        )
    return out


LEAST_ROWS, MOST_ROWS = 16, 128
"""Rows of a tile; tensor cores take at least 16."""


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, bias_ptr, ends_ptr, out_ptr, x_stride, num_outputs, num_inputs, X: tl.constexpr,
    BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):
    # the grid has the most tiles that may be needed; programs beyond the last tile do nothing
    expert, first, last = find_tile(ends_ptr, tl.program_id(0), X, BLOCK_X, ROWS)
    if expert < X:
        row, column, inner = (
            first + tl.arange(0, ROWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        )
        # x [ROWS, INPUTS], weight [INPUTS, OUTPUTS] (read transposed), total [ROWS, OUTPUTS]; 64-bit offsets, since all
        # experts' weights together may have more than 2**31 values
        x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + inner[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * num_outputs + column[None, :]) * num_inputs + inner[:, None]
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for done in range(0, num_inputs, INPUTS):
            is_inside = inner < num_inputs - done
            x = tl.load(x_at + done, mask=(row < last)[:, None] & is_inside[None, :], other=0.0)
            weight = tl.load(weight_at + done, mask=is_inside[:, None] & (column < num_outputs)[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(
                bias_ptr + expert * num_outputs + column, mask=column < num_outputs, other=0.0
            ).to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None].to(tl.int64) * num_outputs + column[None, :], total.to(out_ptr.dtype.element_ty),
            mask=(row < last)[:, None] & (column < num_outputs)[None, :]
        )


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """See `GROUPED_LINEAR`; ``experts`` is not read."""
    num_rows, (num_experts, outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    # tiles as high as an expert's average share of the rows
    rows = min(MOST_ROWS, max(LEAST_ROWS, next_power_of_2(ceil_div(max(1, num_rows), num_experts))))
    tiles = count_tiles(num_rows, rows, num_experts)
    block_outputs = 64 if x.dtype == torch.float32 or rows == LEAST_ROWS else 128
    if num_rows:
        _grouped_kernel[(tiles, ceil_div(outputs, block_outputs))](
            x, weight, x if bias is None else bias, ends, out, x.stride(0), outputs, inputs, X=num_experts,
            BLOCK_X=next_power_of_2(num_experts),
            HAS_BIAS=bias is not None, ROWS=rows, OUTPUTS=block_outputs, INPUTS=32 if x.dtype == torch.float32 else 64,
            num_warps=8 if rows == MOST_ROWS else 4, num_stages=4 if rows == LEAST_ROWS else 3,
        )
    return out
