"""Inputs of pooling requests: texts to tokens, truncated on request, and pairs of texts to be scored.

Three ways to score: a cross-encoder takes both texts in one input; embeddings are compared by cosine; a generating
model is asked for yes or no (the prompt of the Qwen3 rerankers). Torch-free. Refuses: running anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.messages import ModelFacts
from headrace.base.pooling import Activation, PoolingSpec, unpack_floats
from headrace.service.client.media import MediaPrompt
from headrace.service.client.prompts import (
    encode_prompt_begin,
    encode_prompt_end,
    encode_text,
    read_truncation,
    require_tokenizer,
)
from headrace.service.tokenization import Tokenizer

JUDGE = (
    'Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the '
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One input of the engine: its token ids, with media if it has any, and what is to be computed from them."""

    token_ids: list[int] | MediaPrompt
    spec: PoolingSpec = field(default_factory=PoolingSpec)


@dataclass(frozen=True, slots=True)
class PoolingEncoder:
    """Encodes texts for one model. ``limit``: texts are truncated to this many tokens (None: no truncation; texts that
    are too long are refused when they are submitted); ``keeps_end``: single texts at their begin, not their end."""

    facts: ModelFacts
    tokenizer: Tokenizer | None
    limit: int | None = None
    keeps_end: bool = False

    @classmethod
    def of(cls, facts: ModelFacts, tokenizer: Tokenizer | None, truncate: int | None) -> PoolingEncoder:
        """``truncate``: tokens to keep at most, -1 for as many as the model takes, None to refuse longer texts."""
        return cls(facts, tokenizer, None if truncate is None else read_truncation(truncate, facts.max_model_len))

    def encode(self, text: str | Sequence[int], *, add_special_tokens: bool = True) -> PoolingInput:
        """A single text, or its token ids as they are."""
        tokenizer, limit = self.tokenizer, self.limit
        if limit is not None:
            cut = encode_prompt_end if self.keeps_end else encode_prompt_begin
            return PoolingInput(cut(text, tokenizer, limit, add_special_tokens=add_special_tokens))
        if not isinstance(text, str):
            return PoolingInput(list(text))
        known, most = require_tokenizer(tokenizer), self.facts.max_model_len
        return PoolingInput(encode_text(text, known, most, "input", add_special_tokens=add_special_tokens))

    def take(self, prompt: MediaPrompt) -> PoolingInput:
        """A prompt with media as it is; raises `UnsupportedFeature` for one that would have to be truncated."""
        if self.limit is not None and len(prompt) > self.limit:
            raise UnsupportedFeature(
                f"a prompt with media cannot be truncated: this one has {len(prompt)} tokens, more than {self.limit}; "
                "leave truncate_prompt_tokens out, or shorten the text", param="truncate_prompt_tokens",
            )
        return PoolingInput(prompt)

    def encode_pair(self, first: str, second: str) -> PoolingInput:
        """Two texts as one, with the tokens between them that the model expects."""
        ids, second_start = require_tokenizer(self.tokenizer).encode_pair(first, second, limit=self.limit)
        return PoolingInput(ids, PoolingSpec(second_start=second_start))

    def encode_question(self, query: str, document: str, instruction: str) -> PoolingInput:
        """Ask whether a document matches a query, in the model's chat template. The end of the document is cut off when
        the prompt exceeds ``limit``."""
        # First a cheap cut, so that a huge document is not rendered whole; then one by the excess of the real prompt.
        # Decoding and encoding again may add ids: the final slice keeps the end, where the model is asked to answer.
        tokenizer = require_tokenizer(self.tokenizer)
        if self.limit is not None and tokenizer.encode_within(document, self.limit, add_special_tokens=False) is None:
            document = tokenizer.decode(tokenizer.encode(document, add_special_tokens=False, limit=self.limit))
        ids = tokenizer.encode(_ask(tokenizer, query, document, instruction), add_special_tokens=False)
        if self.limit is not None and len(ids) > self.limit:
            kept = tokenizer.encode(document, add_special_tokens=False)[: self.limit - len(ids)]
            ids = tokenizer.encode(
                _ask(tokenizer, query, tokenizer.decode(kept), instruction), add_special_tokens=False
            )[-self.limit :]
        return PoolingInput(ids)


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """How pairs are scored: the inputs to run, and ``finish``, which turns their packed results (in the order of the
    inputs) into one score per pair."""

    inputs: list[PoolingInput]
    finish: Callable[[list[bytes]], list[float]]


