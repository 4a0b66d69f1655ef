"""`Drafting`: how many drafts each decoding request has verified in the next step, and which.

Drafts are guessed from text (`TextSpeculation`), forced by a grammar, or made by a drafter on the device; in the last
case a plan only says how many. Refuses: pages (the planner drops drafts that do not fit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import prod

from headrace.base.messages import SpeculationStats
from headrace.base.speculation import Speculation, SpeculativeOptions
from headrace.base.step import MAX_DRAFTS, MAX_ENTRIES, RowDraft
from headrace.scheduling.request import Request
from headrace.scheduling.speculation.costs import DraftCosts, StepCosts
from headrace.scheduling.speculation.drafter import make_text_drafter
from headrace.scheduling.speculation.policy import Choice, DraftPolicy, fill_up
from headrace.scheduling.speculation.text import TextRow, TextSpeculation

FORCED_PROBABILITY = 0.97
"""Probability that the model splits forced text into tokens as its tokenizer does."""
MAX_ROWS = 64
"""Requests up to which text is asked for drafts: with more of them, steps are too full to gain much, and the host would
be kept busy for longer than the device."""
MAX_NEWCOMERS = 4
"""Requests that text is first asked for in one step: their prompts are indexed then."""


@dataclass(slots=True)
class Guess:
    """Guessed tokens of a request from position ``start`` on. ``probabilities[i]``: the probability that token i is
    right, given that all before it are."""

    start: int
    token_ids: list[int]
    probabilities: list[float]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def is_right(self, request: Request) -> bool:
        """Whether all tokens known by now are as guessed, and some are left."""
        return request.known_len < self.end and _agrees(request, self.start, self.token_ids)


@dataclass(slots=True)
class Verified:
    """The guess of a span in flight: what the plan says, and the probabilities of the drafts, empty if the policy does
    not hear of them from here."""

    draft: RowDraft
    probabilities: list[float]


@dataclass(slots=True)
class DraftCounters:
    """Totals since start: spans that verified drafts, drafts, and how many were right by position."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """One span."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        positions = self.accepted_per_position
        positions.extend([0] * (num_drafts - len(positions)))
        for position in range(num_accepted):
            positions[position] += 1


