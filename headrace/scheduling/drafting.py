"""`Drafting`: how many drafts each decoding request has verified in the next step, and which.

Refuses: making drafts on a device (a plan only says how many), and pages (the planner drops drafts that do not fit).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.step import MAX_DRAFTS, RowDraft
from headrace.scheduling.request import Request


@dataclass(slots=True)
class Guess:
    """What a request's tokens may be from position ``start`` on."""

    start: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def is_right(self, request: Request) -> bool:
        """Whether all tokens known by now are as guessed."""
        known = request.known_len - self.start
        return 0 <= known < len(self.token_ids) and request.tokens[self.start :].tolist() == self.token_ids[:known]


class Drafting:
    """Guesses by request, and the choice of how many of their tokens to verify. A guess stays until it is used up or
    turns out wrong."""

    def __init__(self) -> None:
        self._guesses: dict[Request, Guess] = {}
        self.num_proposals = 0

    @property
    def has_drafts(self) -> bool:
        """Whether `choose_lengths` may find anything."""
        return bool(self._guesses)

    def guess(self, request: Request, start: int, token_ids: list[int]) -> None:
        """Note what the request's tokens may be from position ``start`` on; replaces an earlier guess."""
        self._guesses[request] = Guess(start, token_ids)

    def forget(self, request: Request) -> None:
        """The request left the running set."""
        self._guesses.pop(request, None)

    def choose_lengths(self, ready: list[Request], max_tokens: int) -> list[int] | None:
        """For each decoding request the tokens of its next span, 1 and its drafts, ``max_tokens`` together; None where
        no request has any draft. In order, so that the same requests win when not all fit."""
        left, lengths, has_any = max_tokens - len(ready), [], False
        for request in ready:
            count = 0
            if request in self._guesses and left > 0:
                count = max(0, min(self._count_drafts(request), left))
                left -= count
                has_any = has_any or count > 0
            lengths.append(1 + count)
        return lengths if has_any else None

    def _count_drafts(self, request: Request) -> int:
        """Drafts that the request's guess still has, as far as its output may grow."""
        guess = self._guesses[request]
        if not guess.is_right(request):
            del self._guesses[request]
            return 0
        # The span begins at ``planned_len`` with a token that is sampled by then; drafts follow.
        most = min(guess.end, request.limit_len) - request.planned_len - 1
        return min(most, MAX_DRAFTS)

    def take_drafts(self, ready: list[Request], lengths: list[int]) -> list[RowDraft]:
        """The drafts of these spans, for the plan; called before ``planned_len`` advances."""
        drafts = []
        for request, length in zip(ready, lengths, strict=True):
            if length > 1:
                guess = self._guesses[request]
                # From the earliest position that the row's last token may have by now, so that the device can compare
                # that token; up to the last one it may verify if all drafts in flight are right.
                begin = max(guess.start, request.planned_len - request.num_unsure)
                end = request.planned_len + length
                drafts.append(RowDraft(request.row, begin, guess.token_ids[begin - guess.start : end - guess.start]))
        return drafts
