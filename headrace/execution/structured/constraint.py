"""`Constraint`: the grammar of one row and how far its output has come. Refuses: threads, batches, devices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from headrace.execution.structured.library import CompiledGrammar, Matcher
from headrace.execution.structured.states import State


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens ``ids`` that are not wanted for the first ``count`` of an output unless nothing else is allowed."""

    count: int
    ids: tuple[int, ...]

    def hold(self, mask: np.ndarray) -> None:
        """Take them from a mask [W] int32, in place."""
        words, before = mask.view(np.uint32), {}
        for token in self.ids:
            place = token // 32
            before.setdefault(place, int(words[place]))
            words[place] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        if not words.any():
            for place, word in before.items():
                words[place] = word


@dataclass(eq=False, slots=True)
class Constraint:
    """``num_tokens``: of the row's output, known so far. ``can_jump``: whether drawing a token has no effect but the
    token. ``is_steady``: the next mask is the last one; plain text is being written, of which nobody is told.
    ``state``: where the output stands, while that is known; the matcher is told of tokens only when it is asked, then.
    ``mask_key``: equal for outputs whose next masks are equal, None where that is not known."""

    row: int
    grammar: CompiledGrammar
    can_jump: bool = False
    held: HeldTokens | None = None
    num_tokens: int = 0
    is_steady: bool = False
    is_over: bool = False
    last_token: int = -1
    error: str | None = None
    state: State | None = None
    mask_key: Hashable | None = None
    _matcher: Matcher = None  # type: ignore[assignment]
    _untold: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._matcher = self.grammar.start()
        self._move(self.grammar.states.start if self.grammar.states is not None else None)

    @property
    def is_going(self) -> bool:
        """Whether the grammar has more to say."""
        return not self.is_over and self.error is None

    @property
    def matcher(self) -> Matcher:
        """Told of all tokens."""
        if self._untold:
            self._matcher.accept(self._untold)
            self._untold = []
            self._take_error()
        return self._matcher

    def accept(self, token: int, *, is_end: bool) -> None:
        """Go on by a token, which may be the end of the output."""
        self.last_token = token
        self.num_tokens += 1
        if self.held is not None and self.num_tokens == self.held.count:  # what was held back is allowed from now on
            self.is_steady = False
            self._move(self.state)
        if self.is_steady and self.grammar.plain is not None and self.grammar.plain.is_plain[token]:
            return
        if self.is_over or self.error is not None:
            return
        if is_end:
            self.is_over = True
            return
        self._untold.append(token)
        self.is_steady = False
        if self.state is not None:
            assert self.grammar.states is not None
            self._move(self.grammar.states.step(self.state, token))
        if self.state is None:
            _ = self.matcher

    def read_forced(self) -> bytes:
        """The text that must follow; nothing while plain text is written."""
        if self.state is None:
            return self.matcher.read_forced()
        if self.state.forced is None:
            self.state.forced = self.matcher.read_forced()
        return self.state.forced

    def settle(self, mask: np.ndarray) -> bool:
        """Take the mask [W] that the library told, and make of it, in place, what is allowed. Whether that is all plain
        text, and more."""
        self._take_error()
        if self.error is not None:
            mask[:] = 0
            return False
        allows_plain = self.grammar.plain is not None and self.grammar.plain.are_allowed(mask)
        if self.held is not None and self.num_tokens < self.held.count:
            self.held.hold(mask)
        return allows_plain

    def notice(self, *, allows_plain: bool) -> None:
        """Its next mask allows all plain text, or not."""
        plain = self.grammar.plain
        if allows_plain and plain is not None:
            self.is_steady = not plain.needs_root or (self.last_token >= 0 and bool(plain.is_plain[self.last_token]))

    def _move(self, state: State | None) -> None:
        self.state, self.mask_key = state, None
        if state is not None and self.grammar.states is not None:
            key = self.grammar.states.find_key(state)
            self.mask_key = key if self.held is None or self.num_tokens >= self.held.count else (key, self.held.ids)

    def _take_error(self) -> None:
        self.error = self._matcher.error
        if self.error is not None:
            self.mask_key = None
