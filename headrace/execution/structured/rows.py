"""`GrammarRows`: how far the rows with a grammar have come, and the masks of their next tokens.

A mask needs the token before it. Where that is on the host already the masks are filled on a thread while the device
computes; where it is still on the device (two plans in flight) they are filled once the step has been launched, as soon
as the step before it is read. Either way no step waits for a mask but the draw at its end. G rows, V vocabulary.

Where a grammar leaves no choice for a few tokens, the step that drew the one before them tells them, too. Matchers go on
by them at once; what a later step in flight draws in their place is recognised by its position and ignored.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.execution.rows import RowTokens
from headrace.execution.sampling import RowMasks, SampleBatch
from headrace.execution.structured.constraint import Constraint
from headrace.execution.structured.library import GrammarLibrary
from headrace.execution.structured.store import GrammarStore
from headrace.execution.upload import host_words

MIN_JUMP = 2
"""Tokens that a forced run must have."""

JUMP_COST = 0.8
"""What runs in it add to a step, in steps, as measured over captured graphs: all rows of the step pay, and each that has a run gains its tokens but one."""


class DrawnStep(Protocol):
    """A launched step, as `headrace.execution.result.PendingSample` is one. ``forced``: see `StepResult`."""

    forced: list[tuple[int, list[int]]]

    @property
    def is_done(self) -> bool:
        """Whether `read_ids` would not wait."""

    def read_ids(self) -> list[int]:
        """The drawn ids in the order of the batch; waits for the step."""


@dataclass(slots=True)
class Filling:
    """Masks on their way: ``constraints[i]`` is at place ``places[i]`` of the batch and draws token ``indices[i]`` of its
    output. ``masks``: see `RowMasks`; ``written`` are its words."""

    rows: GrammarRows
    constraints: list[Constraint]
    places: list[int]
    indices: list[int]
    masks: RowMasks
    written: np.ndarray
    work: Future[None] | None = None

    def result(self) -> RowMasks:
        """The masks; waits for the thread, or for the step before and then fills them here."""
        if self.work is None:
            self.rows.catch_up()
            self.rows.fill(self)
        else:
            self.work.result()
        self.masks.errors.update((c.row, c.matcher.error) for c in self.constraints if c.matcher.error and not c.is_over)
        return self.masks

    def follow(self, step: DrawnStep) -> None:
        """The step that uses these masks was launched."""
        self.rows.await_step(step, list(zip(self.places, self.indices, self.constraints, strict=True)))


@dataclass(slots=True)
class _Unread:
    """A launched step whose tokens the matchers have not seen."""

    step: DrawnStep
    drawn: list[tuple[int, int, Constraint]] = field(default_factory=list)


class GrammarRows:
    """Driven by the runner: `start` and `release` with the rows, `begin` as a step is launched, `Filling.follow` after, and
    `catch_up` before its result is read. ``min_jump``: forced runs of fewer tokens are drawn one by one, and longer ones,
    too, where the rows of a step would lose more by them than those that have runs gain."""

    def __init__(self, store: GrammarStore, vocab_size: int, max_rows: int, device: torch.device, *, min_jump: int = MIN_JUMP):
        self._store, self._num_words, self._max_rows, self._device, self.min_jump = store, -(-vocab_size // 32), max_rows, device, min_jump
        self._table: torch.Tensor | None = None
        self._constraints: dict[int, Constraint] = {}
        self._unread: list[_Unread] = []
        self._batch_size = 1  # of the latest step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, row: int, known: RowTokens) -> None:
        """A row with a grammar was taken; what it has output already (before a retraction) is gone through again."""
        assert known.sampling.grammar is not None
        compiled = self._store.find(known.sampling.grammar)
        sampling = known.sampling
        can_jump = sampling.rules is None and sampling.penalties is None and sampling.num_logprobs < 0
        if self._table is None:
            self._table = torch.zeros((self._max_rows, self._num_words), dtype=torch.int32, device=self._device)
        constraint = Constraint(row, compiled.start(), compiled.library, compiled.plain, can_jump=can_jump)
        rules = sampling.rules
        if rules is not None and rules.min_tokens:
            constraint.min_tokens, constraint.held = rules.min_tokens, self._bits(rules.held_ids)
        self._constraints[row] = constraint
        for token in known.token_ids[known.prompt_len :]:
            constraint.accept(int(token), is_end=token in self._store.eos_ids)

    def release(self, row: int) -> None:
        """A row was given back."""
        if self._constraints.pop(row, None) is not None and not self._constraints:
            self._unread.clear()

    def begin(self, batch: SampleBatch, *, is_launched: bool = False) -> Filling | None:
        """Start on the masks of a batch; None when no row of it has a grammar. ``is_launched``: the caller has nothing to do
        meanwhile, so that no other thread is asked."""
        self._batch_size = len(batch.rows)
        if not len(batch.constrained):
            return None
        assert self._table is not None, "a row with a grammar was started"
        constraints = [self._constraints[row] for row in map(int, batch.rows[batch.constrained])]
        places, indices = list(map(int, batch.constrained)), list(map(int, batch.output_lens[batch.constrained]))
        words, written = host_words(RowMasks.count_words(len(batch.rows), len(constraints), self._num_words), self._device)
        filling = Filling(self, constraints, places, indices, RowMasks(self._table, words, len(batch.rows), len(constraints)), written)
        if not is_launched and all(unread.step.is_done for unread in self._unread):
            self.catch_up()
            if any(constraint.is_asking for constraint in constraints):
                filling.work = self._thread.submit(self.fill, filling)
        return filling

    def await_step(self, step: DrawnStep, drawn: list[tuple[int, int, Constraint]]) -> None:
        """A step was launched whose tokens ``(place in its batch, index in the output, constraint)`` go on with these."""
        self._unread.append(_Unread(step, drawn))

    def reset(self) -> None:
        """Forget all rows."""
        self._constraints.clear()
        self._unread.clear()

    def catch_up(self, last: DrawnStep | None = None) -> None:
        """Let the matchers see the tokens of all launched steps, up to ``last`` if it is given; waits for those."""
        if last is not None and not any(entry.step is last for entry in self._unread):
            return
        while self._unread:
            entry = self._unread.pop(0)
            ids = entry.step.read_ids()
            going = []
            for place, index, constraint in entry.drawn:
                if index == constraint.num_tokens:  # else it was known before it was drawn
                    constraint.accept(ids[place], is_end=ids[place] in self._store.eos_ids)
                    going.append(constraint)
            entry.step.forced += self._jump(going)
            if entry.step is last:
                return

    def _jump(self, constraints: list[Constraint]) -> list[tuple[int, list[int]]]:
        """Go on by the tokens that grammars force now, if they are many; ``[(row, tokens)]`` or nothing."""
        runs = [(constraint, run) for constraint in constraints if len(run := self._find_run(constraint)) >= self.min_jump]
        if sum(len(run) - 1 for _, run in runs) < JUMP_COST * self._batch_size:
            return []
        return [(constraint.row, self._follow_run(constraint, run)) for constraint, run in runs]

    def _find_run(self, constraint: Constraint) -> list[int]:
        jumps = self._store.jumps
        if jumps is None or not constraint.can_jump or constraint.is_steady or not constraint.is_going:
            return []
        text = constraint.matcher.read_forced()
        return jumps.find(text, constraint.last_token) if len(text) >= self.min_jump else []

    def _follow_run(self, constraint: Constraint, run: list[int]) -> list[int]:
        """The run, or its beginning if the matcher gives up in it: at its limit on work; the next draw tells."""
        for count, token in enumerate(run, 1):
            constraint.accept(token, is_end=False)
            if constraint.matcher.error is not None:
                return run[:count]
        return run

    def fill(self, filling: Filling) -> None:
        """Write the masks that have changed. A row that cannot go on is allowed nothing; one that is over, or further on by a
        forced run, and computed before that was known, everything."""
        rows, mask_of_row, masks = filling.masks.split(filling.written)
        mask_of_row[:] = -1
        asking = []
        for place, index, constraint in zip(filling.places, filling.indices, filling.constraints, strict=True):
            if constraint.is_over or index < constraint.num_tokens:
                continue
            mask_of_row[place] = constraint.row
            if constraint.is_asking:
                asking.append(constraint)
        asking.sort(key=lambda constraint: id(constraint.library))  # matchers of one library stand together
        begin = 0
        for library, group in itertools.groupby(asking, key=lambda constraint: constraint.library):
            alike = list(group)
            self._fill_alike(library, alike, masks[begin : begin + len(alike)])
            begin += len(alike)
        rows[:begin] = [constraint.row for constraint in asking]
        filling.masks.num_changed = begin

    def _fill_alike(self, library: GrammarLibrary, constraints: list[Constraint], masks: np.ndarray) -> None:
        going = [i for i, constraint in enumerate(constraints) if constraint.is_going]
        if len(going) == len(constraints):
            library.fill([constraint.matcher for constraint in constraints], masks)
        elif going:
            part = np.empty((len(going), masks.shape[1]), dtype=np.int32)
            library.fill([constraints[i].matcher for i in going], part)
            masks[going] = part
        for mask, constraint in zip(masks, constraints, strict=True):
            constraint.settle(mask)

    def _bits(self, ids: list[int]) -> np.ndarray:
        bits = np.zeros(self._num_words * 32, dtype=np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
