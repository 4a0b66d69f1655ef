"""Log probabilities in the shapes of the chat, completions and native routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.base.step import TokenLogprobs
from headrace.serving.http.protocol.native import LogprobTriple
from headrace.serving.http.protocol.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobsJson,
    TopLogprob,
)

if TYPE_CHECKING:
    from headrace.service.tokenization import Tokenizer
    from headrace.service.tokenization.text_decoder import TextDecoder

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for; OpenAI's value."""


class TokenNames:
    """Text and bytes of single tokens. ``as_ids``, or without a tokenizer: token 7 is written ``token_id:7``; its bytes
    stay those of its text. ``wanted`` are the tokens whose logprobs the request names."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False, wanted: Sequence[int] = ()):
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self.wanted = tuple(dict.fromkeys(wanted))

    def candidates(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        """The most likely tokens of a position with their logprobs, best first, then those that the request names."""
        best = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
        known = {token_id for token_id, _ in best}
        named = zip(self.wanted, entry.id_logprobs, strict=True) if self.wanted else ()
        return best + [(token_id, logprob) for token_id, logprob in named if token_id not in known]

    def text(self, token_id: int) -> str:
        """The token's text; incomplete UTF-8 becomes replacement characters."""
        if self._tokenizer is None or self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def exact_text(self, token_id: int) -> str:
        """The token's text as in OpenAI's completions: incomplete UTF-8 by its bytes, ``bytes:\\xe6\\x97``, so that
        such tokens stay distinct."""
        text = self.text(token_id)
        if (
            "\ufffd" not in text or self._tokenizer is None
            or text.encode() == (raw := self._tokenizer.token_bytes(token_id))
        ):
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's exact bytes."""
        return list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else None


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(entries: list[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    """OpenAI's chat format."""
    return ChatLogprobs([
        ContentLogprob(
            names.text(e.token_id), _finite(e.logprob), names.bytes(e.token_id),
            [TopLogprob(names.text(t), _finite(p), names.bytes(t)) for t, p in names.candidates(e)],
        )
        for e in entries
    ])


class CompletionLogprobsWriter:
    """Writes OpenAI's completions format for one choice, whole or in streamed pieces. Keeps the text offset between
    pieces: a token's is where its text begins in that of the choice, which ``decoder`` makes; None: there is no text.
    ``num_top`` 0 leaves out ``top_logprobs``."""

    def __init__(self, names: TokenNames, *, num_top: int, decoder: TextDecoder | None):
        self._names = names
        self._num_top = num_top
        self._offset, self._decoder = 0, decoder

    def write(self, entries: list[TokenLogprobs], *, into: CompletionLogprobs | None = None) -> CompletionLogprobs:
        """Append entries to ``into``, or to a new record."""
        record = into or CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._append(record, entry.token_id, entry)
        return record

    def write_prompt(
        self, token_ids: list[int], entries: list[TokenLogprobs | None], text: str, decoder: TextDecoder | None
    ) -> CompletionLogprobs:
        """The prompt, echoed as ``text``; its first token has no logprob. ``decoder`` makes its text of the tokens,
        perhaps with more at the begin, such as a token that begins every text."""
        record = CompletionLogprobs([], [], [], [])
        outputs, self._decoder = self._decoder, decoder
        # No entry for the first token: nothing precedes it.
        padded = [None] * (len(token_ids) - len(entries)) + list(entries)
        for token_id, entry in zip(token_ids, padded, strict=True):
            self._append(record, token_id, entry)
        num_more = max(0, self._offset - len(text))
        record.text_offset = [max(0, offset - num_more) for offset in record.text_offset]
        self._offset, self._decoder = len(text), outputs
        return record

    def _append(self, record: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None) -> None:
        text = self._names.exact_text(token_id)
        where, num_chars = (0, 0) if self._decoder is None else self._decoder.locate(token_id)
        record.tokens.append(text)
        record.text_offset.append(self._offset + where)
        self._offset += num_chars
        record.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        has_top = self._num_top or self._names.wanted
        record.top_logprobs.append(None if entry is None or not has_top else self._top(entry, text))

    def _top(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in self._names.candidates(entry):
            # two ids may share a text; entries are sorted, so the more likely one is kept
            top.setdefault(self._names.exact_text(token_id), _finite(logprob))
        top.setdefault(text, _finite(entry.logprob))
        return top


def prompt_logprobs_json(entries: list[TokenLogprobs | None], names: TokenNames) -> list[PromptLogprobsJson | None]:
    """vLLM's format: per prompt position a map from token id to logprob, rank (from 1) and text, of the prompt's own
    token and the most likely ones. None for the first position."""
    return [None if e is None else _candidates(e, names) for e in entries]


def _candidates(entry: TokenLogprobs, names: TokenNames) -> PromptLogprobsJson:
    # `top_ids` are sorted by probability, so the position is the rank.
    best = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
    found = {str(t): PromptLogprob(_finite(p), rank, names.text(t)) for rank, (t, p) in best}
    found.setdefault(str(entry.token_id), PromptLogprob(_finite(entry.logprob), entry.rank, names.text(entry.token_id)))
    for token_id, logprob in names.candidates(entry)[len(entry.top_ids) :]:
        found.setdefault(str(token_id), PromptLogprob(_finite(logprob), None, names.text(token_id)))
    return found


def native_triples(pairs: Iterable[tuple[int, float]], names: TokenNames | None) -> list[LogprobTriple]:
    """SGLang's ``[logprob, id, text]`` of pairs of an id and its logprob; the text is null without ``names``."""
    return [(_finite(logprob), token_id, names.text(token_id) if names else None) for token_id, logprob in pairs]
