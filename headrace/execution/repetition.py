"""Two samplers that work against repetition: DRY (`DryState`) lowers the logits of tokens that would continue a
sequence that the row's history already holds; XTC (`exclude_top_choices`) excludes the most likely tokens at random.

Both are functions of a row's history, parameters, seed and position alone, so they give the same in every batch.
n positions, V vocabulary, W tokens of history looked at, K length of a match.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.sampling import DryPenalty
from headrace.execution.rows import RowTokens
from headrace.execution.upload import Upload
from headrace.kernels.sample.reference import uniform
from headrace.memory.copies import to_device

REACH = 64
"""Tokens by which a match may exceed the allowed length. Longer ones count as that long: the penalty grows
exponentially, so that the token is excluded in effect long before."""
LARGEST_PENALTY = 1e9
COMPARED_NUMEL = 2**24
"""Pairs of tokens compared at a time, which bounds temporaries."""
NO_TOKEN, PADDING = -1, -2
"""No token, as in a history that is shorter than the window; equal to no id, nor to each other."""
HEAD = 1024
"""How many of the best tokens are looked at first to find XTC's cuts: sorting a vocabulary takes ten times longer."""
XTC_STREAM = 0x1C69B3F74AC4AE35
"""Added to a row's seed: whether to exclude is decided by numbers other than those that choose the token."""


@dataclass(slots=True)
class _DrySlot:
    slot: int
    penalty: DryPenalty
    bound: int
    """Upper bound of the length of the row's history; the device knows the length itself."""


