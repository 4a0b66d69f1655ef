"""The operations of this package in plain torch: the oracle, and what CPUs run. Nothing waits for a device."""

from __future__ import annotations

import torch

from headrace.kernels.verify import DecodeInputs, RowTensors


def decode_inputs(
    entries: torch.Tensor, rows: RowTensors, tables: torch.Tensor, page_size: int, out: DecodeInputs, *,
    back: int = 0, longest: int = 0,
) -> None:
    """See `headrace.kernels.verify.DECODE_INPUTS`; copies whole page-table rows, used or not."""
    own, offsets = entries.unbind()
    out.token_ids.copy_(entry_tokens(own, offsets, rows))
    torch.add(rows.computed_len.index_select(0, own), offsets - back, out=out.positions)
    out.positions.clamp_(min=0, max=longest - 1 if longest else None)
    out.kv_lens.copy_(out.positions + 1)
    torch.index_select(tables, 1, own, out=out.page_tables)
    # [G, B]: the page of each entry's token, by cache group
    pages = out.page_tables.gather(2, (out.positions // page_size).expand(len(tables), -1).unsqueeze(2)).squeeze(2)
    torch.add(pages.long() * page_size, out.positions % page_size, out=out.slots)


def entry_tokens(own: torch.Tensor, offsets: torch.Tensor, rows: RowTensors) -> torch.Tensor:
    """Input tokens [B] of entries: the last token, or the draft before the offset."""
    drafts = rows.drafts[own, (offsets - 1).clamp(min=0)].clamp(min=0)
    return torch.where(offsets > 0, drafts, rows.last_token.index_select(0, own))


def accept(
    sampled: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, rows: RowTensors, most: int
) -> torch.Tensor:
    """See `headrace.kernels.verify.ACCEPT`."""
    (own, offsets), ids = entries, sampled[0]
    if most == 0:
        counts = torch.ones_like(ids)
        rows.last_token.index_copy_(0, own, ids)
        _set_lengths(rows, own, positions + 1)
        return torch.stack((*sampled, counts))
    is_first = offsets == 0
    drafts = rows.drafts[own, (offsets - 1).clamp(min=0)]
    num_wrong = (~is_first & (drafts != ids.roll(1))).cumsum(0)  # up to and with each entry
    at = torch.arange(len(ids), device=ids.device)
    first = at - offsets  # [B]: the index of the row's first entry
    counts_here = (num_wrong == num_wrong.index_select(0, first)).long()  # 1 for entries whose token counts
    counts = torch.zeros_like(ids).index_add_(0, first, counts_here).index_select(0, first)
    # All entries of a row write the same values, so their order does not matter.
    rows.last_token.index_copy_(0, own, ids.index_select(0, first + counts - 1))
    _set_lengths(rows, own, positions.index_select(0, first) + counts)
    return torch.stack((*sampled, counts))


def _set_lengths(rows: RowTensors, own: torch.Tensor, lengths: torch.Tensor) -> None:
    rows.computed_len.index_copy_(0, own, lengths)
    rows.computed_len[-1] = 0  # of the null row


def place_drafts(guesses: torch.Tensor, rows: RowTensors) -> None:
    """See `headrace.kernels.verify.PLACE_DRAFTS`."""
    own, starts, guess = guesses[:, 0], guesses[:, 1], guesses[:, 2:]
    # [n]: the index in the guess of the row's next token
    at = rows.computed_len.index_select(0, own) + 1 - starts
    last = guess.shape[1] - 1
    index = at.unsqueeze(1) + torch.arange(rows.drafts.shape[1], device=at.device)  # [n, N]
    drafts = guess.gather(1, index.clamp(0, last)).masked_fill_(index > last, -1)
    before = guess.gather(1, (at - 1).clamp(0, last).unsqueeze(1)).squeeze(1)
    is_wrong = (at < 0) | (at > guess.shape[1]) | ((at > 0) & (before != rows.last_token.index_select(0, own)))
    rows.drafts.index_copy_(0, own, drafts.masked_fill_(is_wrong.unsqueeze(1), -1))