def plan_scores(pairs: Sequence[tuple[str, str]], encoder: PoolingEncoder, *, instruct: str | None = None) -> ScorePlan:
    """Plan the scoring of ``(query, document)`` pairs. ``instruct``: the task description for a model that is prompted
    in words. Raises `RequestError` when the model cannot score."""
    pooling = encoder.facts.pooling
    if instruct is not None and pooling is not None and (pooling.kind == "embed" or pooling.takes_pairs):
        raise RequestError(
            "instruct is for models that are prompted in words; this one takes query and document as they are; "
            "leave it out",
            param="instruct"
        )
    if pooling is not None and pooling.kind == "embed":
        return _compare_embeddings(pairs, encoder)
    if pooling is None:
        return _ask_yes_or_no(pairs, encoder, instruct or INSTRUCTION)
    if pooling.width != 1:
        raise RequestError(
            f"this model has {pooling.width} classes; a score needs a model with one class: use /v1/classify",
            param="model"
        )
    if pooling.takes_pairs:
        inputs = [encoder.encode_pair(*pair) for pair in pairs]
    else:
        inputs = [encoder.encode_question(*pair, instruct or INSTRUCTION) for pair in pairs]
    return ScorePlan(
        inputs, lambda results: [activate(unpack_floats(packed), pooling.activation)[0] for packed in results]
    )


def activate(logits: list[float], activation: Activation) -> list[float]:
    """Apply a model's activation to its class logits."""
    if activation == "sigmoid":
        return [_sigmoid(x) for x in logits]
    if activation == "softmax":
        powers = [math.exp(x - max(logits)) for x in logits]
        return [p / sum(powers) for p in powers]
    return logits


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise `RequestError` for more dimensions than an embedding has."""
    if dimensions is not None and dimensions > size:
        raise RequestError(
            f"dimensions must be at most {size}, the size of this model's embeddings; got {dimensions}",
            param="dimensions"
        )


def shorten(vector: list[float], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` numbers, normalized to unit length (Matryoshka embeddings, arXiv:2205.13147). None
    returns the vector as it is; raises `RequestError` for more than it has."""
    check_dimensions(dimensions, len(vector))
    if dimensions is None:
        return vector
    kept = vector[:dimensions]
    return [x / _length(kept) for x in kept]


def _compare_embeddings(pairs: Sequence[tuple[str, str]], encoder: PoolingEncoder) -> ScorePlan:
    """Score by cosine similarity. Each distinct text is embedded once, however many pairs it is in."""
    places = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}

    def finish(results: list[bytes]) -> list[float]:
        vectors = [unpack_floats(packed) for packed in results]
        units = [[x / _length(vector) for x in vector] for vector in vectors]
        return [sum(a * b for a, b in zip(units[places[q]], units[places[d]], strict=True)) for q, d in pairs]

    return ScorePlan([encoder.encode(text) for text in places], finish)


def _ask_yes_or_no(pairs: Sequence[tuple[str, str]], encoder: PoolingEncoder, instruction: str) -> ScorePlan:
    """Score by P(yes) / (P(yes) + P(no)) for the next token: the sigmoid of the difference of the log-probabilities."""
    tokenizer = require_tokenizer(encoder.tokenizer)
    answers = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    if any(len(ids) != 1 for ids in answers):
        raise RequestError(
            "this model cannot score texts: yes and no are not single tokens of its vocabulary; serve a pooling model",
            param="model"
        )
    spec = PoolingSpec(label_ids=[ids[0] for ids in answers])
    inputs = [PoolingInput(encoder.encode_question(*pair, instruction).token_ids, spec) for pair in pairs]

    def finish(results: list[bytes]) -> list[float]:
        return [_sigmoid(yes - no) for yes, no in map(unpack_floats, results)]

    return ScorePlan(inputs, finish)


def _ask(tokenizer: Tokenizer, query: str, document: str, instruction: str) -> str:
    if not tokenizer.has_chat_template:
        raise RequestError(
            "this model cannot score texts: it has no chat template; give one with --chat-template", param="model"
        )
    question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
    return tokenizer.render_chat(messages, enable_thinking=False)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _length(vector: list[float]) -> float:
    """L2 norm; 1 for a zero vector, which callers divide by it."""
    return math.sqrt(sum(x * x for x in vector)) or 1.0
