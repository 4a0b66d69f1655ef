"""`GrammarRows`: how far the rows with a grammar have come, and the masks of their next tokens.

A mask needs the token before it. Where that is on the host already the masks are filled on a thread while the device
computes; where it is still on the device (two plans in flight) they are filled once the step has been launched, as soon
as the step before it is read. Either way no step waits for a mask but the draw at its end. G rows, V vocabulary.

Where a grammar leaves no choice for a few tokens, the step that drew the one before them tells them, too. Matchers go on
by them at once; what a later step in flight draws in their place is recognised by its position and ignored.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.execution.rows import RowTokens
from headrace.execution.sampling import RowMasks, SampleBatch
from headrace.execution.structured.library import GrammarLibrary, Matcher
from headrace.execution.structured.plain import PlainTokens
from headrace.execution.structured.store import GrammarStore
from headrace.execution.upload import host_words

ALL_ALLOWED = -1
"""A word of a mask."""

MIN_JUMP = 2
"""Tokens that a forced run must have: a step with a run in it costs more than one of decodes alone."""

MIN_JUMP_OVER_GRAPHS = 8
"""The same where decodes alone are a captured graph, which is faster by more."""

JUMP_COST = 0.5
"""What a run in it adds to a step, in steps; all rows of the step pay, and one gains the run's tokens but one."""


class DrawnStep(Protocol):
    """A launched step, as `headrace.execution.result.PendingSample` is one. ``forced``: see `StepResult`."""

    forced: list[tuple[int, list[int]]]

    @property
    def is_done(self) -> bool:
        """Whether `read_ids` would not wait."""

    def read_ids(self) -> list[int]:
        """The drawn ids in the order of the batch; waits for the step."""


@dataclass(eq=False, slots=True)
class Constraint:
    """The grammar of one row. ``num_tokens``: of its output, known so far. ``held`` [W] int32 are the bits of tokens that are
    not wanted for the first ``min_tokens``, unless nothing else is allowed. ``can_jump``: whether drawing a token has no
    effect but the token. ``steady`` [W] is the next mask where it is that of the token before: plain text is being written,
    of which the matcher is not told."""

    row: int
    matcher: Matcher
    library: GrammarLibrary
    plain: PlainTokens | None
    num_tokens: int = 0
    steady: np.ndarray | None = None
    can_jump: bool = False
    min_tokens: int = 0
    held: np.ndarray | None = None
    is_over: bool = False
    last_token: int = -1

    @property
    def is_asking(self) -> bool:
        """Whether its mask is for the library to tell."""
        return self.steady is None and not self.is_over and self.matcher.error is None

    def accept(self, token: int) -> None:
        """Go on by a token that does not end the output."""
        if self.steady is not None and self.plain is not None and self.plain.is_plain[token]:
            return
        self.steady = None
        self.matcher.accept([token])

    def keep(self, mask: np.ndarray) -> None:
        """The library told this mask [W]."""
        plain = self.plain
        if plain is not None and (not plain.needs_root or (self.last_token >= 0 and plain.is_plain[self.last_token])) and plain.are_allowed(mask):
            self.steady = mask.copy()


@dataclass(slots=True)
class Filling:
    """Masks on their way: ``constraints[i]`` is at place ``places[i]`` of the batch and draws token ``indices[i]`` of its
    output. ``words``: see `RowMasks`; ``masks`` [G, W] are those in it."""

    rows: GrammarRows
    constraints: list[Constraint]
    places: np.ndarray
    indices: list[int]
    words: torch.Tensor
    masks: np.ndarray
    work: Future[None] | None = None

    def result(self) -> RowMasks:
        """The masks; waits for the thread, or for the step before and then fills them here."""
        if self.work is None:
            self.rows.catch_up()
            self.rows.fill(self)
        else:
            self.work.result()
        errors = {c.row: c.matcher.error for c in self.constraints if c.matcher.error and not c.is_over}
        return RowMasks(self.words, len(self.masks), errors)

    def follow(self, step: DrawnStep) -> None:
        """The step that uses these masks was launched."""
        self.rows.await_step(step, list(zip(map(int, self.places), self.indices, self.constraints, strict=True)))


@dataclass(slots=True)
class _Unread:
    """A launched step whose tokens the matchers have not seen."""

    step: DrawnStep
    drawn: list[tuple[int, int, Constraint]] = field(default_factory=list)


