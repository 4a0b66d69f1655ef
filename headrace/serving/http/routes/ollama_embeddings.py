"""``/api/embed`` and, as older clients ask, ``/api/embeddings``: texts to vectors in Ollama's dialect."""

from __future__ import annotations

import time

from starlette.requests import Request

from headrace.base.pooling import unpack_floats
from headrace.service.client.texts import shorten
from headrace.serving.http.body import JsonBody
from headrace.serving.http.context import context_of
from headrace.serving.http.dialects.ollama import plain_name
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.protocol.ollama import (
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaOldEmbedRequest,
)
from headrace.serving.http.protocol.readings import ReadFields
from headrace.serving.http.reading import check_amount, check_dimensions, read_all, reader_for, require_kind, tokenize

BODY = JsonBody(OllamaEmbedRequest, is_lenient=True)
OLD_BODY = JsonBody(OllamaOldEmbedRequest, is_lenient=True)


async def _read(request: Request, body: OllamaEmbedRequest) -> OllamaEmbeddings:
    context, began = context_of(request), time.perf_counter_ns()
    context.check_available()
    context.check_model(plain_name(body.model))
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_amount(len(texts), context.server.max_batch_prompts, "input")
    reader = reader_for(request, None if body.truncate is False else -1)
    readings = await tokenize(lambda: [reader.read(text) for text in texts], texts)
    results = await read_all(request, readings, ReadFields(), "ollama-")
    vectors = [shorten(unpack_floats(packed), body.dimensions) for packed in results.packed]
    return OllamaEmbeddings(body.model, vectors, time.perf_counter_ns() - began, 0, results.usage.prompt_tokens)


async def embed(request: Request) -> JsonResponse:
    """Texts to vectors."""
    return JsonResponse(await _read(request, await BODY.read(request, context_of(request).server.max_body_bytes)))


async def embed_one(request: Request) -> JsonResponse:
    """A text to a vector."""
    body = await OLD_BODY.read(request, context_of(request).server.max_body_bytes)
    answer = await _read(request, OllamaEmbedRequest(model=body.model, input=body.prompt))
    return JsonResponse(OllamaEmbedding(answer.embeddings[0]))


ERRORS = (404, 429, 503, 504)
ENDPOINTS = (
    Endpoint(
        path="/api/embed", methods=("POST",), handler=embed, tag="ollama",
        doc="Embeddings of texts, in Ollama's dialect.", body=BODY,
        answer=OllamaEmbeddings, errors=ERRORS,
    ),
    Endpoint(
        path="/api/embeddings", methods=("POST",), handler=embed_one, tag="ollama",
        doc="The embedding of a text, as older clients ask for it.",
        body=OLD_BODY, answer=OllamaEmbedding, errors=ERRORS,
    ),
)
