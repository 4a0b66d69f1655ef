"""Tokens to text, a few at a time, in the context of a prompt. Refuses: stop strings (``detokenizer.py``)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from headrace.service.tokenization.token_bytes import TokenBytes

MAX_CHAR_BYTES = 4


class TextDecoder:
    """Keeps the incomplete bytes of a character, and whether the next token is the first of its text."""

    def __init__(self, table: TokenBytes, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True):
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._joins_specials = not skip_special_tokens and not spaces_between_special_tokens
        self._is_first = True
        self._after_special = False
        self._strip_left = table.strip_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)

    def push(self, ids: Sequence[int]) -> str:
        """Text of the next tokens, without the bytes of a last character that is still incomplete."""
        text = self._decoder.decode(self._bytes(ids))
        return self._strip(text) if self._strip_left else text

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character."""
        return self._strip(self._decoder.decode(b"", True))

    def skip_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Start behind the prompt: only its last tokens are looked at, and its first ones where a decoder needs them."""
        visible = [i for i in prompt_ids if i not in self._skipped] if self._skipped else prompt_ids
        if not visible:
            return
        if self._strip_left:
            self._strip_prompt(visible)
        tail = b""
        for token_id in reversed(visible[-4 * MAX_CHAR_BYTES:]):
            tail = self._table.later(token_id) + tail
            if len(tail) >= MAX_CHAR_BYTES:
                break
        self._decoder.decode(tail)
        self._is_first = False
        self._after_special = visible[-1] in self._table.special_ids

    def _strip_prompt(self, visible: Sequence[int]) -> None:
        """Spend the strip on the prompt's own first characters, if it has any."""
        start = b""
        for place, token_id in enumerate(visible):
            start += self._table.later(token_id) if place else self._table.first(token_id)
            if len(start) >= self._strip_left:
                self._strip_left = 0
                return
        num_spaces = len(start) - len(start.lstrip(b" "))
        self._strip_left = self._strip_left - num_spaces if num_spaces == len(start) else 0

    def _bytes(self, ids: Sequence[int]) -> bytes:
        later = self._table.later
        if not self._is_first and not self._joins_specials:
            if self._skipped:
                skipped = self._skipped
                return b"".join([later(i) for i in ids if i not in skipped])
            return b"".join([later(i) for i in ids])
        parts = []
        for token_id in ids:
            if token_id not in self._skipped:
                parts.append(self._one(token_id))
        return b"".join(parts)

    def _one(self, token_id: int) -> bytes:
        piece = self._table.first(token_id) if self._is_first else self._table.later(token_id)
        is_special = token_id in self._table.special_ids
        if self._joins_specials and is_special and self._after_special:
            piece = piece.removeprefix(b" ")
        self._is_first, self._after_special = False, is_special
        return piece

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text
