"""What the embedding, scoring and classification routes share: model checks, submission of texts, packed results.

Refuses: response formats (those of the routes) and tokenization (``service/client/pooling``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.messages import ModelFacts
from headrace.base.pooling import PoolingFacts, PoolingKind
from headrace.service.client.media import place_items
from headrace.service.client.outputs import pooled_of
from headrace.service.client.pooling import PoolingEncoder, PoolingInput
from headrace.service.client.prompts import new_request_id
from headrace.serving.http.generation.context import compute, context_of
from headrace.serving.http.generation.media import media_of, prepare_media, template_content
from headrace.serving.http.generation.run import Generation, GenerationRequest, PlainPrompt, collect_generation
from headrace.serving.http.protocol.openai import ChatMessage
from headrace.serving.http.protocol.pooling import EmbeddingRequest, PoolingFields, PoolingUsage

T = TypeVar("T")

OUTPUTS = {"embed": "embeddings", "classify": "classes"}


@dataclass(frozen=True, slots=True)
class PooledOutputs:
    """Results of a pooling request: one packed vector per text (`headrace.base.pooling.unpack_floats`), in input order.
    ``generation`` is closed; it still has usage and timing."""

    request_id: str
    packed: list[bytes]
    generation: Generation

    @property
    def model_name(self) -> str:
        """The model that answered."""
        return self.generation.model_name

    @property
    def usage(self) -> PoolingUsage:
        """Prompt tokens of all texts."""
        prompt_tokens = self.generation.usage().prompt_tokens
        return PoolingUsage(prompt_tokens, prompt_tokens)


def require_kind(facts: ModelFacts, kind: PoolingKind) -> PoolingFacts:
    """The pooling facts of a model of this kind; raises `RequestError` for another model."""
    if facts.pooling is None:
        raise RequestError(
            f"{facts.model} generates text and has no {OUTPUTS[kind]}; serve an embedding or classification model, or "
            f"start with --task {kind}", param="model"
        )
    if facts.pooling.kind != kind:
        raise RequestError(f"{facts.model} makes {OUTPUTS[facts.pooling.kind]}, not {OUTPUTS[kind]}", param="model")
    return facts.pooling


def split_inputs(given: object, limit: int, param: str = "input", *, noun: str = "texts") -> list[PlainPrompt]:
    """One input or several: a text, token ids, or a list of only one of these. Raises `RequestError` for a mixture or
    for more than ``limit``."""
    if isinstance(given, str | array):
        return [given]
    items = cast("list[object]", given)
    kinds = set(map(type, items))
    if kinds <= {int}:
        return [cast("list[int]", items)]
    if kinds != {str} and not kinds <= {list, array}:
        raise RequestError(f"{param} must be a string, token ids, or a list of only one of these", param=param)
    check_amount(len(items), limit, param, noun)
    return cast("list[PlainPrompt]", items)


def check_amount(count: int, limit: int, param: str, noun: str = "texts") -> None:
    """Raise `RequestError` for more than ``limit`` inputs."""
    if count > limit:
        raise RequestError(f"{param} may hold at most {limit} {noun}, got {count}", param=param)


def encoder_for(request: Request, truncate: int | None, side: str | None = None) -> PoolingEncoder:
    """Tokenizes and truncates texts for the served model; ``side`` is the one that is cut, "right" by default."""
    context = context_of(request)
    encoder = PoolingEncoder.of(context.facts(), context.client.tokenizer, truncate)
    return replace(encoder, keeps_end=True) if side == "left" else encoder


async def read_messages(
    request: Request, body: EmbeddingRequest, messages: Sequence[ChatMessage]
) -> PoolingInput:
    """The input that a conversation is embedded as: in the model's chat template with its media, or its only part where
    the model embeds a text or an image. Raises typed errors."""
    context = context_of(request)
    facts, encoder = context.facts(), encoder_for(request, body.truncate_prompt_tokens, body.truncation_side)
    items = await prepare_media(request, context, media_of(messages), salt=body.cache_salt or "")
    contents = [template_content(message.content) for message in messages]

    def render() -> PoolingInput:
        if facts.media is not None and facts.media.is_alone:
            texts = [text for content in contents for text in _texts_of(content) if text]
            if items or len(texts) != 1:
                return encoder.take(place_items("".join(texts), items, None, facts, param="messages"))
            return encoder.encode(texts[0], add_special_tokens=body.add_special_tokens is not False)
        tokenizer = context.tokenizer()
        if not tokenizer.has_chat_template:
            raise RequestError(
                "this model has no chat template; send input, or start the server with --chat-template",
                param="messages",
            )
        text = tokenizer.render_chat(
            [{"role": m.role, "content": content} for m, content in zip(messages, contents, strict=True)],
            add_generation_prompt=bool(body.add_generation_prompt),
        )
        has_special = bool(body.add_special_tokens)
        if not items:
            return encoder.encode(text, add_special_tokens=has_special)
        return encoder.take(
            place_items(text, items, tokenizer, facts, add_special_tokens=has_special, param="messages")
        )

    size = sum(len(text) for content in contents for text in _texts_of(content))
    return await compute(request, render, size=size)


def _texts_of(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


async def tokenize(request: Request, make: Callable[[], T], texts: Sequence[PlainPrompt]) -> T:
    """The result of ``make``, which tokenizes ``texts``; on a thread when they are long."""
    return await compute(request, make, size=sum(len(text) for text in texts if isinstance(text, str)))


async def run_pooling(
    request: Request, texts: list[PoolingInput], fields: PoolingFields, id_prefix: str
) -> PooledOutputs:
    """Submit all texts and wait for their results; when one is refused, none runs."""
    request_id = fields.request_id or fields.rid or new_request_id(id_prefix)
    adapter = context_of(request).check_model(fields.model)
    generation, outputs = await collect_generation(request, GenerationRequest(
        request_id=request_id, prompts=[text.token_ids for text in texts], params=[text.spec for text in texts],
        namespace=fields.cache_salt or "", priority=fields.priority or 0, adapter=adapter,
    ))
    return PooledOutputs(request_id, [pooled_of(output) for output in outputs], generation)
