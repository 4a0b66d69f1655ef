"""``/v1/embeddings`` (OpenAI's) and ``/encode`` (SGLang's)."""

from __future__ import annotations

import base64
import time

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.pooling import pack_floats, unpack_floats
from headrace.service.client.texts import shorten
from headrace.serving.http.body import JsonBody
from headrace.serving.http.context import context_of
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.protocol.readings import (
    Embedding,
    EmbeddingAnswer,
    EmbeddingRequest,
    Encoded,
    EncodeInfo,
    EncodeRequest,
    ReadFields,
)
from headrace.serving.http.reading import check_dimensions, read_all, reader_for, require_kind, split_inputs, tokenize

BODY = JsonBody(EmbeddingRequest)
ENCODE_BODY = JsonBody(EncodeRequest)


async def create_embeddings(request: Request) -> JsonResponse:
    """Texts to vectors."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    inputs = split_inputs(body.input, context.server.max_batch_prompts)
    reader, has_special = reader_for(request, body.truncate_prompt_tokens), body.add_special_tokens is not False
    readings = await tokenize(lambda: [reader.read(text, add_special_tokens=has_special) for text in inputs], inputs)
    results = await read_all(request, readings, body, "embd-")

    def write(packed: bytes) -> list[float] | str:
        if body.encoding_format != "base64":
            return shorten(unpack_floats(packed), body.dimensions)
        return base64.b64encode(
            packed if body.dimensions is None else pack_floats(shorten(unpack_floats(packed), body.dimensions))
        ).decode()

    data = [Embedding(i, write(packed)) for i, packed in enumerate(results.packed)]
    return JsonResponse(EmbeddingAnswer(results.request_id, int(time.time()), context.model_name, data, results.usage))


async def encode(request: Request) -> JsonResponse:
    """The same in SGLang's form."""
    context = context_of(request)
    body = await ENCODE_BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", param="text")
    given = body.text if body.text is not None else body.input_ids
    inputs = split_inputs(given, context.server.max_batch_prompts, "text" if body.text is not None else "input_ids")
    reader = reader_for(request, body.truncate_prompt_tokens)
    readings = await tokenize(lambda: [reader.read(text) for text in inputs], inputs)
    fields = ReadFields(rid=body.rid, priority=body.priority, cache_salt=body.cache_salt)
    results = await read_all(request, readings, fields, "enc-")
    generation = results.generation
    encoded = [
        Encoded(shorten(unpack_floats(packed), body.dimensions), EncodeInfo(
            id=name, prompt_tokens=len(readings[i].token_ids), cached_tokens=generation.num_cached(i),
            e2e_latency=generation.timers[i].elapsed_s,
        ))
        for i, (packed, name) in enumerate(zip(results.packed, generation.ask.ids(), strict=True))
    ]
    is_single = isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int))
    return JsonResponse(encoded[0] if is_single else encoded)


ENDPOINTS = (
    Endpoint(
        path="/v1/embeddings", methods=("POST",), handler=create_embeddings, tag="reading", doc="Embeddings of texts.",
        body=BODY,
        answer=EmbeddingAnswer, errors=(404, 429, 503, 504),
    ),
    Endpoint(
        path="/encode", methods=("POST",), handler=encode, tag="native", doc="Embeddings of texts (SGLang's API).",
        body=ENCODE_BODY,
        answer=Encoded | list[Encoded], errors=(429, 503, 504),
    ),
)
