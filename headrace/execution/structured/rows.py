"""`GrammarRows`: the grammars of the running rows, and the bitmasks of their next tokens.

A bitmask needs the token before it. Where that is still on the device (two plans in flight), a step is launched up to
its sampling; the bitmasks are filled as soon as the step before is read, while the device computes, and sampling is
launched before the next step. S sampled rows, V vocabulary, W = ceil(V / 32).

Forced tokens (jump-forward decoding): where a grammar leaves no choice for a few tokens, the step that sampled the one
before them reports them, too. The matcher advances by them at once; what a later step in flight samples in their place
is recognised by its index in the output and ignored.

All of this runs on the thread that drives the runner; only compiling and `GrammarLibrary.fill` use other threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.base.sampling import SamplingSpec
from headrace.execution.structured.bitmasks import BitmaskTable, HeldTokens, RowBitmasks
from headrace.execution.structured.lazy_dfa import DfaState
from headrace.execution.structured.library import CompiledGrammar, GrammarLibrary, GrammarStore, Matcher

MIN_FORCED = 2
"""The fewest tokens of a forced run that is reported: a run of one gains nothing."""

FORCED_COST = 0.8
"""The cost of forced runs to each row of a step, in decode steps, as measured over captured graphs (the next step has
prefill spans, which the decode graphs cannot replay). A row with a run of n tokens gains n - 1 steps."""


class SampledStep(Protocol):
    """A launched step, as `headrace.execution.result.PendingSample` is one. ``forced``: see `StepResult`."""

    forced: list[tuple[int, list[int]]]

    @property
    def is_done(self) -> bool:
        """Whether `read_ids` would not wait."""

    def read_ids(self) -> list[int]:
        """The sampled ids in the order of the batch; waits for the step."""


class StartedRow(Protocol):
    """What a row was started with: see `headrace.execution.rows.RowTokens`."""

    @property
    def token_ids(self) -> np.ndarray: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def sampling(self) -> SamplingSpec: ...


class SampledRows(Protocol):
    """The rows that sample in a step: see `headrace.execution.step.SampleBatch`."""

    @property
    def rows(self) -> np.ndarray: ...
    @property
    def output_lens(self) -> np.ndarray: ...
    @property
    def constrained(self) -> np.ndarray: ...


@dataclass(eq=False, slots=True)
class Constraint:
    """The grammar of one row and the state of its output. ``num_tokens``: length of the output as far as it is known.
    ``can_force``: whether sampling a token has no effect but the token (no rules, penalties or logprobs). ``is_over``:
    the output has ended. ``bitmask_key``: equal for outputs whose next bitmasks are equal; the row's number, shared
    with nobody, where no state is known.

    ``state``: of the output in the grammar's automaton, None where that cannot tell. Where it can, the matcher is
    advanced only when it is needed: a bitmask from the table costs 2 us, one that llguidance fills 60 to 200.
    """

    row: int
    grammar: CompiledGrammar
    can_force: bool = False
    held: HeldTokens | None = None
    num_tokens: int = 0
    is_over: bool = False
    last_token: int = -1
    error: str | None = None
    state: DfaState | None = None
    bitmask_key: Hashable = None
    _matcher: Matcher = field(init=False)
    _pending: list[int] = field(default_factory=list)  # tokens that the matcher has not seen

    def __post_init__(self) -> None:
        self._matcher = self.grammar.start()
        self._move(self.grammar.states.start if self.grammar.states is not None else None)

    @property
    def matcher(self) -> Matcher:
        """The library's matcher, advanced by all tokens of the output first."""
        if self._pending:
            self._matcher.accept(self._pending)
            self._pending = []
            self._read_error()
        return self._matcher

    def accept(self, token: int, *, is_end: bool) -> None:
        """Advance by a token; with ``is_end`` it ends the output."""
        self.last_token = token
        self.num_tokens += 1
        if self.is_over or self.error is not None:
            return
        if is_end:
            self.is_over = True
            return
        self._pending.append(token)
        if self.state is not None and self.grammar.states is not None:
            self._move(self.grammar.states.step(self.state, token))
        if self.state is None:
            _ = self.matcher  # advances it now, while the device computes: a bitmask will be needed of it anyway

    def forced_bytes(self) -> bytes:
        """The text that must follow, b"" where there is a choice. Found once per automaton state."""
        if self.error is not None:
            return b""
        if self.state is None:
            return self.matcher.forced_bytes()
        if self.state.forced is None:
            self.state.forced = self.matcher.forced_bytes()
        return self.state.forced

    def fix(self, bitmask: np.ndarray) -> None:
        """Turn the library's bitmask [W] into the row's, in place: nothing is allowed after an error (the row is then
        refused), and held tokens are removed below the minimum length."""
        self._read_error()
        if self.error is not None:
            bitmask[:] = 0
        elif self.held is not None and self.num_tokens < self.held.count:
            self.held.clear(bitmask)

    def _move(self, state: DfaState | None) -> None:
        self.state, self.bitmask_key = state, self.row
        if state is not None and self.grammar.states is not None:
            key = self.grammar.states.find_key(state)
            is_held = self.held is not None and self.num_tokens < self.held.count
            self.bitmask_key = (key, self.held) if is_held else key

    def _read_error(self) -> None:
        self.error = self._matcher.error
        if self.error is not None:
            self.bitmask_key = self.row


