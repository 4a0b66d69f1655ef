"""`TextSpeculation`: one engine's text drafter, and which rows it is asked about in a step.

Refuses: pages, plans and device rows. Requests are integers here, each with its growing list of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from headrace.scheduling.speculation.drafter import TextDrafter
from headrace.scheduling.speculation.policy import Choice, DraftPolicy
from headrace.scheduling.speculation.trial import Trial

TRIES = 8
"""Steps without drafts after which a row is cold; new rows are warm."""
MOST_COLD = 16
"""Cold rows that the drafter is asked about per step at most; halved with every step in which that leads to nothing."""
RECHECK_STEPS = 16
"""Steps after which it is looked at again whether drafts can pay at all."""


class TextRow(NamedTuple):
    """A row that may get drafts in the next step. ``num_ahead``: tokens that steps in flight will add to those known,
    if all their drafts are right; ``most``: drafts that it may get."""

    key: int
    num_ahead: int
    most: int


class TextGuess(NamedTuple):
    """Guessed tokens of a row from position ``start`` on, the first that is not known. Behind the tokens that steps in
    flight are assumed to add, ``num_drafts`` are worth verifying."""

    key: int
    start: int
    token_ids: list[int]
    num_drafts: int


class _Guess(NamedTuple):
    """A guess that was handed out: its drafts are at positions ``[first, first + num_drafts)``."""

    start: int
    first: int
    num_drafts: int
    token_ids: list[int]
    probabilities: list[float]


class _Row:
    __slots__ = ("guesses", "is_private", "num_given", "num_seen", "tokens")

    def __init__(self, tokens: Sequence[int], is_private: bool):
        self.tokens = tokens
        self.is_private = is_private
        self.num_given = len(tokens)  # when it began to decode; what follows is output
        self.num_seen = -1  # tokens that the drafter knows; -1: it does not know the row
        self.guesses: deque[_Guess] = deque()  # not settled yet, oldest first


class TextSpeculation:
    """Warm rows, those that had drafts lately, are asked about in every step. Of the others it is the turn of a few in
    each step, as many as lead to something and at least one. So a step costs next to nothing for rows that have nothing
    to propose, however many run. A drafter does no work at all while no draft would pay, nor after steps with drafts
    made fewer tokens per second than those without (`Trial`). With a fixed number of drafts all rows are asked about in
    every step.

    What became of drafts is read from the tokens of the row, which grow with each commit: nothing is called there.
    """

    def __init__(self, drafter: TextDrafter, policy: DraftPolicy):
        self._drafter = drafter
        self._policy = policy
        self._rows: dict[int, _Row] = {}
        self._warm: dict[int, int] = {}  # steps without drafts that the row may still have
        self._cold: dict[int, None] = {}  # the next turn first
        self._num_turns = MOST_COLD
        self._asked: dict[int, None] = {}  # cold rows whose turn it is in this step
        self._pays = False
        self._checked_rows = self._unchecked = 0
        self._trial = Trial()

    def note_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of decodes alone made so many tokens in so much time."""
        self._trial.note(num_rows, num_tokens, seconds)

    def start(self, key: int, tokens: Sequence[int], *, is_private: bool = False) -> None:
        """A row begins to decode. ``tokens``: all its tokens; new ones are appended to it by the caller."""
        self._rows[key] = _Row(tokens, is_private)
        self._warm[key] = TRIES
        self._policy.start(key)

    def stop(self, key: int) -> None:
        """The row is over, or left the device; unknown keys are ignored."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        self._warm.pop(key, None)
        self._cold.pop(key, None)
        if row.num_seen >= 0:
            self._learn(key, row)
            self._drafter.stop(key)
        self._policy.stop(key)

    def due(self, num_rows: int) -> list[int]:
        """Keys to ask about in the step that is planned now, of ``num_rows`` rows; to be called once per step."""
        if self._policy.is_fixed:
            return [*self._rows]
        if not self._trial.is_on:
            return []
        self._unchecked -= 1
        if self._unchecked < 0 or num_rows != self._checked_rows:
            self._pays = self._policy.pays(num_rows)
            self._unchecked, self._checked_rows = RECHECK_STEPS, num_rows
        if not self._pays:
            return []
        self._num_turns = max(1, self._num_turns // 2) if self._asked else self._num_turns
        self._asked = dict.fromkeys(islice(self._cold, self._num_turns))
        for key in self._asked:  # to the end
            del self._cold[key]
            self._cold[key] = None
        return [*self._warm, *self._asked]

    def guess(self, rows: Sequence[TextRow], num_rows: int, budget_entries: int) -> list[TextGuess]:
        """Guesses for those of the rows whose drafts pay, of those that were `due`. ``num_rows`` rows are in the step;
        with their drafts it has at most ``budget_entries`` entries."""
        choices, guesses = [], []
        for asked in rows:
            guess = self._propose(asked)
            if guess is None:
                self._cool(asked.key)
                continue
            behind = guess.first - guess.start
            lead = self._policy.survival(asked.key, guess.probabilities[:behind]) if behind else 1.0
            choices.append(Choice(asked.key, guess.probabilities[behind:], lead))
            guesses.append(guess)
        if not choices:
            return []
        result, has_found = [], False
        counts = self._policy.choose_among(choices, num_rows, budget_entries)
        for (key, _, _), guess, count in zip(choices, guesses, counts, strict=True):
            if count == 0:
                self._cool(key)
                continue
            self._rows[key].guesses.append(guess._replace(num_drafts=count))
            if key in self._asked:
                self._cold.pop(key)
                has_found = True
            self._warm[key] = TRIES
            result.append(TextGuess(key, guess.start, guess.token_ids, count))
        if has_found:
            self._asked, self._num_turns = {}, MOST_COLD
        return result

    def _cool(self, key: int) -> None:
        """The row has no drafts in this step."""
        left = self._warm.get(key, 0) - 1
        if left > 0:
            self._warm[key] = left
        elif left == 0:
            del self._warm[key]
            self._cold[key] = None

    def _propose(self, asked: TextRow) -> _Guess | None:
        """The row's tokens from the first unknown one on, as far as the drafter can guess them; None if that is not
        beyond those that steps in flight add."""
        key, num_ahead, most = asked
        row = self._rows[key]
        self._learn(key, row)
        known = len(row.tokens)
        assumed: list[int] = []
        stated: list[float] = []
        if num_ahead > 1 and row.guesses:  # the step in flight verifies drafts
            latest = row.guesses[-1]
            assumed = latest.token_ids[known - latest.start : known - latest.start + num_ahead - 1]
            stated = latest.probabilities[known - latest.start : known - latest.start + num_ahead - 1]
        elif num_ahead > 1:
            num_ahead = 1  # its drafts turned out wrong before they were looked at: it makes one token
        if len(assumed) < num_ahead - 1:
            return None
        token_ids, probabilities = self._drafter.propose(key, num_ahead - len(assumed) + most, assumed)
        if len(assumed) + len(token_ids) <= num_ahead:
            return None
        return _Guess(known, known + num_ahead, 0, assumed + token_ids, stated + probabilities)

    def _learn(self, key: int, row: _Row) -> None:
        """Tell the drafter the row's new tokens, and the policy what became of earlier drafts."""
        known = len(row.tokens)
        if row.num_seen < 0:
            self._drafter.start(key, row.tokens[: row.num_given], is_private=row.is_private)
            row.num_seen = row.num_given
        if row.num_seen < known:
            self._drafter.append(key, row.tokens[row.num_seen :])
        row.num_seen = known
        while row.guesses:
            start, first, num_drafts, token_ids, probabilities = row.guesses[0]
            made = list(row.tokens[start : first + num_drafts])
            num_right = _common(made, token_ids)
            if num_right < min(len(made), first - start):
                self._policy.note_void(num_drafts)
            elif known > first:
                behind = first - start
                self._policy.note(key, num_drafts, num_right - behind, probabilities[behind : behind + num_drafts])
            else:
                break
            row.guesses.popleft()


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    for index, (a, b) in enumerate(zip(left, right)):  # noqa: B905
        if a != b:
            return index
    return min(len(left), len(right))
