"""`GrammarRows`: how far the rows with a grammar have come, and the masks of their next tokens.

A mask needs the token before it. Where that is still on the device (two plans in flight) a step is launched up to its
draw; the masks are filled as soon as the step before is read, while the device computes, and the draw follows before
anything else is launched. G rows, V vocabulary.

Where a grammar leaves no choice for a few tokens, the step that drew the one before them tells them, too. Matchers go
on by them at once; what a later step in flight draws in their place is recognised by its position and ignored.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.execution.rows import RowTokens
from headrace.execution.step import SampleBatch
from headrace.execution.structured.constraint import Constraint, HeldTokens
from headrace.execution.structured.mask_table import KeptMask, MaskTable, RowMasks
from headrace.execution.structured.store import GrammarStore

MIN_JUMP = 2
"""Tokens that a forced run must have."""

JUMP_COST = 0.8
"""What runs in it add to a step, in steps, as measured over captured graphs: all rows of the step pay, and each that
has a run gains its tokens but one."""


class DrawnStep(Protocol):
    """A launched step, as `headrace.execution.result.PendingSample` is one. ``forced``: see `StepResult`."""

    forced: list[tuple[int, list[int]]]

    @property
    def is_done(self) -> bool:
        """Whether `read_ids` would not wait."""

    def read_ids(self) -> list[int]:
        """The drawn ids in the order of the batch; waits for the step."""


@dataclass(slots=True)
class Asking:
    """A row whose mask is computed: at ``place`` of the batch, into a mask that is ``kept`` for others under ``key``,
    if any."""

    place: int
    constraint: Constraint
    key: Hashable | None = None
    kept: KeptMask | None = None


@dataclass(slots=True)
class Filling:
    """The masks of a step: ``constraints[i]`` is at place ``places[i]`` of the batch and draws token ``indices[i]`` of
    its output. Begun once all tokens before are known: then ``masks`` are on their way."""

    rows: GrammarRows
    num_rows: int
    constraints: list[Constraint]
    places: list[int]
    indices: list[int]
    step: DrawnStep | None = None
    masks: RowMasks | None = None
    asking: list[Asking] = field(default_factory=list)
    sharing: list[Asking] = field(default_factory=list)
    work: Future[None] | None = None

    def result(self) -> RowMasks:
        """The masks; waits for the step before, and for a thread."""
        if self.masks is None:
            self.rows.catch_up(before=self.step)
        if self.work is not None:
            self.work.result()
        return self.rows.settle(self)

    def follow(self, step: DrawnStep) -> None:
        """The step that uses these masks was launched, but for its draw."""
        self.step = step
        self.rows.await_step(step, list(zip(self.places, self.indices, self.constraints, strict=True)))


@dataclass(slots=True)
class _Unread:
    """A launched step whose tokens the matchers have not seen."""

    step: DrawnStep
    drawn: list[tuple[int, int, Constraint]] = field(default_factory=list)


class GrammarRows:
    """Driven by the runner: `start` and `release` with the rows, `begin` as a step is launched, `Filling.follow` once
    all of it but its draw is, and `catch_up` before its result is read. ``min_jump``: forced runs of fewer tokens are
    drawn one by one, and longer ones, too, where the rows of a step would lose more by them than those that have runs
    gain."""

    def __init__(
        self, store: GrammarStore, vocab_size: int, max_rows: int, device: torch.device, *, min_jump: int = MIN_JUMP
    ):
        self._store, self._num_words, self._max_rows, self._device, self.min_jump = (
            store, -(-vocab_size // 32), max_rows, device, min_jump
        )
        self._table: MaskTable | None = None
        self._constraints: dict[int, Constraint] = {}
        self._unread: deque[_Unread] = deque()
        self._waiting: Filling | None = None  # for the tokens of the steps before it
        self._batch_size = 1  # of the latest step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, row: int, known: RowTokens) -> None:
        """A row with a grammar was taken; what it has output already (before a retraction) is gone through again."""
        assert known.sampling.grammar is not None
        compiled = self._store.find(known.sampling.grammar)
        sampling, rules = known.sampling, known.sampling.rules
        can_jump = rules is None and sampling.penalties is None and sampling.num_logprobs < 0
        if self._table is None:
            self._table = MaskTable(self._max_rows, self._num_words, self._device)
        held = HeldTokens(rules.min_tokens, tuple(rules.held_ids)) if rules is not None and rules.min_tokens else None
        constraint = self._constraints[row] = Constraint(row, compiled, can_jump, held)
        for token in map(int, known.token_ids[known.prompt_len :]):
            constraint.accept(token, is_end=token in self._store.eos_ids)

    def release(self, row: int) -> None:
        """A row was given back."""
        if self._constraints.pop(row, None) is not None and not self._constraints:
            self._unread.clear()

    def begin(self, batch: SampleBatch, *, is_launched: bool = False) -> Filling | None:
        """Start on the masks of a batch, now or when the tokens before are read; None when no row of it has a grammar.
        ``is_launched``: the device is at work already. If not, another thread makes them while this one launches the
        step; a thread that only waits for the interpreter would cost more than the libraries' own threads leave to be
        done."""
        self._batch_size = len(batch.rows)
        if not len(batch.constrained):
            return None
        constraints = [self._constraints[row] for row in map(int, batch.rows[batch.constrained])]
        places, indices = list(map(int, batch.constrained)), list(map(int, batch.output_lens[batch.constrained]))
        filling = Filling(self, self._batch_size, constraints, places, indices)
        self._waiting = filling
        if all(entry.step.is_done for entry in self._unread):
            self.catch_up(is_launched=is_launched)
        return filling

    def await_step(self, step: DrawnStep, drawn: list[tuple[int, int, Constraint]]) -> None:
        """A step was launched whose tokens ``(place in its batch, index in the output, constraint)`` go on with
        these."""
        self._unread.append(_Unread(step, drawn))

    def reset(self) -> None:
        """Forget all rows, and all masks: some may never have been written."""
        self._constraints.clear()
        self._unread.clear()
        self._waiting = self._table = None

    def catch_up(
        self, last: DrawnStep | None = None, *, before: DrawnStep | None = None, is_launched: bool = True
    ) -> None:
        """Let the matchers see the tokens of all launched steps, up to ``last`` or ``before`` one of them; waits for
        those. Then begin on the masks that waited for them."""
        if last is not None and not any(entry.step is last for entry in self._unread):
            return
        while self._unread and self._unread[0].step is not before:
            entry = self._unread.popleft()
            self._go_on(entry)
            if entry.step is last:
                break
        waiting = self._waiting
        if waiting is not None and (not self._unread or self._unread[0].step is waiting.step):
            self._waiting = None
            self._fill(waiting, is_launched=is_launched)

    def _go_on(self, entry: _Unread) -> None:
        ids, eos_ids, going = entry.step.read_ids(), self._store.eos_ids, []
        for place, index, constraint in entry.drawn:
            if index == constraint.num_tokens:  # else it was known before it was drawn
                token = ids[place]
                constraint.accept(token, is_end=token in eos_ids)
                if constraint.can_jump and not constraint.is_steady and constraint.is_going:
                    going.append(constraint)
        if going:
            entry.step.forced += self._jump(going)

    def _jump(self, constraints: list[Constraint]) -> list[tuple[int, list[int]]]:
        """Go on by the tokens that grammars force now, if they are many; ``[(row, tokens)]`` or nothing."""
        runs = [
            (constraint, run) for constraint in constraints if len(run := self._find_run(constraint)) >= self.min_jump
        ]
        if sum(len(run) - 1 for _, run in runs) < JUMP_COST * self._batch_size:
            return []
        return [(constraint.row, self._follow_run(constraint, run)) for constraint, run in runs]

    def _find_run(self, constraint: Constraint) -> list[int]:
        jumps = self._store.jumps
        if jumps is None:
            return []
        text = constraint.read_forced()
        return jumps.find(text, constraint.last_token) if len(text) >= self.min_jump else []

    def _follow_run(self, constraint: Constraint, run: list[int]) -> list[int]:
        """The run, or its beginning if the matcher gives up in it: at its limit on work; the next draw tells."""
        for count, token in enumerate(run, 1):
            constraint.accept(token, is_end=False)
            if constraint.error is not None:
                return run[:count]
        return run

    def _fill(self, filling: Filling, *, is_launched: bool) -> None:
        """Begin on the masks that nobody knows. A row that is over, or further on by a forced run, and computed before
        that was known, is allowed everything."""
        table, asking, begun = self._table, filling.asking, set[Hashable]()
        assert table is not None, "a row with a grammar was started"
        mask_of_row = np.full(filling.num_rows, -1, dtype=np.int32)
        for place, index, constraint in zip(filling.places, filling.indices, filling.constraints, strict=True):
            if constraint.is_over or index < constraint.num_tokens:
                continue
            key = constraint.mask_key
            if key is None:
                mask_of_row[place] = constraint.row
                if not constraint.is_steady:
                    asking.append(Asking(place, constraint))
                continue
            kept = table.find(key)
            if kept is None:
                kept = table.add(key)
                asking.append(Asking(place, constraint, key, kept))
                begun.add(key)
            elif key in begun:
                filling.sharing.append(Asking(place, constraint, key, kept))
            elif not constraint.is_steady:
                constraint.notice(allows_plain=kept.allows_plain)
            mask_of_row[place] = kept.place
        asking.sort(key=lambda ask: id(ask.constraint.grammar.library))  # matchers of one library stand together
        filling.masks = RowMasks.allocate(table, mask_of_row, len(asking) + len(filling.sharing))
        if is_launched or not asking:
            _ask(asking, filling.masks.changed)
        else:
            filling.work = self._thread.submit(_ask, asking, filling.masks.changed)

    def settle(self, filling: Filling) -> RowMasks:
        """Finish the masks of a step, once all that were asked for are there. A row that cannot go on is allowed
        nothing, and shares that with nobody."""
        masks, table, failed = filling.masks, self._table, set[Hashable]()
        assert masks is not None and table is not None
        asking, sharing = filling.asking, filling.sharing
        filling.asking, filling.sharing = [], []
        for count, ask in enumerate(asking):
            self._settle_one(ask, masks, count)
            if ask.constraint.error is not None and ask.key is not None:
                table.drop(ask.key)
                failed.add(ask.key)
        for ask in sharing:
            if ask.key in failed:
                count = masks.num_changed
                alone = Asking(ask.place, ask.constraint)
                _ask([alone], masks.changed[count:])
                self._settle_one(alone, masks, count)
            elif ask.kept is not None:
                ask.constraint.notice(allows_plain=ask.kept.allows_plain)
        return masks

    def _settle_one(self, ask: Asking, masks: RowMasks, count: int) -> None:
        constraint, kept = ask.constraint, ask.kept
        allows_plain = constraint.settle(masks.changed[count])
        if constraint.error is not None:
            masks.errors[constraint.row] = constraint.error
            kept = None
        if kept is not None:
            kept.allows_plain = allows_plain
        masks.change(count, ask.place, constraint.row if kept is None else kept.place)
        constraint.notice(allows_plain=allows_plain)


def _ask(asking: list[Asking], masks: np.ndarray) -> None:
    """Let the libraries write mask i for row i of those that can go on."""
    matchers = [ask.constraint.matcher for ask in asking]
    for library, group in itertools.groupby(range(len(asking)), key=lambda i: asking[i].constraint.grammar.library):
        alike = list(group)
        going = [i for i in alike if asking[i].constraint.error is None]
        if len(going) == len(alike):
            library.fill([matchers[i] for i in alike], masks[alike[0] : alike[-1] + 1])
        elif going:
            part = np.empty((len(going), masks.shape[1]), dtype=np.int32)
            library.fill([matchers[i] for i in going], part)
            masks[going] = part
