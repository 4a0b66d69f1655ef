"""Sampling in plain torch: the oracle and the fallback. S sampled rows, V vocabulary.

Everything is row-wise and sequential over the vocabulary (cumulative sums, never a blocked reduction), which makes a
row's token independent of the other rows of the batch, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.kernels.sample import NOT_FINITE, NOTHING_ALLOWED, OK, SampleParams

# SplitMix64's constants as int64, torch having no full uint64; products and sums wrap modulo 2**64 either way
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_A = 0xBF58476D1CE4E5B9 - 2**64
MIX_B = 0x94D049BB133111EB - 2**64
HEAD = 1024
"""How many of a row's largest logits are sorted first: top-p mostly keeps fewer, and sorting a whole vocabulary takes
ten times longer."""

SLICE_NUMEL = 2**23
"""Logits processed at a time, which bounds the float64 temporaries to some 200 MB."""


def compose(
    argmax: Callable[..., Any], mask_argmax: Callable[..., Any], sample_rows: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Compose `SAMPLE` of a solution's parts, with the signatures of `argmax`, `mask_argmax` and `sample_rows`. Argmax
    runs for all rows, since states and greedy rows need it; ``params`` then replace the ids of sampled rows."""

    def sample(
        logits: torch.Tensor, *, params: SampleParams | None = None, masks: torch.Tensor | None = None,
        mask_of_row: torch.Tensor | None = None, before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if masks is None:
            after, ids = argmax(logits)
            raw = after
        else:
            raw, after, ids = mask_argmax(logits, masks, mask_of_row)
        states = torch.where(after.isfinite(), OK, NOTHING_ALLOWED)
        states = torch.where((raw if before is None else before).isfinite(), states, NOT_FINITE)
        if params is not None:
            ids = torch.where(params.temperature > 0, sample_rows(logits, params), ids)
        return torch.stack((ids, states))

    return sample


def mask_argmax(
    logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask the logits [S, V] in place; returns each row's largest logit before [S] and after [S] masking, and the
    argmax after it [S]. Works on bytes of the bitmask: in a little-endian word, token order is byte order."""
    raw = logits.amax(dim=1)
    # [256, 8]: the bits of every byte, so that a mask is expanded by one lookup per byte
    bits = torch.arange(256, device=logits.device).unsqueeze(1).bitwise_right_shift(
        torch.arange(8, device=logits.device)
    ).bitwise_and(1)
    own = masks.index_select(0, mask_of_row.clamp(min=0))  # [S, W] int32; rows without a mask are excluded below
    is_forbidden = (bits == 0).index_select(
        0, own.view(torch.uint8).flatten().int()
    ).view(len(own), -1)[:, : logits.shape[1]]
    logits.masked_fill_(is_forbidden & (mask_of_row >= 0).unsqueeze(1), -torch.inf)
    return raw, *argmax(logits)


def sample_rows(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Sampled ids [S] int64, arbitrary ones for greedy rows; logits may be overwritten."""
    num_rows, vocab_size = logits.shape
    # one uniform number per row, from its seed and position alone: the batch does not matter
    uniforms = uniform(params.seed, params.position)
    step = max(1, SLICE_NUMEL // vocab_size)
    ids = [_sample_slice(logits, params, uniforms, slice(begin, begin + step)) for begin in range(0, num_rows, step)]
    return torch.cat(ids)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.sample.ARGMAX`."""
    values, ids = logits.max(-1)
    return values, ids


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Float64 in [0, 1) from two int64 [S]: SplitMix64's finaliser over the seed, then over seed and counter.

    Counter-based, so there is no state per request: a preempted request continues with the same numbers.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    # the top 53 bits, as many as a float64 holds
    bits = _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    return _shift(bits, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * MIX_A
    x = (x ^ _shift(x, 27)) * MIX_B
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, places: int) -> torch.Tensor:
    """Logical shift right; int64's own is arithmetic."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _sample_slice(logits: torch.Tensor, params: SampleParams, uniforms: torch.Tensor, rows: slice) -> torch.Tensor:
    """Ids of some rows, sampled by inverting the CDF of what the cuts leave."""
    # greedy rows (temperature 0) are divided by 1; their result is not used
    temperature = params.temperature[rows]
    x = logits[rows].div(torch.where(temperature > 0, temperature, 1.0).float().unsqueeze(1))
    best = x.amax(-1, keepdim=True)
    # a probability ratio of min_p is a difference of log(min_p) between scaled logits
    if params.has_min_p:
        x.masked_fill_(x < best + params.min_p[rows].log().float().unsqueeze(1), -torch.inf)
    if params.num_ranked:
        x.masked_fill_(x < _lowest_kept(x, params, rows), -torch.inf)
    cumulative = x.double().sub_(best).exp_().cumsum_(-1)
    # The first token whose cumulative weight exceeds the target; one of weight 0 never does. u < 1 keeps it inside.
    target = uniforms[rows].unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def _lowest_kept(x: torch.Tensor, params: SampleParams, rows: slice) -> torch.Tensor:
    """[S, 1]: the smallest scaled logit that top-k and top-p keep, -inf for rows with neither."""
    num_ranked = min(params.num_ranked, x.shape[1])
    if x.device.type == "cpu" and num_ranked > HEAD:  # where looking at a result costs nothing, try without a full sort
        lowest, is_decided = _rank(x, params, rows, HEAD)
        if bool(is_decided.all()):
            return lowest
    return _rank(x, params, rows, num_ranked)[0]


def _rank(x: torch.Tensor, params: SampleParams, rows: slice, num_ranked: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`_lowest_kept` from each row's ``num_ranked`` largest logits, and [S] bool whether those were enough to know."""
    top_k, top_p = params.top_k[rows], params.top_p[rows]
    ranked = x.topk(num_ranked, dim=-1).values
    count = torch.where(top_k > 0, top_k.clamp(max=num_ranked), num_ranked)
    is_decided = (top_k <= num_ranked) & ((top_k > 0) | (top_p >= 1.0))
    if params.has_top_p:
        # Without top-k, top_p is a share of all that is left, summed in vocabulary order however many were ranked.
        weights = ranked.double().sub_(ranked[:, :1]).exp_()
        weights.masked_fill_(torch.arange(num_ranked, device=x.device) >= count.unsqueeze(1), 0.0)
        reached = weights.cumsum(-1)
        everything = x.double().sub_(ranked[:, :1]).exp_().cumsum_(-1)[:, -1]
        wanted = top_p * torch.where(top_k > 0, reached[:, -1], everything)
        is_decided |= (top_k == 0) & (reached[:, -1] >= wanted)
        # kept while the mass of all more likely tokens is still below top_p; at least one always is
        is_kept = reached - weights < wanted.unsqueeze(1)
        count = torch.where(top_p < 1.0, is_kept.sum(-1).clamp_(min=1), count)
    lowest = ranked.gather(1, (count - 1).unsqueeze(1))
    has_cut = ((top_k > 0) | (top_p < 1.0)).unsqueeze(1)
    return torch.where(has_cut, lowest, -torch.inf), is_decided


def sample_greedy(logits: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.sample.SAMPLE_GREEDY`."""
    best, ids = argmax(logits)
    return torch.stack((ids, (~best.isfinite()).long()))


def argmax_share(logits: torch.Tensor, first: int) -> torch.Tensor:
    """See `headrace.kernels.sample.ARGMAX_SHARE`."""
    best, ids = argmax(logits)
    return torch.stack((best.view(torch.int32), (ids + first).int()), dim=-1)


def merge_shares(shares: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.sample.MERGE_SHARES`."""
    bits, ids = shares.unflatten(1, (-1, 2)).unbind(-1)
    best, share = argmax(bits.contiguous().view(torch.float32))
    return torch.stack((ids.gather(1, share.unsqueeze(1)).squeeze(1).long(), (~best.isfinite()).long()))


sample = compose(argmax, mask_argmax, sample_rows)
"""See `headrace.kernels.sample.SAMPLE`."""