class GrammarRows:
    """Driven by the runner: `start` and `release` with the rows, `begin` as a step is launched, `Filling.follow` after, and
    `catch_up` before its result is read. ``min_jump``: forced runs of fewer tokens are drawn one by one, and longer ones,
    too, among so many rows that these would lose more than the one gains."""

    def __init__(self, store: GrammarStore, vocab_size: int, device: torch.device, *, min_jump: int = MIN_JUMP):
        self._store, self._num_words, self._device, self.min_jump = store, -(-vocab_size // 32), device, min_jump
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
        constraint = Constraint(row, compiled.start(), compiled.library, compiled.plain, can_jump=can_jump)
        rules = sampling.rules
        if rules is not None and rules.min_tokens:
            constraint.min_tokens, constraint.held = rules.min_tokens, self._bits(rules.held_ids)
        self._constraints[row] = constraint
        for token in known.token_ids[known.prompt_len :]:
            self._accept(constraint, int(token))

    def release(self, row: int) -> None:
        """A row was given back."""
        if self._constraints.pop(row, None) is not None and not self._constraints:
            self._unread.clear()

    def begin(self, batch: SampleBatch) -> Filling | None:
        """Start on the masks of a batch; None when no row of it has a grammar."""
        self._batch_size = len(batch.rows)
        if not len(batch.constrained):
            return None
        rows = batch.rows[batch.constrained]
        # Matchers of one library stand together, so that it fills them in one call.
        constraints = [self._constraints[int(row)] for row in rows]
        order = sorted(range(len(rows)), key=lambda i: id(constraints[i].library))
        places = batch.constrained[order]
        indices = list(map(int, batch.output_lens[places]))
        split = len(rows) * self._num_words
        words, written = host_words(split + len(batch.rows), self._device)
        masks, mask_of_row = written[:split].reshape(len(rows), -1), written[split:]
        mask_of_row[:] = -1
        mask_of_row[places] = np.arange(len(places))
        filling = Filling(self, [constraints[i] for i in order], places, indices, words, masks)
        if all(unread.step.is_done for unread in self._unread):
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
            for place, index, constraint in entry.drawn:
                if index == constraint.num_tokens:  # else it was known before it was drawn
                    self._accept(constraint, ids[place])
                    entry.step.forced += self._jump(constraint)
            if entry.step is last:
                return

    def _jump(self, constraint: Constraint) -> list[tuple[int, list[int]]]:
        """Go on by the tokens that the grammar forces now, if they are many; ``[(row, tokens)]`` or nothing."""
        jumps = self._store.jumps
        if jumps is None or not constraint.can_jump or not constraint.is_asking:
            return []
        text = constraint.matcher.read_forced()
        least = max(self.min_jump, 1 + math.ceil(JUMP_COST * self._batch_size))
        run = jumps.find(text, constraint.last_token) if len(text) >= least else []
        if len(run) < least:
            return []
        for count, token in enumerate(run, 1):
            self._accept(constraint, token)
            if constraint.matcher.error is not None:  # its limit on work; the next draw tells
                return [(constraint.row, run[:count])]
        return [(constraint.row, run)]

    def fill(self, filling: Filling) -> None:
        """Write the masks [G, W]. A row that cannot go on is allowed nothing; one that is over, or further on by a forced
        run, and computed before that was known, everything."""
        constraints, masks = filling.constraints, filling.masks
        begin = 0
        while begin < len(constraints):
            library, end = constraints[begin].library, begin
            while end < len(constraints) and constraints[end].library is library:
                end += 1
            self._fill_alike(library, constraints[begin:end], masks[begin:end])
            begin = end
        for mask, index, constraint in zip(masks, filling.indices, constraints, strict=True):
            if index < constraint.num_tokens:
                mask[:] = ALL_ALLOWED

    def _fill_alike(self, library: GrammarLibrary, constraints: list[Constraint], masks: np.ndarray) -> None:
        asking = [i for i, c in enumerate(constraints) if c.is_asking]
        if len(asking) == len(constraints):
            library.fill([c.matcher for c in constraints], masks)
        elif asking:
            part = np.empty((len(asking), masks.shape[1]), dtype=np.int32)
            library.fill([constraints[i].matcher for i in asking], part)
            masks[asking] = part
        for i in asking:
            constraints[i].keep(masks[i])
        for mask, constraint in zip(masks, constraints, strict=True):
            if constraint.steady is not None:
                mask[:] = constraint.steady
            if constraint.is_over:
                mask[:] = ALL_ALLOWED
            elif constraint.matcher.error is not None:
                mask[:] = 0
            elif constraint.held is not None and constraint.num_tokens < constraint.min_tokens:
                rest = mask & ~constraint.held
                if rest.any():
                    mask[:] = rest

    def _accept(self, constraint: Constraint, token: int) -> None:
        constraint.num_tokens += 1
        constraint.last_token = token
        if constraint.is_over or constraint.matcher.error is not None:
            return
        if token in self._store.eos_ids:
            constraint.is_over = True
        else:
            constraint.accept(token)

    def _bits(self, ids: list[int]) -> np.ndarray:
        bits = np.zeros(self._num_words * 32, dtype=np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
