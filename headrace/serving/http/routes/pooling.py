"""``/v1/embeddings``, ``/encode``, ``/v1/rerank``, ``/v1/score`` and ``/v1/classify``, for every kind of model that can
serve them."""

from __future__ import annotations

import base64
import math
import time
from array import array

from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.pooling import PoolingSpec, pack_floats, unpack_floats
from headrace.service.client.pooling import PoolingInput, activate, check_dimensions, plan_scores, shorten
from headrace.serving.http.generation.context import read_request
from headrace.serving.http.generation.pooling import (
    PooledOutputs,
    check_amount,
    encoder_for,
    read_messages,
    require_kind,
    run_pooling,
    split_inputs,
    tokenize,
)
from headrace.serving.http.generation.run import PlainPrompt
from headrace.serving.http.protocol import pooling as wire
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

EMBED_BODY, ENCODE_BODY = JsonBody(wire.EmbeddingRequest), JsonBody(wire.EncodeRequest)
RERANK_BODY, SCORE_BODY = JsonBody(wire.RerankRequest), JsonBody(wire.ScoreRequest)
CLASSIFY_BODY = JsonBody(wire.ClassifyRequest)
COHERE = "/v2/"
"""This version of the rerank route returns documents only on request; the others return them by default."""


async def _run(
    request: Request, body: wire.EmbeddingRequest | wire.ClassifyRequest, *, limit: int, id_prefix: str
) -> PooledOutputs:
    """Run the inputs of an embedding or classification request."""
    inputs = split_inputs(body.input, limit)
    encoder = encoder_for(request, body.truncate_prompt_tokens, body.truncation_side)
    has_special = body.add_special_tokens is not False
    encoded = await tokenize(
        request, lambda: [encoder.encode(text, add_special_tokens=has_special) for text in inputs], inputs
    )
    return await run_pooling(request, encoded, body, id_prefix)


async def create_embeddings(request: Request) -> JsonResponse:
    """Embeddings of texts and images."""
    context, body = await read_request(request, EMBED_BODY)
    context.check_request(body.model)
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    if (body.input is None) == (body.messages is None):
        raise RequestError("give one of input and messages", param="input")
    if body.messages is not None:
        outputs = await run_pooling(request, [await read_messages(request, body, body.messages)], body, "embd-")
    else:
        outputs = await _run(request, body, limit=context.server.max_batch_prompts, id_prefix="embd-")

    def write(packed: bytes) -> list[float] | str:
        if body.encoding_format != "base64":
            return shorten(unpack_floats(packed), body.dimensions)
        # Packed results are float32 bytes already, as base64 clients expect; unpacked only to be shortened.
        if body.dimensions is not None:
            packed = pack_floats(shorten(unpack_floats(packed), body.dimensions))
        return base64.b64encode(packed).decode()

    data = [wire.Embedding(i, write(packed)) for i, packed in enumerate(outputs.packed)]
    created = int(time.time())
    return JsonResponse(wire.EmbeddingResponse(outputs.request_id, created, outputs.model_name, data, outputs.usage))


async def encode(request: Request) -> JsonResponse:
    """Embeddings of texts (SGLang's API)."""
    context, body = await read_request(request, ENCODE_BODY)
    context.check_available()
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", param="text")
    given, param = (body.text, "text") if body.text is not None else (body.input_ids, "input_ids")
    inputs = split_inputs(given, context.server.max_batch_prompts, param)
    encoder = encoder_for(request, body.truncate_prompt_tokens)
    encoded = await tokenize(request, lambda: [encoder.encode(text) for text in inputs], inputs)
    fields = wire.PoolingFields(model=body.lora_path, rid=body.rid, priority=body.priority, cache_salt=body.cache_salt)
    outputs = await run_pooling(request, encoded, fields, "enc-")
    generation = outputs.generation
    results = [
        wire.Encoded(shorten(unpack_floats(packed), body.dimensions), wire.EncodeInfo(
            id=name, prompt_tokens=len(encoded[i].token_ids), cached_tokens=generation.num_cached(i),
            e2e_latency=generation.timers[i].elapsed_s,
        ))
        for i, (packed, name) in enumerate(zip(outputs.packed, generation.request.ids(), strict=True))
    ]
    is_single = isinstance(given, (str, array)) or (isinstance(given, list) and isinstance(given[0], int))
    return JsonResponse(results[0] if is_single else results)


async def _score(
    request: Request, pairs: list[tuple[str, str]], fields: wire.PoolingFields, *, instruct: str | None, id_prefix: str
) -> tuple[list[float], PooledOutputs]:
    if fields.truncation_side == "left":
        raise RequestError("truncation_side left is for single texts, not for pairs", param="truncation_side")
    encoder = encoder_for(request, fields.truncate_prompt_tokens)
    texts = [text for pair in pairs for text in pair]
    plan = await tokenize(request, lambda: plan_scores(pairs, encoder, instruct=instruct), texts)
    outputs = await run_pooling(request, plan.inputs, fields, id_prefix)
    return plan.finish(outputs.packed), outputs


