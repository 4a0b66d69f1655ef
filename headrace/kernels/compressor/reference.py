"""Compression in plain torch: the oracle and the fallback. C candidates, n tokens of an entry, W projected dims."""

from __future__ import annotations

import torch

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.coded_linear.reference import quantise_rows
from headrace.kernels.compressor import EntryPages, Pool, Pooling, RowNorm, StatePages, Windows
from headrace.kernels.latents import LatentNorm, LatentRows
from headrace.kernels.latents.reference import hadamard, make_latents, write_latents
from headrace.kernels.latents.slots import find_slots
from headrace.kernels.rowwise.reference import rms_norm


def compress(
    projected: torch.Tensor, windows: Windows, state: StatePages, pooling: Pooling, norm: LatentNorm,
    entries: EntryPages,
) -> None:
    """See `COMPRESS`."""
    numbers = windows.numbers.clamp(min=0)
    pooled = make_latents(_pool(projected, windows, state, pooling, len(norm.weight)), norm, numbers * pooling.ratio)
    slots = find_slots(entries.page_table, windows.requests, numbers, entries.slots.per_page)
    if entries.slots.holds_keys:
        # A Hadamard matrix spreads outliers over the dims and so lowers the error of a scale for all of them; it is
        # orthonormal, so turning queries and keys alike leaves q . k unchanged.
        pooled = pooled @ hadamard(pooled.shape[1], pooled.device)
    entries.slots.write(slots.masked_fill(windows.numbers < 0, 0), pooled)  # slot 0 is in the null page


def _pool(
    projected: torch.Tensor, windows: Windows, state: StatePages, pooling: Pooling, dim: int
) -> torch.Tensor:
    """Entries [C, E] before norm and rotation; meaningless for candidates without a window."""
    ratio, width = pooling.ratio, pooling.ape.shape[1]
    reach = width // dim * ratio
    requests, numbers = windows.requests, windows.numbers.clamp(min=0)
    starts = windows.query_start.long().index_select(0, requests)
    ends = windows.query_start.long().index_select(0, requests + 1)
    begins = windows.kv_lens.long().index_select(0, requests) - (ends - starts)  # the step's first positions
    positions = ((numbers + 1) * ratio - reach)[:, None] + torch.arange(reach, device=projected.device)  # [C, n]
    is_new = positions >= begins[:, None]
    fresh = (positions + (starts - begins)[:, None]).clamp(0, max(0, len(projected) - 1))
    old = _find_rows(state, requests[:, None].expand_as(positions), positions.clamp(min=0))
    stored = [pages.flatten(0, 1) for pages in (state.values, state.gates)]
    values, gates = (
        torch.where(is_new.unsqueeze(-1), part[fresh], kept[old])
        for part, kept in zip(projected.split(width, dim=1), stored, strict=True)
    )
    gates = gates + pooling.ape.repeat(reach // ratio, 1)
    if reach > ratio:  # [C, 2r, 2E] to [C, 2r, E]: first dims of the window before, last dims of the own window
        values, gates = (
            torch.cat((t[:, :ratio, :dim], t[:, ratio:, dim:]), dim=1) for t in (values, gates)
        )
    nothing = (positions < 0).unsqueeze(-1)  # before a request's first window
    weights = gates.masked_fill(nothing, float("-inf")).softmax(dim=1)
    return (values.masked_fill(nothing, 0) * weights).sum(dim=1)


def _find_rows(state: StatePages, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    numbers = positions // state.block * state.ring + positions % state.ring
    return find_slots(state.page_table, requests, numbers, state.values.shape[1])


def store_state(projected: torch.Tensor, state: StatePages, rows: torch.Tensor) -> None:
    """See `STORE_STATE`."""
    for pages, part in zip((state.values, state.gates), projected.chunk(2, dim=1), strict=True):
        pages.view(-1, part.shape[1]).index_copy_(0, rows, part)


def finish(query: RowNorm, latents: LatentRows, pools: tuple[Pool, ...]) -> torch.Tensor | Fp8Rows:
    """See `FINISH_PROJECTIONS`."""
    write_latents(latents)
    for pool in pools:
        store_state(pool.projected, pool.state, pool.rows)
        compress(pool.projected, pool.windows, pool.state, pool.pooling, pool.norm, pool.entries)
    normalised = rms_norm(query.x, query.weight, query.eps)
    return normalised if query.group is None else quantise_rows(normalised, query.group)
