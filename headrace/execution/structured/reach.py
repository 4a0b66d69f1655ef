"""`Reach`: how far one token may take an output: states that differ only in what is further away share their masks."""

from __future__ import annotations

import re
from functools import cached_property

_ITEM = re.compile(rb"(?<!,),(?!,)")
_ESCAPES = b'"\\/bfnrtu0123456789abcdefABCDEF'
_BEYOND_ASCII = bytes(range(128, 256))


class Reach:
    """Of the tokens of one vocabulary; found out when a grammar asks."""

    def __init__(self, tokens: list[bytes]):
        self._tokens = tokens

    @cached_property
    def items(self) -> int:
        """Items of an array that a token may go beyond, at most: commas between values have no comma beside them."""
        return max((len(_ITEM.findall(token)) for token in self._tokens if b"," in token), default=0) + 2

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._tokens), default=0)

    @cached_property
    def _by_length(self) -> list[bytes]:
        return sorted(self._tokens, key=len, reverse=True)

    def find_longest(self, alphabet: bytes, *, is_quoted: bool = False) -> int:
        """The bytes at most with which a token goes on in text of an alphabet and of anything beyond ASCII, whatever it
        goes on with behind them. ``is_quoted``: the text is a JSON string."""
        known = alphabet + _BEYOND_ASCII + (_ESCAPES if is_quoted else b"")
        within, longest = re.compile(b"[" + re.escape(known) + b"]*"), 0
        for token in self._by_length:
            if len(token) <= longest:
                break
            longest = max(longest, within.match(token).end())  # type: ignore[union-attr]
        return longest