class Drafting:
    """``text`` guesses from text. ``device_drafts``: the most drafts per row that a drafter on the device makes, 0
    for none. ``max_entries``: decodes and drafts of a step together, ``most_drafts``: of a row. A guess stays until it
    is used up or turns out wrong."""

    def __init__(
        self, policy: DraftPolicy, *, text: TextSpeculation | None = None, device_drafts: int = 0,
        max_entries: int = MAX_ENTRIES, most_drafts: int = MAX_DRAFTS,
    ):
        self.device_drafts = device_drafts
        self._counters = DraftCounters()
        self._num_proposals = device_drafts
        self._policy, self._text = policy, text
        self._max_entries, self._most_drafts = max_entries, most_drafts
        self._guesses: dict[Request, Guess] = {}  # forced by grammars
        self._chosen: dict[Request, Guess] = {}  # whose drafts the step that is being planned verifies
        self._by_key: dict[int, Request] = {}  # those that ``text`` knows
        self._followed: set[int] = set()  # keys that the policy knows

    @property
    def has_drafts(self) -> bool:
        """Whether `choose_lengths` may find anything."""
        return bool(self._guesses or self.device_drafts or self._text is not None)

    def stats(self) -> SpeculationStats:
        """Counters since start."""
        counters = self._counters
        positions = list(counters.accepted_per_position)
        return SpeculationStats(counters.drafts, counters.draft_tokens, sum(positions), positions)

    # -- what is known of a request -----------------------------------------------------------------------------

    def guess(self, request: Request, start: int, token_ids: list[int]) -> None:
        """A grammar forces the request's tokens from position ``start`` on; replaces an earlier guess."""
        self._guesses[request] = Guess(start, token_ids, [FORCED_PROBABILITY] * len(token_ids))

    def forget(self, request: Request) -> None:
        """The request left the running set."""
        self._guesses.pop(request, None)
        if self._text is not None and self._by_key.pop(request.seq, None) is not None:
            self._text.stop(request.seq)
        if request.seq in self._followed:
            self._followed.discard(request.seq)
            self._policy.stop(request.seq)

    def note(self, request: Request, num_drafts: int, num_accepted: int, verified: Verified | None) -> None:
        """A span with drafts was committed; called before the request's new tokens are appended."""
        is_void = verified is not None and not _agrees(request, verified.draft.start, verified.draft.token_ids)
        if not is_void:
            self._counters.note(num_drafts, num_accepted)
        if request.seq not in self._followed or (verified is not None and not verified.probabilities):
            return
        if is_void:
            self._policy.note_void(num_drafts)
        else:
            probabilities = None if verified is None else verified.probabilities
            self._policy.note(request.seq, num_drafts, num_accepted, probabilities)

    def note_time(self, lengths: Sequence[int], seconds: float, *, num_tokens: int, num_proposals: int = 0) -> None:
        """A step of decodes alone, with spans of these lengths, took so long and made so many tokens."""
        self._policy.note_time(sum(lengths), seconds, num_rows=len(lengths), num_drafted=num_proposals)
        if self._text is not None:
            self._text.note_step(len(lengths), num_tokens, seconds)

    # -- the next step ------------------------------------------------------------------------------------------

    def choose_lengths(self, ready: list[Request], max_tokens: int) -> list[int] | None:
        """For each decoding request the tokens of its next span, 1 and its drafts, ``max_tokens`` together; None where
        no request has any draft."""
        if not ready:
            return None
        self._chosen = {}
        max_tokens = min(max_tokens, max(self._max_entries, len(ready)))
        counts = [0] * len(ready)
        if self._guesses:  # first: what grammars force is right more often than what a drafter says
            self._choose_forced(ready, max_tokens, counts)
        if self.device_drafts:
            self._choose_made(ready, max_tokens - sum(counts), counts)
        elif self._text is not None and len(ready) <= MAX_ROWS:
            self._choose_text(ready, max_tokens - sum(counts), counts, self._text)
        return [1 + count for count in counts] if any(counts) or (self.device_drafts and self._num_proposals) else None

    def _choose_forced(self, ready: list[Request], max_tokens: int, counts: list[int]) -> None:
        choices, indices = [], []
        for index, request in enumerate(ready):
            choice = self._make_choice(request) if request in self._guesses else None
            if choice is not None:
                choices.append(choice)
                indices.append(index)
        if not choices:
            return
        if self._policy.is_ready:
            found = self._policy.choose_among(choices, len(ready), max_tokens)
        else:  # nothing was measured: what a grammar forces is as good as certain
            found = fill_up([len(choice.probabilities) for choice in choices], max_tokens - len(ready))
        for index, count in zip(indices, found, strict=True):
            counts[index] = count
            if count:
                self._chosen[ready[index]] = self._guesses[ready[index]]

    def _choose_text(
        self, ready: list[Request], max_tokens: int, counts: list[int], text: TextSpeculation
    ) -> None:
        newcomers = (request for request in ready if request.seq not in self._by_key)
        for request in islice(newcomers, MAX_NEWCOMERS):
            self._by_key[request.seq] = request
            text.start(request.seq, request.tokens, is_private=bool(request.namespace))
        index_of = {request: index for index, request in enumerate(ready)}
        rows = []
        for key in text.due(len(ready)):
            request = self._by_key[key]
            if request in index_of and not counts[index_of[request]]:
                ahead = request.planned_len + 1 - request.known_len
                rows.append(TextRow(key, ahead, min(self._most_drafts, request.limit_len - request.planned_len - 1)))
        for guess in text.guess([row for row in rows if row.most > 0], len(ready), max_tokens) if rows else ():
            request = self._by_key[guess.key]
            self._chosen[request] = Guess(guess.start, guess.token_ids, [])
            counts[index_of[request]] = guess.num_drafts

    def _make_choice(self, request: Request) -> Choice | None:
        """The drafts that the request's guess still has, as far as its output may grow."""
        guess = self._guesses[request]
        if not guess.is_right(request):
            del self._guesses[request]
            return None
        # The span begins at ``planned_len`` with a token that is sampled by then; drafts follow.
        first = request.planned_len + 1
        most = min(guess.end, request.limit_len, first + self._most_drafts) - first
        if most <= 0:
            return None
        self._follow(request)
        known, begin = request.known_len - guess.start, first - guess.start
        lead = prod(guess.probabilities[known:begin])  # that the steps in flight end as guessed
        return Choice(request.seq, guess.probabilities[begin : begin + most], lead)

    def _choose_made(self, ready: list[Request], max_tokens: int, counts: list[int]) -> None:
        """Choose how many of the drafts that the device made in the step before are verified, for rows without other
        drafts. Rows that were left out once have none any more. The device makes as many for the next step as would
        be verified now if there were that many."""
        mosts, device_drafts = [], self.device_drafts
        for request, forced in zip(ready, counts, strict=True):
            self._follow(request)
            room = request.limit_len - request.planned_len - 1
            mosts.append(min(device_drafts, max(0, room)) if request.num_proposed and not forced else 0)
        made = self._policy.choose([request.seq for request in ready], mosts, max_tokens)
        if self._policy.is_fixed or not self._policy.is_ready:
            self._num_proposals = device_drafts
        elif not all(counts):  # where all rows are forced, the drafter goes on as it did
            self._num_proposals = max(made)
        counts[:] = [
            forced or min(own, request.num_proposed)
            for forced, own, request in zip(counts, made, ready, strict=True)
        ]

    def count_proposals(self, newcomers: list[Request], num_rows: int, max_tokens: int) -> int:
        """Drafts per row that the device makes after the next step, for its decodes and for requests that begin to
        decode then; 0 where they are not expected to pay."""
        if newcomers and not self._num_proposals and self._policy.pays(num_rows + len(newcomers)):
            for request in newcomers:
                self._follow(request)
            keys, mosts = [request.seq for request in newcomers], [self.device_drafts] * len(newcomers)
            hoped = self._policy.choose(keys, mosts, max_tokens, num_others=num_rows)
            self._num_proposals = max(hoped)
        return self._num_proposals

    def take_drafts(self, ready: list[Request], lengths: list[int]) -> dict[Request, Verified]:
        """The guesses of these spans, for the plan; called before ``planned_len`` advances."""
        found = {}
        for request, length in zip(ready, lengths, strict=True):
            guess = self._chosen.get(request)
            if length > 1 and guess is not None:
                # From the earliest position that the row's last token may have by now, so that the device can compare
                # that token; up to the last one it may verify if all drafts in flight are right.
                begin = max(guess.start, request.planned_len - request.num_unsure) - guess.start
                end = request.planned_len + length - guess.start
                draft = RowDraft(request.row, guess.start + begin, guess.token_ids[begin:end])
                found[request] = Verified(draft, guess.probabilities[end - length + 1 : end])
        return found

    def _follow(self, request: Request) -> None:
        if request.seq not in self._followed:
            self._followed.add(request.seq)
            self._policy.start(request.seq)


def _agrees(request: Request, start: int, token_ids: list[int]) -> bool:
    """Whether the request's tokens from position ``start`` on, as far as they are known, are these."""
    known = request.known_len - start
    return known >= 0 and request.tokens[start:].tolist() == token_ids[:known]


def build_drafting(options: SpeculativeOptions, speculation: Speculation) -> Drafting:
    """For one engine, whose model is drafted for as ``speculation`` says."""
    times = speculation.times
    drafting = DraftCosts(times.follows, times.drafts) if times.drafts else None
    policy = DraftPolicy(StepCosts(times.steps), fixed=options.num_fixed, drafting=drafting)
    make = partial(Drafting, max_entries=speculation.max_entries, most_drafts=speculation.most_drafts)
    if speculation.device_drafts:
        return make(policy, device_drafts=speculation.device_drafts)
    if speculation.method == "off":
        return make(DraftPolicy(StepCosts()))
    return make(policy, text=TextSpeculation(make_text_drafter(speculation.method, options), policy))