class DryState:
    """Histories of the rows with DRY, on the device. Each has a slot: ``tokens`` [slots, capacity] int32, ``lens``
    [slots] int64, ``breakers`` [slots, V] bool, tokens that no match may hold. Slots and capacity double when needed.

    https://github.com/oobabooga/text-generation-webui/pull/5677, with sequence breakers as llama.cpp has them.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._tokens = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._lens = torch.zeros(0, dtype=torch.int64, device=device)
        self._breakers = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._rows: dict[int, _DrySlot] = {}
        self._free: list[int] = []

    def start(self, row: int, known: RowTokens) -> None:
        """Take a slot for a row if it has DRY, with the tokens it starts with."""
        self.release(row)
        dry = None if known.sampling.penalties is None else known.sampling.penalties.dry
        if dry is None:
            return
        length = len(known.token_ids)
        if not self._free:
            self._grow(max(4, 2 * len(self._lens)), self._tokens.shape[1])
        self._reserve(length)
        slot = self._free.pop()
        self._rows[row] = _DrySlot(slot, dry, length)
        # The slot's last owner may still be read by a step in flight; the stream runs these writes behind it.
        self._tokens[slot, :length] = to_device(known.token_ids.astype(np.int32), self._device)
        self._lens[slot : slot + 1].fill_(length)
        bits = np.unpackbits(np.frombuffer(dry.breakers, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        self._breakers[slot] = to_device(bits.astype(np.bool_), self._device)

    def release(self, row: int) -> None:
        """Give a row's slot back, if it has one."""
        if row in self._rows:
            self._free.append(self._rows.pop(row).slot)

    def pack(self, rows: np.ndarray, upload: Upload, *, most_new: int = 1) -> None:
        """Add what `apply` and `push` need for those of these positions whose ``rows`` have DRY. ``most_new``: tokens
        that the step may add to a row."""
        indices = [index for index, row in enumerate(rows) if int(row) in self._rows]
        if not indices:
            return
        chosen = [self._rows[int(rows[index])] for index in indices]
        for slot in {id(slot): slot for slot in chosen}.values():
            slot.bound += most_new
        self._reserve(max(slot.bound for slot in chosen))
        upload.add("dry_indices", indices)
        upload.add("dry_slots", [slot.slot for slot in chosen])
        upload.add("dry_reals", np.array([(s.penalty.multiplier, s.penalty.base) for s in chosen]).T.ravel())
        # A window of 0 tokens never comes: the client sends no DRY then.
        windows = [min(s.penalty.last_n if s.penalty.last_n > 0 else s.bound, s.bound) for s in chosen]
        upload.add("dry_integers", [*(slot.penalty.allowed_len for slot in chosen), *windows])
        self._window = max(windows)
        self._match = min(max(s.penalty.allowed_len for s in chosen) + REACH, self._window)

    def apply(
        self, logits: torch.Tensor, sent: dict[str, torch.Tensor], drafts: torch.Tensor | None = None,
        num_drafts: torch.Tensor | None = None,
    ) -> None:
        """Penalise logits [n, V] of the packed positions in place: a token that would continue a match of L >= allowed
        tokens between the end of the history and an earlier part of it loses ``multiplier * base ** (L - allowed)``.
        ``drafts`` [n, k]: tokens behind the row's own history, of which a position sees the first ``num_drafts`` [n];
        positions of one row have the same drafts."""
        if "dry_indices" not in sent:
            return
        indices, slots = sent["dry_indices"], sent["dry_slots"]
        lens = self._lens.index_select(0, slots)
        if drafts is not None and num_drafts is not None:
            self._write(slots, lens, drafts.index_select(0, indices))
            lens = lens + num_drafts.index_select(0, indices)
        multiplier, base = sent["dry_reals"].float().view(2, -1, 1)
        allowed, window = sent["dry_integers"].view(2, -1, 1)
        history = self._read(slots, lens, window)
        breakers = self._breakers.index_select(0, slots)
        # [n, W]: the length of the match between the history's end and the part that ends at each token; index 0 is
        # the end itself, whose match with itself says nothing.
        lengths = _match_lengths(history, _is_breaker(history, breakers), self._match)
        best = torch.zeros((len(slots), self._vocab_size), dtype=torch.int64, device=self._device)
        followers = history[:, :-1].clamp(min=0)  # the token behind each part, newest first
        best.scatter_reduce_(1, followers.long(), lengths[:, 1:].long(), "amax")
        penalty = multiplier * base ** (best - allowed).clamp(min=0).float()
        is_hit = (best >= allowed) & ~breakers
        own = logits.index_select(0, indices)
        own -= torch.where(is_hit, penalty.clamp(max=LARGEST_PENALTY), 0.0)
        logits.index_copy_(0, indices, own)

    def push(self, ids: torch.Tensor, sent: dict[str, torch.Tensor], is_output: torch.Tensor | None = None) -> None:
        """Remember new tokens ``ids`` [n, k] of the packed positions' rows: the first ones for which ``is_output``
        [n, k] bool is True, None: all. Positions of one row have the same tokens."""
        if "dry_indices" not in sent:
            return
        indices, slots = sent["dry_indices"], sent["dry_slots"]
        ids, lens = ids.index_select(0, indices), self._lens.index_select(0, slots)
        self._write(slots, lens, ids)
        added = ids.shape[1] if is_output is None else is_output.index_select(0, indices).sum(-1)
        self._lens.index_copy_(0, slots, lens + added)

    def _write(self, slots: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor) -> None:
        """Write ``ids`` [n, k] behind the histories. What lies beyond a history's length is never read as part of
        it."""
        at = (lens.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)).clamp_(max=self._tokens.shape[1] - 1)
        self._tokens.index_put_((slots.unsqueeze(1), at), ids.int())

    def _read(self, slots: torch.Tensor, lens: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """[n, W] int32: histories, newest token first, `NO_TOKEN` beyond their begin or window [n, 1]."""
        back = torch.arange(self._window, device=self._device)
        at = lens.unsqueeze(1) - 1 - back
        tokens = self._tokens.index_select(0, slots).gather(1, at.clamp(min=0))
        return tokens.masked_fill_((at < 0) | (back >= window), NO_TOKEN)

    def _reserve(self, length: int) -> None:
        """Room for histories of so many tokens."""
        if length > self._tokens.shape[1]:
            self._grow(len(self._lens), max(256, 2 * self._tokens.shape[1], length))

    def _grow(self, num_slots: int, capacity: int) -> None:
        old, width = self._tokens.shape
        tokens = torch.zeros((num_slots, capacity), dtype=torch.int32, device=self._device)
        tokens[:old, :width] = self._tokens
        added = num_slots - old
        self._tokens = tokens
        self._lens = torch.cat((self._lens, torch.zeros(added, dtype=torch.int64, device=self._device)))
        more = torch.zeros((added, self._vocab_size), dtype=torch.bool, device=self._device)
        self._breakers = torch.cat((self._breakers, more))
        self._free.extend(range(old, num_slots))


def _is_breaker(history: torch.Tensor, breakers: torch.Tensor) -> torch.Tensor:
    """[n, W] bool: tokens of the histories [n, W] that end any match."""
    return breakers.gather(1, history.clamp(min=0).long()) | (history < 0)


def _match_lengths(history: torch.Tensor, is_breaker: torch.Tensor, longest: int) -> torch.Tensor:
    """[n, W] int32: for each token of the histories [n, W], newest first, how many tokens up to it equal those up to
    the end, at most ``longest`` and none of them a breaker."""
    num_rows, width = history.shape
    ending, is_free = history[:, :longest].unsqueeze(1), ~is_breaker[:, :longest].unsqueeze(1)  # [n, 1, K]
    padded = torch.nn.functional.pad(history, (0, longest - 1), value=PADDING)
    step = max(1, COMPARED_NUMEL // (num_rows * longest))
    parts = []
    for begin in range(0, width, step):
        end = min(begin + step, width)
        parts_of = padded[:, begin : end + longest - 1].unfold(1, longest, 1)  # [n, w, K], a view
        is_equal = ((parts_of == ending) & is_free).to(torch.uint8)
        parts.append(is_equal.cumprod(-1, dtype=torch.uint8).sum(-1, dtype=torch.int32))
    return torch.cat(parts, dim=1)


@dataclass(slots=True)
class _Cuts:
    """Parameters of n rows, each [n, 1]."""

    threshold: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor


def exclude_top_choices(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, reals: torch.Tensor, top_k: torch.Tensor
) -> None:
    """XTC (https://github.com/oobabooga/text-generation-webui/pull/6335): of the tokens with at least ``threshold`` of
    the probability, all but the least likely are excluded, with a chance of ``probability`` at each position.

    logits [n, V] are changed in place: what is excluded, and what min-p, top-k and top-p cut, which come before it,
    becomes -inf. ``reals`` [5 * n]: probability, threshold, temperature, top_p and min_p; ``top_k``, ``seeds`` and
    ``positions`` [n] int64. Ties with the last token that a cut keeps are kept."""
    probability, threshold, temperature, top_p, min_p = (column.unsqueeze(1) for column in reals.view(5, -1))
    cuts = _Cuts(threshold, top_p, min_p, top_k.unsqueeze(1))
    scaled = logits.double() / temperature
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    weights.masked_fill_(weights < min_p, 0.0)
    is_chosen = uniform(seeds + XTC_STREAM, positions).unsqueeze(1) < probability
    # Where looking at a result costs nothing, the best tokens are tried first: they nearly always decide all cuts.
    lowest, num_above, order, is_decided = _find_cuts(weights, cuts, min(HEAD, logits.shape[1]))
    if logits.device.type != "cpu" or not bool(is_decided.all()):
        lowest, num_above, order, _ = _find_cuts(weights, cuts, logits.shape[1])
    excluded = is_chosen & (torch.arange(order.shape[1], device=logits.device) < num_above - 1)
    banned = (weights < lowest).logical_or_(weights == 0.0)
    banned.scatter_(1, order, banned.gather(1, order) | excluded)
    logits.masked_fill_(banned, -torch.inf)


def _find_cuts(
    weights: torch.Tensor, cuts: _Cuts, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(least weight kept [n, 1], tokens with at least the threshold [n, 1], best tokens [n, width], whether these
    were enough to know [n, 1])`` for weights [n, V], 0 where min-p cuts."""
    order = weights.topk(width, dim=-1).indices.sort(dim=-1).values
    ranked, places = weights.gather(1, order).sort(dim=-1, descending=True, stable=True)  # ties: the lower id first
    order = order.gather(1, places)
    kth = ranked.gather(1, torch.where(cuts.top_k > 0, cuts.top_k, width).clamp(max=width) - 1)
    lowest = torch.where(cuts.top_k > 0, kth, 0.0)
    kept = ranked * (ranked >= lowest)
    everything = weights.sum(-1, keepdim=True)
    total = torch.where(cuts.top_k > 0, kept.sum(-1, keepdim=True), everything)
    reached, wanted = kept.cumsum(-1), cuts.top_p * total
    in_nucleus = (reached - kept < wanted) & (kept > 0)
    last = ranked.gather(1, in_nucleus.sum(-1, keepdim=True).clamp(min=1) - 1)
    has_nucleus = cuts.top_p < 1.0
    lowest = torch.where(has_nucleus, torch.maximum(last, lowest), lowest)
    kept = kept * (ranked >= lowest)
    total = torch.where(has_nucleus, kept.sum(-1, keepdim=True), total)
    num_above = ((kept >= cuts.threshold * total) & (kept > 0)).sum(-1, keepdim=True)
    is_decided = (cuts.top_k < width) & (num_above < width) & (~has_nucleus | (reached[:, -1:] >= wanted))
    return lowest, num_above, order, is_decided
