"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

import asyncio

from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.serving.http.body import JsonBody
from headrace.serving.http.context import context_of
from headrace.serving.http.conversation import render_conversation
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.protocol.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)

TOKENIZE_BODY = JsonBody(TokenizeRequest)
DETOKENIZE_BODY = JsonBody(DetokenizeRequest)


async def tokenize(request: Request) -> JsonResponse:
    """Text or a conversation to ids."""
    context = context_of(request)
    body = await TOKENIZE_BODY.read(request, context.server.max_body_bytes)
    facts, tokenizer = context.facts(), context.tokenizer()
    context.check_model(body.model)
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"give one of prompt, text and messages, got {' and '.join(given) or 'none'}", param=(given or ["prompt"])[-1])
    has_special = body.add_special_tokens
    if body.messages is not None:
        text = await render_conversation(context, body)
        has_special = bool(has_special)
    else:
        text = (body.prompt if body.text is None else body.text) or ""
        has_special = has_special is not False
    ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=has_special)
    strings = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else UNSET
    return JsonResponse(Tokenized(len(ids), facts.max_model_len, ids, strings))


async def detokenize(request: Request) -> JsonResponse:
    """Ids to text."""
    context = context_of(request)
    body = await DETOKENIZE_BODY.read(request, context.server.max_body_bytes)
    context.facts()
    tokenizer = context.tokenizer()
    context.check_model(body.model)
    wrong = next((t for t in body.tokens if t >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"tokens must be below the vocabulary's size {tokenizer.vocab_size}, got {wrong}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return JsonResponse(Detokenized(text, text))


async def show_tokenizer(request: Request) -> JsonResponse:
    """The tokenizer's facts."""
    context = context_of(request)
    facts, tokenizer = context.facts(), context.tokenizer()
    first, last = (tokenizer.token_text(i) if i is not None else None for i in (tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)))
    template = next(iter(tokenizer.chat_templates), None)
    return JsonResponse(TokenizerInfo(tokenizer.vocab_size, facts.max_model_len, first, last, template))


ENDPOINTS = (
    Endpoint(path="/tokenizer_info", handler=show_tokenizer, tag="tokens", doc="The tokenizer's facts.", answer=TokenizerInfo, errors=(400, 503)),
    *(
        Endpoint(
            path=path, methods=("POST",), handler=tokenize, tag="tokens", doc="Text to token ids.", body=TOKENIZE_BODY, answer=Tokenized,
            errors=(404, 503),
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Endpoint(
            path=path, methods=("POST",), handler=detokenize, tag="tokens", doc="Token ids to text.", body=DETOKENIZE_BODY, answer=Detokenized,
            errors=(404, 503),
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
)
