"""`GrammarRows`: the grammars of the running rows, and the bitmasks of their next tokens.

A bitmask needs the token before it. Where that is still on the device (two plans in flight), a step is launched up to
its sampling; the bitmasks are filled as soon as the step before is read, while the device computes, and sampling is
launched before the next step. S sampled rows, V vocabulary, W = ceil(V / 32).

Drafts: a row with drafts samples at several positions, and the bitmask of each depends on the drafts before it. Those
are read from the device once the step before is done, as they may have been made or chosen there. A fork of the row's
state follows them; the state itself advances by the tokens that count.

Forced tokens: where a grammar leaves no choice for a few tokens, the step that sampled the one before them reports them
as drafts (`StepResult.drafts`).

All of this runs on the thread that drives the runner; only compiling and `GrammarLibrary.fill` use other threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.base.sampling import SamplingSpec
from headrace.base.step import RowDraft
from headrace.execution.structured.bitmasks import BitmaskTable, HeldTokens, RowBitmasks
from headrace.execution.structured.lazy_dfa import DfaState
from headrace.execution.structured.library import CompiledGrammar, GrammarLibrary, GrammarStore, Matcher


class SampledStep(Protocol):
    """A launched step, as `headrace.execution.result.PendingSample` is one. ``drafts``: see `StepResult`."""

    drafts: list[RowDraft]

    @property
    def is_done(self) -> bool:
        """Whether `read_tokens` would not wait."""

    def read_tokens(self) -> tuple[list[int], list[int]]:
        """The sampled ids in the order of the batch, and for each how many of its row's count; waits for the step."""


class StartedRow(Protocol):
    """What a row was started with: see `headrace.execution.rows.RowTokens`."""

    @property
    def token_ids(self) -> np.ndarray: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def sampling(self) -> SamplingSpec: ...


class SampledRows(Protocol):
    """The positions that sample in a step: see `headrace.execution.step.SampleBatch`."""

    @property
    def entries(self) -> np.ndarray: ...
    @property
    def most_drafts(self) -> int: ...
    @property
    def constrained(self) -> np.ndarray: ...


@dataclass(eq=False, slots=True)
class Constraint:
    """The grammar of one row and the state of its output. ``prompt_len``: tokens before the output; ``num_tokens``:
    length of the output as far as it is known. ``is_over``: the output has ended. ``bitmask_key``: equal for outputs
    whose next bitmasks are equal; where no state is known ``own_key``, which is shared with nobody.

    ``state``: of the output in the grammar's automaton, None where that cannot tell. Where it can, the matcher is
    advanced only when it is needed: a bitmask from the table costs 2 us, one that llguidance fills 60 to 200.
    """

    row: int
    grammar: CompiledGrammar
    prompt_len: int = 0
    held: HeldTokens | None = None
    own_key: Hashable = None
    num_tokens: int = 0
    is_over: bool = False
    last_token: int = -1
    error: str | None = None
    state: DfaState | None = None
    bitmask_key: Hashable = None
    _matcher: Matcher | None = None  # made when it is needed first
    _origin: Constraint | None = None  # of a fork: where its matcher is copied from
    _pending: list[int] = field(default_factory=list)  # tokens that the matcher has not seen

    @classmethod
    def begin(cls, row: int, grammar: CompiledGrammar, prompt_len: int, held: HeldTokens | None = None) -> Constraint:
        """The constraint of an output without tokens."""
        constraint = cls(row, grammar, prompt_len, held, own_key=row)
        constraint._move(grammar.states.start if grammar.states is not None else None)
        return constraint

    def fork(self, index: int) -> Constraint:
        """A copy that follows drafts; ``index`` tells the forks of a row apart. It must not be used once the constraint
        itself has advanced."""
        own_key = (self.row, index)
        key = own_key if self.bitmask_key == self.own_key else self.bitmask_key
        return Constraint(
            self.row, self.grammar, self.prompt_len, self.held, own_key, self.num_tokens, self.is_over,
            self.last_token, self.error, self.state, key, _origin=self,
        )

    @property
    def matcher(self) -> Matcher:
        """The library's matcher, advanced by all tokens of the output first."""
        if self._matcher is None:
            self._matcher = self.grammar.start() if self._origin is None else self._origin.matcher.copy()
            self._read_error()
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
        self.state, self.bitmask_key = state, self.own_key
        if state is not None and self.grammar.states is not None:
            key = self.grammar.states.find_key(state)
            is_held = self.held is not None and self.num_tokens < self.held.count
            self.bitmask_key = (key, self.held) if is_held else key

    def _read_error(self) -> None:
        assert self._matcher is not None
        self.error = self._matcher.error
        if self.error is not None:
            self.bitmask_key = self.own_key


