"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.service.client.media import place_items
from headrace.service.client.prompts import check_length
from headrace.service.tokenization import Tokenizer
from headrace.serving.http.generation.context import compute, context_of, read_request
from headrace.serving.http.generation.conversation import render_conversation, render_size
from headrace.serving.http.generation.media import media_of, prepare_media
from headrace.serving.http.generation.pooling import check_amount
from headrace.serving.http.protocol.native import (
    Detokenized,
    DetokenizeRequest,
    RenderedPrompt,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from headrace.serving.http.protocol.openai import ChatRequest
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse
from headrace.serving.http.transport.pieces import TokenIds

TOKENIZE_BODY = JsonBody(TokenizeRequest)
DETOKENIZE_BODY = JsonBody(DetokenizeRequest)
TEMPLATE_BODY = JsonBody(ChatRequest)

PIECE_IDS = 1 << 15
"""Ids decoded at a time. Each piece holds the GIL for a millisecond or two."""


async def tokenize(request: Request) -> JsonResponse:
    """Text or a conversation to token ids."""
    context, body = await read_request(request, TOKENIZE_BODY)
    facts, tokenizer = context.facts(), context.tokenizer()
    context.check_model(body.model)
    sources = {"prompt": body.prompt, "text": body.text, "messages": body.messages}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise RequestError(
            f"give one of prompt, text and messages, got {' and '.join(given) or 'none'}",
            param=(given or ["prompt"])[-1]
        )
    has_special = body.add_special_tokens
    has_strings = bool(body.return_token_strs)
    if body.messages is not None:
        items = await prepare_media(request, context, media_of(body.messages))
        text = await compute(request, lambda: render_conversation(context, body), size=render_size(body))
        has_special = bool(has_special)
        if items:
            placed = await compute(request, lambda: place_items(
                text, items, tokenizer, facts, add_special_tokens=bool(has_special), param="messages"
            ), size=len(text))
            return JsonResponse(_show(tokenizer, [placed.token_ids], facts.max_model_len, has_strings=has_strings))
    else:
        source = (body.prompt if body.text is None else body.text) or ""
        has_special = has_special is not False
        if isinstance(source, list):
            check_amount(len(source), context.server.max_batch_prompts, given[0])
            return JsonResponse(await compute(request, lambda: _tokenize_all(
                tokenizer, source, facts.max_model_len, has_special=has_special, has_strings=has_strings
            )))
        text = source
    return JsonResponse(await compute(request, lambda: _tokenize(
        tokenizer, text, facts.max_model_len, has_special=has_special, has_strings=has_strings
    ), size=len(text)))


def _tokenize(
    tokenizer: Tokenizer, text: str, max_model_len: int, *, has_special: bool, has_strings: bool
) -> Tokenized:
    check_length(text, tokenizer, max_model_len, "prompt")
    pieces = tokenizer.encode_pieces(text, add_special_tokens=has_special)
    return _show(tokenizer, pieces, max_model_len, has_strings=has_strings)


def _show(
    tokenizer: Tokenizer, pieces: Iterable[list[int]], max_model_len: int, *, has_strings: bool
) -> Tokenized:
    """Encodes JSON piece by piece: millions of ids would be large as Python objects."""
    count, ids, strings = 0, [], []
    for piece in pieces:
        count += len(piece)
        ids.append(msgspec.json.encode(piece))
        if has_strings:
            strings.append(msgspec.json.encode([tokenizer.token_text(i) for i in piece]))
    return Tokenized(count, max_model_len, _join_lists(ids), _join_lists(strings) if has_strings else UNSET)


def _tokenize_all(
    tokenizer: Tokenizer, texts: list[str], max_model_len: int, *, has_special: bool, has_strings: bool
) -> Tokenized:
    """A list per text."""
    each = [
        _tokenize(tokenizer, text, max_model_len, has_special=has_special, has_strings=has_strings) for text in texts
    ]
    counts = [cast("int", one.count) for one in each]
    strings = _nest(cast("msgspec.Raw", one.token_strs) for one in each) if has_strings else UNSET
    return Tokenized(counts, max_model_len, _nest(one.tokens for one in each), strings)


def _nest(encoded: Iterable[msgspec.Raw]) -> msgspec.Raw:
    """Encoded JSON values as a list."""
    return msgspec.Raw(b"[" + b",".join(map(bytes, encoded)) + b"]")


def _join_lists(encoded: Iterable[bytes]) -> msgspec.Raw:
    """Encoded JSON lists joined to one."""
    return msgspec.Raw(b"[" + b",".join(inner for each in encoded if (inner := each[1:-1])) + b"]")


async def detokenize(request: Request) -> JsonResponse:
    """Token ids to text."""
    context, body = await read_request(request, DETOKENIZE_BODY)
    context.facts()
    tokenizer = context.tokenizer()
    context.check_model(body.model)
    text = await compute(request, lambda: _detokenize(
        tokenizer, body.tokens, skips_special=bool(body.skip_special_tokens)
    ))
    return JsonResponse(Detokenized(text, text))


def _detokenize(tokenizer: Tokenizer, tokens: TokenIds, *, skips_special: bool) -> msgspec.Raw:
    """The text of ids, as JSON; decoded and encoded piece by piece."""
    texts = tokenizer.decode_pieces(_divide(tokens, tokenizer.vocab_size), skip_special_tokens=skips_special)
    return msgspec.Raw(b'"' + b"".join(msgspec.json.encode(text)[1:-1] for text in texts) + b'"')


def _divide(tokens: TokenIds, vocab_size: int) -> Iterator[list[int]]:
    """The ids, `PIECE_IDS` at a time. Raises `RequestError` for one that the tokenizer does not have."""
    for begin in range(0, len(tokens), PIECE_IDS):
        ids = list(tokens[begin : begin + PIECE_IDS])
        largest = max(ids)
        if largest >= vocab_size:
            raise RequestError(
                f"tokens must be below the vocabulary's size {vocab_size}, got {largest}", param="tokens"
            )
        yield ids


async def apply_template(request: Request) -> JsonResponse:
    """The prompt that the model would get of a conversation (llama.cpp's API)."""
    context, body = await read_request(request, TEMPLATE_BODY)
    context.check_model(body.model)
    text = await compute(request, lambda: render_conversation(context, body), size=render_size(body))
    return JsonResponse(RenderedPrompt(text))


async def show_tokenizer(request: Request) -> JsonResponse:
    """Facts of the tokenizer."""
    context = context_of(request)
    facts, tokenizer = context.facts(), context.tokenizer()
    first, last = (
        tokenizer.token_text(i) if i is not None else None
        for i in (tokenizer.bos_id, next(iter(tokenizer.eos_ids), None))
    )
    template = next(iter(tokenizer.chat_templates), None)
    return JsonResponse(TokenizerInfo(tokenizer.vocab_size, facts.max_model_len, first, last, template))


ENDPOINTS = (
    Endpoint("/tokenizer_info", show_tokenizer, "tokens", TokenizerInfo, errors=(400, 503)),
    post("/apply-template", apply_template, "tokens", RenderedPrompt, body=TEMPLATE_BODY, errors=(404, 503)),
    post("/tokenize", tokenize, "tokens", Tokenized, body=TOKENIZE_BODY, errors=(404, 503), aliases=("/v1/tokenize",)),
    post(
        "/detokenize", detokenize, "tokens", Detokenized, body=DETOKENIZE_BODY, errors=(404, 503),
        aliases=("/v1/detokenize",)
    ),
)
