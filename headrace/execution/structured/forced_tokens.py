"""`ForcedTokens`: tokenises text that a grammar forces, as the model would most likely have written it: the tokenizer's
own split of the text behind the last token.

A run ends before any token that a longer one could replace, reaching beyond the forced text: there the model chooses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from headrace.base.grammar import Vocabulary

MAX_TEXT = 2048
MAX_CACHED = 4096


class ForcedTokens:
    """For one vocabulary. Runs are cached, as grammars force the same texts again and again."""

    def __init__(self, vocabulary: Vocabulary):
        self._tokens, self._encode = vocabulary.tokens, vocabulary.encode
        special_ids = vocabulary.special_ids
        self._sorted = sorted(token for i, token in enumerate(vocabulary.tokens) if token and i not in special_ids)
        self._cache: OrderedDict[tuple[int, bytes], list[int]] = OrderedDict()

    def find(self, text: bytes, last_token: int) -> list[int]:
        """The tokens of ``text`` after ``last_token``, up to where a token could reach beyond the text. Empty if the
        text begins or ends within a UTF-8 character, or if the tokenizer would merge it with what stands before."""
        if self._encode is None or not text:
            return []
        key = (last_token, text[:MAX_TEXT])
        run = self._cache.get(key)
        if run is None:
            before = self._tokens[last_token] if last_token < len(self._tokens) else b""
            run = self._cache[key] = self._split(key[1], before)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return run

    def _split(self, text: bytes, before: bytes) -> list[int]:
        # With the last token as context, as a tokenizer may treat the beginning of a text differently; else without.
        for context in dict.fromkeys((before, b"")):
            ids = self._split_after(text, context)
            if ids is not None:
                return self._keep_certain(ids, text)
        return []

    def _split_after(self, text: bytes, context: bytes) -> list[int] | None:
        """The ids of ``text`` behind ``context``; None if a token covers parts of both."""
        assert self._encode is not None
        try:
            ids = list(self._encode((context + text).decode()))
        except UnicodeDecodeError:
            return None
        count, written = 0, b""
        # Skip the tokens of the context; they must end exactly where the context does.
        while len(written) < len(context) and count < len(ids):
            written += self._tokens[ids[count]]
            count += 1
        rest = ids[count:]
        return rest if written == context and b"".join(self._tokens[i] for i in rest) == text else None

    def _keep_certain(self, ids: list[int], text: bytes) -> list[int]:
        """The tokens up to the first place where a token could cover all of the remaining text and more."""
        begin = 0
        for count, token_id in enumerate(ids):
            if self._can_reach_beyond(text[begin:]):
                return ids[:count]
            begin += len(self._tokens[token_id])
        return ids

    def _can_reach_beyond(self, rest: bytes) -> bool:
        """Whether a longer token begins with ``rest``."""
        # Tokens with a prefix are neighbours in sorted order: the first beyond ``rest`` is one, or none is.
        index = bisect_right(self._sorted, rest)
        return index < len(self._sorted) and self._sorted[index].startswith(rest)
