"""Tokens to text, a few at a time, in the context of a prompt. Refuses: stop strings (``detokenizer.py``)."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from headrace.service.tokenization.token_bytes import TokenBytes

MAX_CHAR_BYTES = 4
REPLACEMENT_BYTES = "\ufffd".encode()
CONTINUES = range(0x80, 0xC0).__contains__
"""Whether a byte is a UTF-8 continuation byte."""
LOOK_BACK = 16
"""Prompt tokens searched for an incomplete last character of up to `MAX_CHAR_BYTES`; empty tokens are rare."""


class TextDecoder:
    """Incremental decoder of one sequence of token ids. State: the bytes of an incomplete last character, whether the
    next token is the first of the text (decoders treat it differently), and leading spaces still to strip."""

    def __init__(
        self, table: TokenBytes, *, skip_special_tokens: bool = True, keep_special_tokens: Sequence[str] = (),
        spaces_between_special_tokens: bool = True,
    ):
        self._table = table
        hidden, plain = (
            table.showing(tuple(keep_special_tokens)) if keep_special_tokens else (table.special_ids, table.plain)
        )
        self._hidden = hidden if skip_special_tokens else frozenset()
        self._joins_specials = not skip_special_tokens and not spaces_between_special_tokens
        self._pieces = plain if skip_special_tokens else table.later
        self._errors = table.errors
        self._partial = b""  # incomplete last character, at most 3 bytes
        # Whether `_partial` comes from the prompt: it belongs to the output only if that continues the character.
        self._is_prompts = False
        self._is_first = True
        self._after_special = False
        self._strip_left = table.strip_start

    def push(self, ids: Sequence[int]) -> str:
        """Text of the next tokens, without the bytes of a last character that is still incomplete."""
        if self._is_first or self._joins_specials:
            raw = self._join_slowly(ids)
        elif len(ids) == 1:
            raw = self._pieces[ids[0]]
        else:
            raw = b"".join(map(self._pieces.__getitem__, ids))
        if self._is_prompts and raw:
            self._is_prompts = False
            if not CONTINUES(raw[0]):  # the prompt's broken character is not output: no U+FFFD for it
                self._partial = b""
        data = self._partial + raw if self._partial else raw
        text, num_used = utf_8_decode(data, self._errors, False)
        self._partial = data[num_used:]
        return self._strip(text) if self._strip_left else text

    def locate(self, token_id: int) -> tuple[int, int]:
        """Push a token. Returns ``(where, num_chars)``: characters from the end of the text so far to where the token's
        own text begins (0 also where it continues an incomplete character), and how many have become certain with
        it."""
        partial, is_prompts = self._partial, self._is_prompts
        text = self.push((token_id,))
        raw = self._pieces[token_id] if token_id not in self._hidden else b""
        begun = utf_8_decode(partial + raw[:1], self._errors, False)[0] if partial and raw else ""
        if is_prompts or not begun.startswith("\ufffd") or partial + raw[:1] == REPLACEMENT_BYTES:
            return 0, len(text)
        # what is left of the broken character comes before the token's own text
        return len(utf_8_decode(partial, self._errors, True)[0]), len(text)

    def finish(self) -> str:
        """End of the output: U+FFFD for an incomplete character, unless all its bytes come from the prompt."""
        if self._is_prompts:
            self._partial = b""
        text, _ = utf_8_decode(self._partial, self._errors, True)
        self._partial = b""
        return self._strip(text)

    def skip_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Set the state to that after decoding the prompt. Cost does not grow with its length: only its first visible
        tokens (leading spaces to strip) and its last ones (an incomplete character) are looked at."""
        start, tail = b"", b""
        for token_id in prompt_ids:
            if token_id not in self._hidden:
                start += self._table.first[token_id] if self._is_first else self._table.later[token_id]
                self._is_first = False
                if len(start) >= self._strip_left:
                    break
        if self._is_first:
            return
        num_spaces = len(start) - len(start.lstrip(b" "))
        self._strip_left = max(0, self._strip_left - num_spaces) if num_spaces == len(start) else 0
        last = prompt_ids[-LOOK_BACK:]
        for token_id in reversed(last):
            tail = self._pieces[token_id] + tail
            if len(tail) >= MAX_CHAR_BYTES:
                break
        _, num_used = utf_8_decode(tail, self._errors, False)
        self._partial = tail[num_used:]
        self._is_prompts = bool(self._partial)
        self._after_special = last[-1] in self._table.special_ids

    def _join_slowly(self, ids: Sequence[int]) -> bytes:
        """Bytes of the tokens, one at a time: for the first token of a text and for spaces between special tokens."""
        pieces = []
        for token_id in ids:
            if token_id in self._hidden:
                continue
            piece = self._table.first[token_id] if self._is_first else self._table.later[token_id]
            is_special = token_id in self._table.special_ids
            if self._joins_specials and is_special and self._after_special:
                piece = piece.removeprefix(b" ")
            pieces.append(piece)
            self._is_first, self._after_special = False, is_special
        return b"".join(pieces)

    def _strip(self, text: str) -> str:
        """Drop the leading spaces that are still due; they may arrive over several calls."""
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text
