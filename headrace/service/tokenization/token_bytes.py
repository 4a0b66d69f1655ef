"""The bytes that each token adds to the text: the decoder pipeline of a ``tokenizers`` tokenizer as a table, so that
text can be decoded one token at a time. Refuses: holding back text and stop strings (``detokenizer.py``).

Bytes, not text: byte-level and byte-fallback vocabularies split characters between tokens. A byte-fallback decoder
replaces each invalid byte by a U+FFFD of its own (as SentencePiece does); others replace an invalid sequence by one.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer as Backend


def _spelling() -> dict[int, str]:
    """GPT-2's ``bytes_to_unicode``: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        table.setdefault(byte, chr(256 + len(table) - len(printable)))
    return table


CHAR_OF_BYTE: dict[int, str] = _spelling()
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def bytes_of_spelling(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token with any other character (an added one) is plain UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def spelling_of_bytes(raw: bytes) -> str:
    """The spelling of bytes in a byte-level vocabulary."""
    return "".join([CHAR_OF_BYTE[byte] for byte in raw])


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_BYTE = "headrace-replace-each-byte"
MAX_SHOWN = 64
_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)

TextRule = Callable[[str, bool], str]
"""``(token, is_first) -> text``. ``is_first``: no token precedes it in the text; skipped ones do not count."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_each_byte)


class PieceTable(dict[int, bytes]):
    """Bytes by token id, computed on first use. A subclass of dict, so that a hit costs one dict look-up. Threads may
    compute the same entry at once, with the same result."""

    def __init__(self, compute: Callable[[int], bytes]):
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._compute(token_id)
        return found


class TokenBytes:
    """The bytes of each token of one tokenizer; empty for an unknown id.

    ``first``: for the first token of a text; ``later``: for a token after others; ``plain``: as ``later``, with special
    tokens empty. ``strip_start``: how many leading spaces of the whole text are dropped. ``errors``: the codec error
    handler for invalid bytes.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._size: int = backend.get_vocab_size(with_added_tokens=True)
        self._rule, self._is_byte_level, self._has_byte_tokens, self.strip_start = _read_decoder(backend)
        self.errors = _PER_BYTE if self._has_byte_tokens else "replace"
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.later = PieceTable(lambda token_id: self._compute(token_id, is_first=False))
        self.first = PieceTable(lambda token_id: self._compute(token_id, is_first=True))
        self.plain = self._hide(self.special_ids)
        self._shown: dict[tuple[str, ...], tuple[frozenset[int], PieceTable]] = {}

    def showing(self, texts: tuple[str, ...]) -> tuple[frozenset[int], PieceTable]:
        """``(hidden special ids, table with those empty)`` when special tokens that occur in ``texts`` are shown."""
        found = self._shown.get(texts)
        if found is None:
            hidden = frozenset(i for i in self.special_ids if not any(self._text(i) in text for text in texts))
            found = hidden, self._hide(hidden)
            if len(self._shown) >= MAX_SHOWN:  # the texts come from requests
                self._shown.clear()
            self._shown[texts] = found
        return found

    def find(self, text: bytes) -> Iterator[int]:
        """Ids of the tokens amid others that hold ``text``, in order."""
        at = self._joined.find(text)
        while at >= 0:
            index = bisect_right(self._begins, at) - 1
            yield index
            at = self._joined.find(text, self._begins[index + 1]) if index + 1 < len(self._begins) else -1

    @cached_property
    def _joined(self) -> bytes:
        """The bytes of all tokens, each behind a byte that no text contains."""
        return b"".join(b"\xff" + self.later[i] for i in range(self._size))

    @cached_property
    def _begins(self) -> list[int]:
        """Where each token stands in `_joined`."""
        return list(accumulate((1 + len(self.later[i]) for i in range(self._size - 1)), initial=0))

    def _hide(self, hidden: frozenset[int]) -> PieceTable:
        return PieceTable(lambda token_id: b"" if token_id in hidden else self.later[token_id])

    def _text(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def _compute(self, token_id: int, *, is_first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return bytes_of_spelling(token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self._rule(token, is_first).encode("utf-8", "replace")


def _read_decoder(backend: Backend) -> tuple[TextRule, bool, bool, int]:
    """``(rule, is_byte_level, has_byte_tokens, strip_start)`` of the tokenizer's decoder. A step that works token by
    token becomes a rule. Behind ``Fuse`` there is one string left, so only a strip of leading spaces is supported; any
    other decoder is called for each token (`_ask_decoder`)."""
    if backend.decoder is None:  # the library then joins tokens with spaces
        return (lambda token, is_first: token if is_first else " " + token), False, False, 0
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return (lambda token, _: token), True, False, 0
    rules: list[TextRule] = []
    strip_start, is_fused = 0, False
    for step in steps:
        if step["type"] == "Strip" and is_fused and step["content"] == " " and step["stop"] == 0:
            strip_start += step["start"]
        elif step["type"] == "Fuse":
            is_fused = True
        elif step["type"] != "ByteFallback":
            rule = None if is_fused else _text_rule(step)
            if rule is None:
                return _ask_decoder(backend), False, "ByteFallback" in kinds, 0
            rules.append(rule)

    def apply(token: str, is_first: bool) -> str:
        for rule in rules:
            token = rule(token, is_first)
        return token

    return apply, False, "ByteFallback" in kinds, strip_start


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _flatten(inner)]


def _text_rule(step: dict[str, Any]) -> TextRule | None:
    if step["type"] == "Replace" and "String" in step["pattern"]:
        old, new = step["pattern"]["String"], step["content"]
        return lambda token, _: token.replace(old, new)
    if step["type"] == "Metaspace":
        mark, keeps_first = step["replacement"], step.get("prepend_scheme") == "never"
        return lambda token, is_first: token.replace(mark, "" if is_first and not keeps_first else " ")
    if step["type"] == "WordPiece":
        return _word_piece(step["prefix"], step["cleanup"])
    return None


def _word_piece(prefix: str, has_cleanup: bool) -> TextRule:
    def rule(token: str, is_first: bool) -> str:
        if not is_first:
            token = token[len(prefix):] if token.startswith(prefix) else " " + token
        if has_cleanup:
            for old, new in _CLEANUP:
                token = token.replace(old, new)
        return token

    return rule


def _ask_decoder(backend: Backend) -> TextRule:
    """For rare decoders: call the decoder with an anchor token before the token, and cut the anchor's text off."""
    decoder = backend.decoder
    anchor = "a"
    before = decoder.decode([anchor])

    def rule(token: str, is_first: bool) -> str:
        text: str = decoder.decode([token]) if is_first else decoder.decode([anchor, token])[len(before):]
        return text

    return rule