class PendingDrafts(Protocol):
    """The drafts of a step's rows, on their way to the host."""

    def read(self) -> np.ndarray:
        """[n, N] int64, -1 where there is none; waits for the step before."""


@dataclass(slots=True)
class BitmaskFill:
    """The bitmasks of a step: ``constraints[i]`` has ``lengths[i]`` positions in the batch [S], from index
    ``places[i]`` on. They are filled once all tokens before, and the drafts, are known to the host."""

    rows: GrammarRows
    num_positions: int
    constraints: list[Constraint]
    places: list[int]
    lengths: list[int]
    drafts: PendingDrafts | None = None
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
        self.rows.await_step(step, list(zip(self.places, self.constraints, strict=True)))

    def expand(self) -> Iterator[tuple[int, Constraint]]:
        """``(index in the batch, state)`` of every position: the row's own state, then forks that follow its drafts."""
        drafts = None if self.drafts is None else self.drafts.read()
        for i, (place, length, constraint) in enumerate(zip(self.places, self.lengths, self.constraints, strict=True)):
            yield place, constraint
            state = constraint
            for j in range(1, length):
                assert drafts is not None, "positions behind drafts, which nobody sent"
                token = int(drafts[i, j - 1])
                if token < 0:  # no draft, so nothing behind it counts
                    break
                state = state.fork(j)
                self.rows.accept(state, token)
                yield place + j, state


@dataclass(slots=True)
class _Unread:
    """A launched step whose tokens the matchers have not seen: ``(index in the batch of its first position, row)``."""

    step: SampledStep
    sampled: list[tuple[int, Constraint]] = field(default_factory=list)


