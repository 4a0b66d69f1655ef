"""`Constraint`: the grammar of one row and how far its output has come. Refuses: threads, batches, devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.execution.structured.library import GrammarLibrary, Matcher
from headrace.execution.structured.plain import PlainTokens


@dataclass(eq=False, slots=True)
class Constraint:
    """``num_tokens``: of the row's output, known so far. ``held`` [W] int32 are the bits of tokens that are not wanted for the
    first ``min_tokens``, unless nothing else is allowed. ``can_jump``: whether drawing a token has no effect but the token.
    ``is_steady``: the next mask is the last one; plain text is being written, of which the matcher is not told."""

    row: int
    matcher: Matcher
    library: GrammarLibrary
    plain: PlainTokens | None
    num_tokens: int = 0
    is_steady: bool = False
    can_jump: bool = False
    min_tokens: int = 0
    held: np.ndarray | None = None
    is_over: bool = False
    last_token: int = -1

    @property
    def is_asking(self) -> bool:
        """Whether its next mask is not known."""
        return not (self.is_steady or self.is_over)

    @property
    def is_going(self) -> bool:
        """Whether the grammar has more to say."""
        return not self.is_over and self.matcher.error is None

    def accept(self, token: int, *, is_end: bool) -> None:
        """Go on by a token, which may be the end of the output."""
        self.last_token = token
        self.num_tokens += 1
        if self.num_tokens == self.min_tokens:  # what was held back is allowed from now on
            self.is_steady = False
        if not self.is_going or (self.is_steady and self._is_plain(token)):
            return
        if is_end:
            self.is_over = True
            return
        self.matcher.accept([token])
        self.is_steady = False

    def settle(self, mask: np.ndarray) -> None:
        """Take the mask [W] that the library told, and make of it, in place, what is allowed."""
        if self.matcher.error is not None:
            mask[:] = 0
            return
        if self.plain is not None and (not self.plain.needs_root or self._is_plain(self.last_token)):
            self.is_steady = self.plain.are_allowed(mask)
        if self.held is not None and self.num_tokens < self.min_tokens:
            rest = mask & ~self.held
            if rest.any():
                mask[:] = rest

    def _is_plain(self, token: int) -> bool:
        return self.plain is not None and token >= 0 and bool(self.plain.is_plain[token])