@dataclass(slots=True)
class BitmaskFill:
    """The bitmasks of a step: ``constraints[i]`` is at index ``places[i]`` of the batch [S] and samples token
    ``indices[i]`` of its output. They are filled once all tokens before are known to the host."""

    rows: GrammarRows
    num_rows: int
    constraints: list[Constraint]
    places: list[int]
    indices: list[int]
    step: SampledStep | None = None
    bitmasks: RowBitmasks | None = None

    def result(self) -> RowBitmasks:
        """The bitmasks; waits for the step before."""
        if self.bitmasks is None:
            self.rows.catch_up(before=self.step)
        assert self.bitmasks is not None
        return self.bitmasks

    def follow(self, step: SampledStep) -> None:
        """Note the step that uses these bitmasks, launched up to its sampling: its tokens are read next."""
        self.step = step
        self.rows.await_step(step, list(zip(self.places, self.indices, self.constraints, strict=True)))


@dataclass(slots=True)
class _Unread:
    """A launched step whose tokens the matchers have not seen: ``(place in the batch, index in the output, row)``."""

    step: SampledStep
    sampled: list[tuple[int, int, Constraint]] = field(default_factory=list)


class GrammarRows:
    """Driven by the runner: `start` and `release` with the rows, `begin` as a step is launched, `BitmaskFill.follow`
    once all of it but its sampling is, and `catch_up` before its result is read.

    ``min_forced``: forced runs of fewer tokens are sampled one by one, and so are longer ones where the rows of a step
    would lose more by them than those that have runs gain.
    """

    def __init__(
        self, store: GrammarStore, vocab_size: int, max_rows: int, device: torch.device, *, min_forced: int = MIN_FORCED
    ):
        self.min_forced = min_forced
        self._store, self._num_words, self._device = store, -(-vocab_size // 32), device
        self._constraints: dict[int, Constraint] = {}
        self._unread: deque[_Unread] = deque()
        self._waiting: BitmaskFill | None = None  # not filled yet: tokens of the steps before it are not read
        self._batch_size = 1  # rows of the latest step
        self._max_rows = max_rows
        self._table: BitmaskTable | None = None  # made for the first row

    def start(self, row: int, known: StartedRow) -> None:
        """A row with a grammar was taken. The grammar advances by its output so far (after a retraction)."""
        sampling, rules = known.sampling, known.sampling.rules
        assert sampling.grammar is not None
        compiled = self._store.find(sampling.grammar)
        can_force = rules is None and sampling.penalties is None and sampling.num_logprobs < 0
        held = HeldTokens(rules.min_tokens, tuple(rules.held_ids)) if rules is not None and rules.min_tokens else None
        if self._table is None:
            self._table = BitmaskTable(self._max_rows, self._num_words, self._device)
        constraint = self._constraints[row] = Constraint(row, compiled, can_force, held)
        # `Rows` has the output of a request that was retracted; for a new request this is empty.
        for token in map(int, known.token_ids[known.prompt_len :]):
            self._accept(constraint, token)

    def release(self, row: int) -> None:
        """Drop the grammar of a row that was given back. Steps in flight keep its `Constraint`, which nobody reads
        then; without any grammar their tokens need not be read for the matchers at all."""
        if self._constraints.pop(row, None) is not None and not self._constraints:
            self._unread.clear()

    def begin(self, batch: SampledRows) -> BitmaskFill | None:
        """Fill the bitmasks of a batch, now or when the tokens before are read; None when no row has a grammar. Call it
        once the device is at work."""
        self._batch_size = len(batch.rows)
        if not len(batch.constrained):
            return None
        constraints = [self._constraints[row] for row in map(int, batch.rows[batch.constrained])]
        places = list(map(int, batch.constrained))
        indices = list(map(int, batch.output_lens[batch.constrained]))
        fill = self._waiting = BitmaskFill(self, self._batch_size, constraints, places, indices)
        if all(entry.step.is_done for entry in self._unread):
            self.catch_up()  # without waiting; else `BitmaskFill.result` does it, as late as it can
        return fill

    def await_step(self, step: SampledStep, sampled: list[tuple[int, int, Constraint]]) -> None:
        """A step was launched that samples tokens ``(place in its batch, index in the output, constraint)``."""
        self._unread.append(_Unread(step, sampled))

    def reset(self) -> None:
        """Forget all rows, and all bitmasks: some may not have been written."""
        self._constraints.clear()
        self._unread.clear()
        self._waiting = self._table = None

    def catch_up(self, last: SampledStep | None = None, *, before: SampledStep | None = None) -> None:
        """Advance the matchers by the tokens of all launched steps, up to ``last`` or ``before`` one of them; waits for
        those. Then fill the bitmasks that waited for them."""
        if last is not None and not any(entry.step is last for entry in self._unread):
            return
        while self._unread and self._unread[0].step is not before:
            entry = self._unread.popleft()
            self._advance(entry)
            if entry.step is last:
                break
        # All steps before the waiting fill's own are read: its bitmasks can be filled.
        fill = self._waiting
        if fill is not None and (not self._unread or self._unread[0].step is fill.step):
            self._waiting = None
            self._fill(fill)

    def _accept(self, constraint: Constraint, token: int) -> None:
        constraint.accept(token, is_end=token in self._store.eos_ids)

    def _advance(self, entry: _Unread) -> None:
        ids, going = entry.step.read_ids(), []
        for place, index, constraint in entry.sampled:
            if index == constraint.num_tokens:  # else it was known before it was sampled
                self._accept(constraint, ids[place])
                if constraint.can_force and not constraint.is_over:
                    going.append(constraint)
        if going and self._store.forced_tokens is not None:
            entry.step.forced += self._force(going)

    def _force(self, constraints: list[Constraint]) -> list[tuple[int, list[int]]]:
        """Advance by the tokens that grammars force now, if that saves more than it costs: ``[(row, tokens)]`` or
        []. Rows that gain pay, too; see `FORCED_COST`."""
        runs = [(each, run) for each in constraints if len(run := self._find_run(each)) >= self.min_forced]
        if sum(len(run) - 1 for _, run in runs) < FORCED_COST * self._batch_size:
            return []
        return [(each.row, self._follow_run(each, run)) for each, run in runs]

    def _find_run(self, constraint: Constraint) -> list[int]:
        assert self._store.forced_tokens is not None
        text = constraint.forced_bytes()
        is_short = len(text) < self.min_forced
        return [] if is_short else self._store.forced_tokens.find(text, constraint.last_token)

    def _follow_run(self, constraint: Constraint, run: list[int]) -> list[int]:
        """The run, or its beginning if the matcher reaches its limit on work; the next bitmask reports that."""
        for count, token in enumerate(run, 1):
            self._accept(constraint, token)
            _ = constraint.matcher
            if constraint.error is not None:
                return run[:count]
        return run

    def _fill(self, fill: BitmaskFill) -> None:
        """Fill each bitmask that the step needs and the table has not. A row that is over, or further on by a forced
        run, is allowed everything: what it samples is ignored."""
        table, slot_of_row = self._table, np.full(fill.num_rows, -1, dtype=np.int32)
        assert table is not None, "a row with a grammar was started"
        users: dict[Hashable, list[Constraint]] = {}  # of the bitmasks to fill
        slots: dict[Hashable, int] = {}
        for place, index, constraint in zip(fill.places, fill.indices, fill.constraints, strict=True):
            if constraint.is_over or index < constraint.num_tokens:
                continue
            # In the table from before: nothing to fill. Keys that are row numbers are of one output at one position, so
            # their slot's old content is never valid.
            key = constraint.bitmask_key
            slot = table.find(key)
            if key == constraint.row or slot is None or key in users:
                _ = constraint.matcher
                key = constraint.bitmask_key  # advancing may have failed, and then the key is the row's own
                users.setdefault(key, []).append(constraint)
                slot = table.find(key)
                slot = slots[key] = table.add(key) if slot is None else slot
            slot_of_row[place] = slot
        result = fill.bitmasks = RowBitmasks.allocate(table, slot_of_row, list(slots.values()))
        _fill_all([constraints[0] for constraints in users.values()], result.new)
        for (key, (first, *others)), bitmask in zip(users.items(), result.new, strict=True):
            first.fix(bitmask)
            filled = first.error is None
            while not filled and others:  # its matcher is at its limit on work; others in the same state may not be
                other = others.pop()
                _fill_all([other], bitmask[None])
                other.fix(bitmask)
                filled = other.error is None
            if not filled:
                result.errors |= {each.row: each.error for each in users[key]}
                table.drop(key)  # an empty bitmask, which must not serve later outputs in this state


def _fill_all(constraints: Sequence[Constraint], bitmasks: np.ndarray) -> None:
    """Let the libraries fill ``bitmasks[i]`` [G, W] for constraint i, except for those with an error."""
    groups: dict[GrammarLibrary, list[int]] = {}
    matchers = [constraint.matcher for constraint in constraints]
    for i, constraint in enumerate(constraints):
        if constraint.error is None:
            groups.setdefault(constraint.grammar.library, []).append(i)
    for library, indices in groups.items():
        if len(indices) == len(constraints):
            library.fill(matchers, bitmasks)
        else:
            part = np.empty((len(indices), bitmasks.shape[1]), dtype=np.int32)
            library.fill([matchers[i] for i in indices], part)
            bitmasks[indices] = part
