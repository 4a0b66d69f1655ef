"""`NgramDrafter`: proposes what followed the latest earlier occurrence of the last few tokens (prompt lookup,
https://github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from headrace.scheduling.speculation.drafter import NOTHING, DrafterOptions, Proposal

SLICE = 8192
"""Entries that one `propose` adds to an index at most, some 2 ms of work; a long prompt takes several."""


class _Text:
    """A request's tokens. ``latest[i]`` maps the n-grams of the i-th length to the position behind their latest
    occurrence, of those that end before position ``indexed``."""

    __slots__ = ("indexed", "latest", "tokens")

    def __init__(self, tokens: list[int], num_lengths: int):
        self.tokens = tokens
        self.indexed = 1  # an n-gram that ends at 0 is empty
        self.latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(num_lengths)]


class NgramDrafter:
    """The longest match wins, of lengths ``prompt_lookup_min`` to ``prompt_lookup_max``; of equally long ones the
    latest. A token costs one dictionary entry per length. What follows a match is copied, over the end of the text if
    it gets there: a text that repeats itself goes on to do so."""

    def __init__(self, options: DrafterOptions):
        self._lengths = tuple(range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1))
        self._slice = max(1, SLICE // len(self._lengths))
        self._texts: dict[int, _Text] = {}

    def start(self, key: int, token_ids: Sequence[int], *, is_private: bool = False) -> None:
        self._texts[key] = _Text(list(token_ids), len(self._lengths))

    def append(self, key: int, token_ids: Sequence[int]) -> None:
        self._texts[key].tokens.extend(token_ids)

    def stop(self, key: int) -> None:
        del self._texts[key]

    def propose(self, key: int, most: int, continuation: Sequence[int] = ()) -> Proposal:
        text = self._texts[key]
        # Those that end at the last token are left out: they are what is looked up.
        if text.indexed < len(text.tokens):
            self._index(text)
        tokens = [*text.tokens, *continuation] if continuation else text.tokens
        for n, latest in zip(self._lengths, text.latest, strict=True):
            begin = latest.get(tuple(tokens[-n:]))
            if begin is not None:
                found = tokens[begin : begin + most]
                if len(found) < most:
                    period = tokens[begin:]
                    found = (period * -(-most // len(period)))[:most]
                return Proposal(found, [n / (n + 1.0)] * len(found))
        return NOTHING

    def _index(self, text: _Text) -> None:
        begin, end = text.indexed, min(len(text.tokens), text.indexed + self._slice)
        for n, latest in zip(self._lengths, text.latest, strict=True):
            first = max(begin, n)
            if first < end:  # n-grams that end at first, ..., end - 1; a later one replaces an earlier one
                window = text.tokens[first - n : end - 1]
                grams = zip(*(islice(window, i, None) for i in range(n)), strict=False)
                latest.update(zip(grams, range(first, end), strict=True))
        text.indexed = end
