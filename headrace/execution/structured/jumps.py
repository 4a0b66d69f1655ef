"""`JumpFinder`: text that a grammar forces, as the tokens in which the model would most likely have written it.

A run of tokens ends before any that could reach beyond the forced text: what comes next must stay the model's choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from headrace.base.grammar import Vocabulary

MAX_TEXT = 2048
MAX_KEPT = 4096


class JumpFinder:
    """For one vocabulary. Runs found are kept: grammars force the same texts again and again."""

    def __init__(self, vocabulary: Vocabulary):
        self._tokens, self._encode = vocabulary.tokens, vocabulary.encode
        self._sorted = sorted(
            token for i, token in enumerate(vocabulary.tokens) if token and i not in vocabulary.special_ids
        )
        self._kept: OrderedDict[tuple[int, bytes], list[int]] = OrderedDict()

    def find(self, text: bytes, last_token: int) -> list[int]:
        """The tokens of ``text`` up to where a token could reach beyond it, written after ``last_token``; none when the
        text is no whole text or the tokenizer would not split it there."""
        if self._encode is None or not text:
            return []
        key = (last_token, text[:MAX_TEXT])
        run = self._kept.get(key)
        if run is None:
            run = self._kept[key] = self._split(
                key[1], self._tokens[last_token] if last_token < len(self._tokens) else b""
            )
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return run

    def _split(self, text: bytes, before: bytes) -> list[int]:
        for context in dict.fromkeys((before, b"")):
            ids = self._split_after(text, context)
            if ids is not None:
                return self._keep_certain(ids, text)
        return []

    def _split_after(self, text: bytes, context: bytes) -> list[int] | None:
        """The ids of ``text`` where it follows ``context``, which is left whole; None when they cannot be told
        apart."""
        assert self._encode is not None
        try:
            ids = list(self._encode((context + text).decode()))
        except UnicodeDecodeError:
            return None
        done, written = 0, b""
        while len(written) < len(context) and done < len(ids):
            written += self._tokens[ids[done]]
            done += 1
        rest = ids[done:]
        return rest if written == context and b"".join(self._tokens[i] for i in rest) == text else None

    def _keep_certain(self, ids: list[int], text: bytes) -> list[int]:
        begin = 0
        for place, token_id in enumerate(ids):
            if self._can_reach_beyond(text[begin:]):
                return ids[:place]
            begin += len(self._tokens[token_id])
        return ids

    def _can_reach_beyond(self, rest: bytes) -> bool:
        """Whether a token begins with ``rest`` and goes on."""
        place = bisect_right(self._sorted, rest)
        return place < len(self._sorted) and self._sorted[place].startswith(rest)
