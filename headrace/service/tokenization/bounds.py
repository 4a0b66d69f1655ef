"""How much text one token can stand for, where that can be proved from a tokenizer's parts: a text beyond that many
characters per token has more tokens than a model takes, and need not be encoded to be refused.

Not provable: WordPiece and other vocabularies with one id for a whole unknown word or run, normalizers and
pre-tokenizers that drop text. Lengths are in characters (Unicode code points).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from headrace.service.tokenization.token_bytes import CHAR_OF_BYTE

MAX_DECOMPOSED = 4
"""Characters that one composed character has at most in canonical decomposition (Unicode forms NFC and NFKC; e.g.
U+1F82). Composition can shorten a text by no more."""
PIECE_CHARS = 1 << 18
"""Characters that are looked at in one call."""
_KEEPING = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
"""Normalizers after which a text has at least as many characters as before."""
_SPLITTING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
"""Pre-tokenizers that drop nothing; so do `Split` and `Punctuation` unless they remove what they split at."""


@dataclass(frozen=True)
class TokenBound:
    """``num_chars``: the most that one token of a text stands for. The bound does not hold for texts with one of
    ``greedy``: tokens that take in all white space beside them. ``dropped`` are characters without a token."""

    num_chars: int
    greedy: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def proves_more(self, text: str, most: int) -> bool:
        """Whether a text certainly has more than ``most`` tokens."""
        limit = self.num_chars * most
        if len(text) <= limit or any(token in text for token in self.greedy):
            return False
        num_kept = 0
        for begin in range(0, len(text), PIECE_CHARS):  # in one call, all of a giant text would hold the GIL
            piece = text[begin : begin + PIECE_CHARS]
            num_kept += len(piece) - sum(map(piece.count, self.dropped))
            if num_kept > limit:
                return True
        return False


NO_BOUND = TokenBound(1 << 62)
"""Proves nothing about any text."""


def find_bound(backend: Backend) -> TokenBound | None:
    """The bound for a tokenizer; None where none can be proved."""
    shrinkage = _shrinkage(_state(backend.normalizer))
    vocab = backend.get_vocab(with_added_tokens=True)
    dropped = _find_dropped(backend, vocab)
    if shrinkage is None or dropped is None or not _drops_nothing(_state(backend.pre_tokenizer)):
        return None
    added = backend.get_added_tokens_decoder().values()
    greedy = tuple(token.content for token in added if token.lstrip or token.rstrip)
    return TokenBound(shrinkage * max(map(len, vocab), default=1), greedy, dropped)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _shrinkage(state: dict[str, Any] | None) -> int | None:
    """How many times shorter a normalizer can make a text; None for no bound."""
    if state is None or state["type"] in _KEEPING:
        return 1
    if state["type"] in ("NFC", "NFKC"):
        return MAX_DECOMPOSED
    if state["type"] == "Replace" and "String" in state["pattern"] and state["content"]:
        return -(-len(state["pattern"]["String"]) // len(state["content"])) or 1
    if state["type"] != "Sequence":
        return None
    factor = 1
    for inner in state["normalizers"]:
        found = _shrinkage(inner)
        if found is None:
            return None
        factor *= found
    return factor


def _drops_nothing(state: dict[str, Any] | None) -> bool:
    if state is None or state["type"] in _SPLITTING:
        return True
    if state["type"] in ("Split", "Punctuation"):
        return str(state["behavior"]).lower() != "removed"
    return state["type"] == "Sequence" and all(map(_drops_nothing, state["pretokenizers"]))


def _find_dropped(backend: Backend, vocab: dict[str, int]) -> tuple[str, ...] | None:
    """The characters that are part of no token; None if those are not few, or a token may stand for a run of unknown
    ones."""
    has_all_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    model = backend.model
    if isinstance(model, models.BPE):
        is_byte_level = _any_type(_state(backend.pre_tokenizer)) or _any_type(_state(backend.normalizer))
        missing = [byte for byte, char in CHAR_OF_BYTE.items() if char not in vocab]
        # A character of several bytes has one from 0x80 to 0xBF: with those it is never dropped whole.
        if is_byte_level and model.unk_token is None and not any(0x80 <= byte < 0xC0 for byte in missing):
            return tuple(chr(byte) for byte in missing if byte < 0x80)
        is_covering = (model.byte_fallback and has_all_bytes) or (model.unk_token in vocab and not model.fuse_unk)
        return () if is_covering else None
    if isinstance(model, models.Unigram):
        return () if has_all_bytes and json.loads(model.__getstate__()).get("byte_fallback") else None
    return None


def _any_type(state: dict[str, Any] | None, kind: str = "ByteLevel") -> bool:
    if state is None:
        return False
    inner = [*state.get("normalizers", ()), *state.get("pretokenizers", ())]
    return state["type"] == kind or any(_any_type(each, kind) for each in inner)
