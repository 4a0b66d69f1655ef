"""`ContextIndex`: where in a growing text the last few tokens occurred before, and how far back the two agree.

Hash chains as in LZ77: per length of context an array of the latest position by hash, and an array that leads from each
position to the one before it with the same hash. A token costs a few array writes, memory is a few integers a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

LENGTHS = (8, 3, 1)
"""Lengths of indexed contexts. Occurrences are found by the longest that occurred; how long they really are is then
found by comparing."""
MOST_FOUND = 12
"""Occurrences that are looked at, latest first."""
MOST_STEPS = 48
"""Steps along a chain, in which other contexts of the same hash may lie."""
LEAST_SLOTS = 512
REHASH = 4
"""Tokens per slot of the hash tables at which they are made anew."""


class ContextIndex:
    """Positions count from the first token ever appended, also after `drop` took tokens away from the front."""

    def __init__(self, num_expected: int = 0):
        """``num_expected``: tokens that are about to be appended, which decides on the size of the hash tables."""
        self.tokens = array("i")
        self.base = 0  # position of tokens[0]
        self._make_tables(num_expected)

    def _make_tables(self, num_expected: int) -> None:
        size = LEAST_SLOTS
        while size < num_expected:
            size *= 2
        self._mask = size - 1
        self._latest = [array("q", [-1]) * size for _ in LENGTHS]
        self._before = [array("q", [-1]) for _ in LENGTHS]  # by position behind a context, from base on
        self.indexed = self.base  # contexts that end at or before this position are found

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.base + len(self.tokens)

    def drop(self, position: int) -> None:
        """Forget all tokens before a position; they must have been indexed."""
        assert position <= self.indexed
        cut = position - self.base
        del self.tokens[:cut]
        for before in self._before:
            del before[:cut]
        self.base = position

    def index(self, most: int) -> int:
        """Index at most so many tokens; returns how many."""
        if len(self.tokens) > REHASH * (self._mask + 1):
            self._make_tables(len(self.tokens))
        tokens, mask, begin = self.tokens, self._mask, self.indexed - self.base
        end = min(len(tokens), begin + most)
        if end - begin == 1:  # as after each step: half the work of what follows
            for n, latest, before in zip(LENGTHS, self._latest, self._before, strict=True):
                if n > end:
                    before.append(-1)
                    continue
                slot = hash(tuple(tokens[end - n : end])) & mask
                before.append(latest[slot])
                latest[slot] = self.base + end
            self.indexed += 1
            return 1
        for n, latest, before in zip(LENGTHS, self._latest, self._before, strict=True):
            first = max(begin + 1, n)  # contexts end behind token first - 1
            before.extend([-1] * (min(first, end + 1) - len(before)))
            window = tokens[first - n : end]
            position = self.base + first
            for context in zip(*(islice(window, i, None) for i in range(n)), strict=False):
                slot = hash(context) & mask
                before.append(latest[slot])
                latest[slot] = position
                position += 1
        self.indexed = self.base + end
        return end - begin

    def find(self, context: Sequence[int], depth: int) -> list[tuple[int, int]]:
        """Earlier occurrences of the end of ``context``, as pairs of how many tokens agree (at most ``depth``) and the
        position that follows, which has a token. The latest first, at most `MOST_FOUND`."""
        tokens, base, end = self.tokens, self.base, self.end
        whole = array("i", context[-depth:])
        for n, latest, before in zip(LENGTHS, self._latest, self._before, strict=True):
            if n > len(whole):
                continue
            tail = whole[-n:]
            position, found = latest[hash(tuple(tail)) & self._mask], []
            for _ in range(MOST_STEPS):
                at = position - base
                if at < n:
                    break
                if position < end and tokens[at - n : at] == tail:
                    found.append((_agree(tokens, at, whole, n), position))
                    if len(found) == MOST_FOUND:
                        break
                position = before[at]
            if found:
                return found
        return []


def _agree(tokens: array[int], at: int, context: array[int], known: int) -> int:
    """How many tokens before ``at`` are equal to the end of the context; at least ``known``."""
    most = min(at, len(context))
    if tokens[at - most : at] == context[len(context) - most :]:
        return most
    offset = len(context) - at
    while tokens[at - known - 1] == context[at - known - 1 + offset]:
        known += 1
    return known
