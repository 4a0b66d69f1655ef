"""Sparse latent attention in plain torch: the oracle and the fallback. T tokens, H heads, E head dim, N slots that a
token sees."""

from __future__ import annotations

import torch

from headrace.kernels.latents.reference import hadamard, list_entries, rotate_last
from headrace.kernels.latents.slots import Slots, find_slots, pack_keys, unpack_keys
from headrace.kernels.sparse_attention import EntryView, Queries, SeenSlots

TILE_ELEMENTS = 2**26
"""Elements of the largest tensor of gathered vectors [tile, N, E]; queries are processed in tiles of that size."""
SCORE_ELEMENTS = 2**25
"""Elements of the largest tensor of scores per head [tile, H, N] that a prefill chunk makes."""


def attend_slots(
    queries: Queries, window: SeenSlots, entries: SeenSlots | None, *, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `ATTEND_SLOTS`."""
    q, cos_sin = queries.q, queries.cos_sin.index_select(0, queries.positions)
    normed = q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + queries.norm_eps)
    q = rotate_last(normed.to(q.dtype), cos_sin)
    parts = [window] if entries is None else [window, entries]
    seen = [(part.slots, list_slots(part)) for part in parts]
    # Values are the rotated keys. Rotating the output back by the query's position leaves each value rotated by its
    # distance from the query, so that the output depends on relative positions alone.
    return rotate_last(attend(q, seen, sinks=sinks, scale=scale), cos_sin, backwards=True)


def attend_rows(q: torch.Tensor, seen: SeenSlots, *, value_dim: int, scale: float) -> torch.Tensor:
    """See `ATTEND_ROWS`."""
    sinks = torch.full((q.shape[1],), float("-inf"), device=q.device)
    return attend(q, [(seen.slots, list_slots(seen))], sinks=sinks, scale=scale)[..., :value_dim]


def list_slots(seen: SeenSlots) -> torch.Tensor:
    """Slots [T, n] int64 of each token, padded with -1."""
    numbers = seen.numbers if seen.rows is None else seen.numbers.index_select(0, seen.rows)
    at = torch.arange(numbers.shape[1], device=numbers.device)
    return numbers.masked_fill(at >= seen.counts[:, None], -1)


def attend(
    q: torch.Tensor, seen: list[tuple[Slots, torch.Tensor]], *, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of ``q`` [T, H, E] over the vectors (each key and value) at slots [T, n] int64 of each pool, -1 for
    padding; one softmax over all pools, in float32. ``sinks`` [H] add exp(sink) to each head's denominator. Returns
    [T, H, E] in q's dtype."""
    out = torch.empty_like(q)
    width = sum(slots.shape[1] for _, slots in seen)
    tile = max(1, TILE_ELEMENTS // (width * q.shape[-1]))  # queries at a time
    for low in range(0, q.shape[0], tile):
        span = slice(low, min(low + tile, q.shape[0]))
        unseen = torch.cat([slots[span] < 0 for _, slots in seen], dim=1)  # [tile, N]
        # Padding reads slot 0, in the null page, which may hold anything: zeroed, as 0 * NaN would be NaN.
        kv = torch.cat(  # [tile, N, E]
            [pool.gather(slots[span].clamp(min=0), q.dtype) for pool, slots in seen], dim=1
        ).masked_fill_(unseen.unsqueeze(-1), 0)
        # [tile, H, N]: each query has keys of its own, shared by its heads
        logits = torch.bmm(q[span], kv.transpose(1, 2)).float().mul_(scale).masked_fill_(
            unseen.unsqueeze(1), float("-inf")
        )
        # the sink is one more logit, whose weight is dropped after the softmax
        sink = sinks.view(1, -1, 1).expand(logits.shape[0], -1, 1)
        weights = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
        out[span] = torch.bmm(weights.to(q.dtype), kv)
    return out


def index_scores(
    queries: Queries, weights: torch.Tensor, keys: Slots, view: EntryView, *, scale: float, top_k: int,
    tokens: slice,
) -> torch.Tensor:
    """See `INDEX_SCORES`. Decodes are scored together against their own keys, prefill chunks one request at a time."""
    q = rotate_last(queries.q, queries.cos_sin.index_select(0, queries.positions)).float()  # [T, H, E]
    if keys.holds_keys:
        q = unpack_keys(*pack_keys(q @ hadamard(q.shape[-1], q.device)))
    weights = weights.float() * scale
    slots = list_entries(view.page_table, count=view.longest, per_page=keys.per_page)
    scores = q.new_zeros(q.shape[0], view.longest)
    # tokens that each have keys of their own to read: decodes, or, where lengths are not known, all
    apart = len(q) if view.prefills is None else view.num_decodes
    tile = max(1, TILE_ELEMENTS // max(1, q.shape[-1] * view.longest))
    for low in range(0, apart, tile):
        span = slice(low, min(low + tile, apart))
        own = keys.gather(slots.index_select(0, view.requests[span]), torch.float32)  # [t, N, E]
        hits = torch.einsum("the,tne->thn", q[span], own).relu_()
        scores[span] = torch.einsum("thn,th->tn", hits, weights[span])
    for request, start, count, num_entries in view.prefills or ():
        own = keys.gather(slots[request, :num_entries], torch.float32)  # [n, E], shared by the tokens
        tile = max(1, SCORE_ELEMENTS // max(1, q.shape[1] * num_entries))
        for low in range(start, start + count, tile):
            span = slice(low, min(low + tile, start + count))
            hits = torch.einsum("the,ne->thn", q[span], own).relu_()
            scores[span, :num_entries] = torch.einsum("thn,th->tn", hits, weights[span])
    return scores[tokens]


def select_entries(
    scores: torch.Tensor, view: EntryView, *, top_k: int, per_page: int, tokens: slice
) -> torch.Tensor:
    """See `SELECT_ENTRIES`."""
    chosen = choose_entries(scores, view.visible[tokens], top_k)
    requests = view.requests[tokens][:, None].expand_as(chosen)
    return find_slots(view.page_table, requests, chosen.clamp(min=0), per_page).masked_fill_(chosen < 0, -1)


def choose_entries(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ``top_k`` highest-scoring of each token's first ``visible`` [T] entries, in any order; all of them, in
    ascending order, if there are at most ``top_k``. ``scores`` [T, N]. Returns [T, top_k] int64, padded with -1. Ties
    are broken arbitrarily."""
    numbers = torch.arange(top_k, device=visible.device)
    first = numbers.expand(len(visible), -1).masked_fill(numbers >= visible[:, None], -1)
    if scores.shape[1] <= top_k:
        return first
    everything = torch.arange(scores.shape[1], device=visible.device)
    best = scores.masked_fill(everything >= visible[:, None], float("-inf")).topk(top_k, dim=-1).indices
    # rows with more than top_k visible entries: `best` holds no masked one
    return torch.where(visible[:, None] <= top_k, first, best)