async def rerank(request: Request) -> JsonResponse:
    """Order documents by relevance to a query."""
    context, body = await read_request(request, RERANK_BODY)
    context.check_request(body.model)
    # one less: the query of an embedding model is a prompt of its own
    check_amount(len(body.documents), context.server.max_batch_prompts - 1, "documents")
    texts = [d.text if isinstance(d, wire.Document) else d for d in body.documents]
    pairs = [(body.query, text) for text in texts]
    scores, outputs = await _score(request, pairs, body, instruct=body.instruct, id_prefix="rerank-")
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
    has_documents = COHERE not in request.url.path if body.return_documents is None else body.return_documents
    ranked = [
        wire.Ranked(i, scores[i], wire.Document(text=texts[i]) if has_documents else UNSET) for i in best
    ]
    return JsonResponse(wire.RerankResponse(outputs.request_id, outputs.model_name, ranked, outputs.usage))


async def score(request: Request) -> JsonResponse:
    """Score pairs of texts, or label tokens after a text."""
    context, body = await read_request(request, SCORE_BODY)
    context.check_request(body.model)
    limit = context.server.max_batch_prompts
    if body.query is not None or body.items is not None:
        return await _score_labels(request, body, limit)
    scores, outputs = await _score(request, _pairs(body, limit), body, instruct=body.instruct, id_prefix="score-")
    data, created = [wire.Score(i, value) for i, value in enumerate(scores)], int(time.time())
    return JsonResponse(wire.ScoreResponse(outputs.request_id, created, outputs.model_name, outputs.usage, data=data))


def _pairs(body: wire.ScoreRequest, limit: int) -> list[tuple[str, str]]:
    if None not in (body.text_1, body.queries) or None not in (body.text_2, body.documents):
        raise RequestError(
            "text_1 and queries are the same field, as are text_2 and documents; give one of each", param="text_1"
        )
    first = body.text_1 if body.text_1 is not None else body.queries
    second = body.text_2 if body.text_2 is not None else body.documents
    if first is None or second is None:
        raise RequestError("text_1 and text_2 are required", param="text_1" if first is None else "text_2")
    left, right = ([given] if isinstance(given, str) else list(given) for given in (first, second))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise RequestError(
            f"text_1 must be one text, or as many as text_2; got {len(left)} and {len(right)}", param="text_1"
        )
    # an embedding model may need both texts of each pair as prompts
    check_amount(2 * len(left), limit, "text_1 and text_2")
    return list(zip(left, right, strict=True))


async def _score_labels(request: Request, body: wire.ScoreRequest, limit: int) -> JsonResponse:
    """Probabilities of label tokens after query and item (SGLang's form)."""
    query, given = body.query, body.items
    if query is None or given is None or not body.label_token_ids:
        raise RequestError("query, items and label_token_ids go together", param="label_token_ids")
    items: list[PlainPrompt] = [given] if isinstance(given, str) else list(given)
    check_amount(len(items), limit, "items")
    spec, encoder = PoolingSpec(label_ids=body.label_token_ids), encoder_for(request, body.truncate_prompt_tokens)

    def join(item: PlainPrompt) -> PoolingInput:
        first, second = (item, query) if body.item_first else (query, item)
        if isinstance(first, str) and isinstance(second, str):
            return PoolingInput(encoder.encode(first + second).token_ids, spec)
        if not isinstance(first, str) and not isinstance(second, str):
            return PoolingInput(encoder.encode([*first, *second]).token_ids, spec)
        raise RequestError("query and items must both be texts, or both token ids", param="items")

    encoded = await tokenize(request, lambda: [join(item) for item in items], [*items, query])
    outputs = await run_pooling(request, encoded, body, "score-")
    logprobs = [unpack_floats(packed) for packed in outputs.packed]
    scores = [activate(row, "softmax") if body.apply_softmax else [math.exp(x) for x in row] for row in logprobs]
    return JsonResponse(wire.ScoreResponse(
        outputs.request_id, int(time.time()), outputs.model_name, outputs.usage, scores=scores, object="scoring"
    ))


async def classify(request: Request) -> JsonResponse:
    """Classify texts."""
    context, body = await read_request(request, CLASSIFY_BODY)
    context.check_request(body.model)
    facts = require_kind(context.facts(), "classify")
    if None not in (body.use_activation, body.activation) and body.use_activation != body.activation:
        raise RequestError("use_activation and activation are the same field; give one", param="activation")
    activation = "identity" if False in (body.use_activation, body.activation) else facts.activation
    outputs = await _run(request, body, limit=context.server.max_batch_prompts, id_prefix="classify-")
    data = []
    for index, packed in enumerate(outputs.packed):
        probs = activate(unpack_floats(packed), activation)
        label = facts.labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(wire.Classification(index, label, probs, len(probs)))
    created = int(time.time())
    return JsonResponse(wire.ClassifyResponse(outputs.request_id, created, outputs.model_name, data, outputs.usage))


ENDPOINTS = (
    post(
        "/v1/embeddings", create_embeddings, "pooling", wire.EmbeddingResponse, body=EMBED_BODY,
        errors=GENERATION_ERRORS
    ),
    post("/encode", encode, "native", wire.Encoded | list[wire.Encoded], body=ENCODE_BODY, errors=(429, 503, 504)),
    post(
        "/v1/rerank", rerank, "pooling", wire.RerankResponse, body=RERANK_BODY, errors=GENERATION_ERRORS,
        aliases=("/v2/rerank", "/rerank")
    ),
    post(
        "/v1/score", score, "pooling", wire.ScoreResponse, body=SCORE_BODY, errors=GENERATION_ERRORS,
        aliases=("/score",)
    ),
    post(
        "/v1/classify", classify, "pooling", wire.ClassifyResponse, body=CLASSIFY_BODY, errors=GENERATION_ERRORS,
        aliases=("/classify",)
    ),
)