class GrammarRows:
    """Driven by the runner: `start` and `release` with the rows, `begin` as a step is launched, `BitmaskFill.follow`
    once all of it but its sampling is, and `catch_up` before its result is read.

    ``forces``: whether tokens that a grammar forces are reported as drafts.
    """

    def __init__(
        self, store: GrammarStore, vocab_size: int, max_rows: int, device: torch.device, *, forces: bool = True
    ):
        self._forces = forces
        self._store, self._num_words, self._device = store, -(-vocab_size // 32), device
        self._constraints: dict[int, Constraint] = {}
        self._unread: deque[_Unread] = deque()
        self._waiting: BitmaskFill | None = None  # not filled yet: tokens of the steps before it are not read
        self._max_rows = max_rows
        self._table: BitmaskTable | None = None  # made for the first row

    def start(self, row: int, known: StartedRow) -> None:
        """A row with a grammar was taken. The grammar advances by its output so far (after a retraction)."""
        sampling, rules = known.sampling, known.sampling.rules
        assert sampling.grammar is not None
        compiled = self._store.find(sampling.grammar)
        held = HeldTokens(rules.min_tokens, tuple(rules.held_ids)) if rules is not None and rules.min_tokens else None
        if self._table is None:
            self._table = BitmaskTable(self._max_rows, self._num_words, self._device)
        constraint = self._constraints[row] = Constraint.begin(row, compiled, known.prompt_len, held)
        # `Rows` has the output of a request that was retracted; for a new request this is empty.
        for token in map(int, known.token_ids[known.prompt_len :]):
            self.accept(constraint, token)

    def release(self, row: int) -> None:
        """Drop the grammar of a row that was given back. Steps in flight keep its `Constraint`, which nobody reads
        then; without any grammar their tokens need not be read for the matchers at all."""
        if self._constraints.pop(row, None) is not None and not self._constraints:
            self._unread.clear()

    def find_rows(self, batch: SampledRows) -> list[int]:
        """The rows of a batch that have a grammar, in the order of `BitmaskFill.constraints`."""
        rows, offsets = batch.entries[:, batch.constrained]
        return list(map(int, rows[offsets == 0]))

    def begin(self, batch: SampledRows, drafts: PendingDrafts | None = None) -> BitmaskFill | None:
        """Fill the bitmasks of a batch, now or when the tokens before are read; None when no row has a grammar.
        ``drafts``: of the rows of `find_rows`, where the batch has any. Call it once the device is at work."""
        if not len(batch.constrained):
            return None
        constraints = [self._constraints[row] for row in self.find_rows(batch)]
        firsts = np.flatnonzero(batch.entries[1, batch.constrained] == 0)
        places = list(map(int, batch.constrained[firsts]))
        lengths = list(map(int, np.diff(firsts, append=len(batch.constrained))))
        fill = self._waiting = BitmaskFill(self, batch.entries.shape[1], constraints, places, lengths, drafts)
        if all(entry.step.is_done for entry in self._unread):
            self.catch_up()  # without waiting; else `BitmaskFill.result` does it, as late as it can
        return fill

    def await_step(self, step: SampledStep, sampled: list[tuple[int, Constraint]]) -> None:
        """A step was launched that samples tokens of ``(index in its batch, constraint)``."""
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

    def accept(self, constraint: Constraint, token: int) -> None:
        """Advance a state by a token."""
        constraint.accept(token, is_end=token in self._store.eos_ids)

    def _advance(self, entry: _Unread) -> None:
        ids, counts = entry.step.read_tokens()
        for place, constraint in entry.sampled:
            for token in ids[place : place + counts[place]]:
                self.accept(constraint, token)
            if self._forces and not constraint.is_over:
                run = self._find_forced(constraint)
                if run:
                    start = constraint.prompt_len + constraint.num_tokens
                    entry.step.drafts.append(RowDraft(constraint.row, start, run))

    def _find_forced(self, constraint: Constraint) -> list[int]:
        """The tokens that the grammar forces next, as the tokenizer would split them."""
        forced_tokens = self._store.forced_tokens
        text = constraint.forced_bytes() if forced_tokens is not None else b""
        return forced_tokens.find(text, constraint.last_token) if forced_tokens is not None and text else []

    def _fill(self, fill: BitmaskFill) -> None:
        """Fill each bitmask that the step needs and the table has not. A row that is over is allowed everything: what
        it samples is ignored. So is what comes behind a draft that the grammar does not allow."""
        table, slot_of_row = self._table, np.full(fill.num_positions, -1, dtype=np.int32)
        assert table is not None, "a row with a grammar was started"
        table.require(sum(fill.lengths))
        users: dict[Hashable, list[Constraint]] = {}  # of the bitmasks to fill
        slots: dict[Hashable, int] = {}
        for place, constraint in fill.expand():
            if constraint.is_over or (constraint.error is not None and constraint.own_key != constraint.row):
                continue
            # In the table from before: nothing to fill. Own keys are of one output at one position, so their slot's old
            # content is never valid.
            key = constraint.bitmask_key
            slot = table.find(key)
            if key == constraint.own_key or slot is None or key in users:
                _ = constraint.matcher
                key = constraint.bitmask_key  # advancing may have failed, and then the key is the state's own
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
