"""``/v1/embeddings`` (OpenAI's) and ``/encode`` (SGLang's).

``/v1/rerank``, ``/v1/score`` and ``/v1/classify``: texts and pairs of texts judged, whatever the model judges by."""

from __future__ import annotations

import base64
import math
import time

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.pooling import PoolingSpec, pack_floats, unpack_floats
from headrace.service.client.pooling import Reading, activate, plan_scores, shorten
from headrace.serving.http.generation.context import context_of
from headrace.serving.http.generation.pooling import (
    Results,
    check_amount,
    check_dimensions,
    read_all,
    reader_for,
    require_kind,
    split_inputs,
    tokenize,
)
from headrace.serving.http.generation.run import Prompt
from headrace.serving.http.protocol.pooling import (
    Classification,
    ClassifyAnswer,
    ClassifyRequest,
    Document,
    Embedding,
    EmbeddingAnswer,
    EmbeddingRequest,
    Encoded,
    EncodeInfo,
    EncodeRequest,
    Ranked,
    ReadFields,
    RerankAnswer,
    RerankRequest,
    Score,
    ScoreAnswer,
    ScoreRequest,
)
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import JsonResponse

EMBED_BODY = JsonBody(EmbeddingRequest)
ENCODE_BODY = JsonBody(EncodeRequest)


async def create_embeddings(request: Request) -> JsonResponse:
    """Texts to vectors."""
    context = context_of(request)
    body = await EMBED_BODY.read(request, context.server.max_body_bytes)
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


RERANK_BODY = JsonBody(RerankRequest)
SCORE_BODY = JsonBody(ScoreRequest)
CLASSIFY_BODY = JsonBody(ClassifyRequest)

WITHOUT_DOCUMENTS = "/v2/"
"""This version of the rerank route tells documents only when asked to, the others unless told not to."""


async def _score(
    request: Request, pairs: list[tuple[str, str]], fields: ReadFields, *, instruct: str | None, prefix: str
) -> tuple[list[float], Results]:
    reader = reader_for(request, fields.truncate_prompt_tokens)
    plan = await tokenize(
        lambda: plan_scores(pairs, reader, instruct=instruct), [text for pair in pairs for text in pair]
    )
    results = await read_all(request, plan.readings, fields, prefix)
    return plan.finish(results.packed), results


async def rerank(request: Request) -> JsonResponse:
    """Documents by how well they answer a query."""
    context = context_of(request)
    body = await RERANK_BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    check_amount(len(body.documents), context.server.max_batch_prompts - 1, "documents")
    texts = [d.text if isinstance(d, Document) else d for d in body.documents]
    scores, results = await _score(
        request, [(body.query, text) for text in texts], body, instruct=body.instruct, prefix="rerank-"
    )
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
    has_documents = (
        body.return_documents if body.return_documents is not None else WITHOUT_DOCUMENTS not in request.url.path
    )
    ranked = [Ranked(i, scores[i], Document(text=texts[i])) if has_documents else Ranked(i, scores[i]) for i in best]
    return JsonResponse(RerankAnswer(results.request_id, context.model_name, ranked, results.usage))


async def score(request: Request) -> JsonResponse:
    """Scores of pairs, or probabilities of label tokens."""
    context = context_of(request)
    body = await SCORE_BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    limit = context.server.max_batch_prompts
    if body.query is not None or body.items is not None:
        return await _score_labels(request, body, limit)
    pairs = _pairs(body, limit)
    scores, results = await _score(request, pairs, body, instruct=body.instruct, prefix="score-")
    data = [Score(i, value) for i, value in enumerate(scores)]
    return JsonResponse(ScoreAnswer(results.request_id, int(time.time()), context.model_name, results.usage, data=data))


def _pairs(body: ScoreRequest, limit: int) -> list[tuple[str, str]]:
    if None not in (body.text_1, body.queries) or None not in (body.text_2, body.documents):
        raise RequestError(
            "text_1 and queries are the same field, as are text_2 and documents; give one of each", param="text_1"
        )
    first, second = (
        body.text_1 if body.text_1 is not None else body.queries,
        body.text_2 if body.text_2 is not None else body.documents
    )
    if first is None or second is None:
        raise RequestError("text_1 and text_2 are required", param="text_1" if first is None else "text_2")
    left, right = ([given] if isinstance(given, str) else list(given) for given in (first, second))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise RequestError(
            f"text_1 must be one text, or as many as text_2; got {len(left)} and {len(right)}", param="text_1"
        )
    check_amount(2 * len(left), limit, "text_1 and text_2")
    return list(zip(left, right, strict=True))


async def _score_labels(request: Request, body: ScoreRequest, limit: int) -> JsonResponse:
    """SGLang's form."""
    context = context_of(request)
    if body.query is None or body.items is None or not body.label_token_ids:
        raise RequestError("query, items and label_token_ids go together", param="label_token_ids")
    items: list[Prompt] = [body.items] if isinstance(body.items, str) else list(body.items)
    check_amount(len(items), limit, "items")
    query, spec = body.query, PoolingSpec(label_ids=body.label_token_ids)
    if any(isinstance(item, str) != isinstance(query, str) for item in items):
        raise RequestError("query and items must both be texts, or both token ids", param="items")
    reader = reader_for(request, body.truncate_prompt_tokens)

    def join(item: Prompt) -> Reading:
        parts = (item, query) if body.item_first else (query, item)
        joined = "".join(parts) if isinstance(query, str) else [token for part in parts for token in part]
        return Reading(reader.read(joined).token_ids, spec)

    readings = await tokenize(lambda: [join(item) for item in items], [*items, query])
    results = await read_all(request, readings, body, "score-")
    logprobs = [unpack_floats(packed) for packed in results.packed]
    scores = [activate(row, "softmax") if body.apply_softmax else [math.exp(x) for x in row] for row in logprobs]
    return JsonResponse(
        ScoreAnswer(
            results.request_id, int(time.time()), context.model_name, results.usage, scores=scores, object="scoring"
        )
    )


async def classify(request: Request) -> JsonResponse:
    """Classes of texts."""
    context = context_of(request)
    body = await CLASSIFY_BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    facts = require_kind(context.facts(), "classify")
    if None not in (body.use_activation, body.activation) and body.use_activation != body.activation:
        raise RequestError("use_activation and activation are the same field; give one", param="activation")
    activation = "identity" if False in (body.use_activation, body.activation) else facts.activation
    inputs = split_inputs(body.input, context.server.max_batch_prompts)
    reader, has_special = reader_for(request, body.truncate_prompt_tokens), body.add_special_tokens is not False
    readings = await tokenize(lambda: [reader.read(text, add_special_tokens=has_special) for text in inputs], inputs)
    results = await read_all(request, readings, body, "classify-")
    data = []
    for index, packed in enumerate(results.packed):
        probs = activate(unpack_floats(packed), activation)
        data.append(
            Classification(index, facts.labels[max(range(len(probs)), key=probs.__getitem__)], probs, len(probs))
        )
    return JsonResponse(ClassifyAnswer(results.request_id, int(time.time()), context.model_name, data, results.usage))


ENDPOINTS = (
    Endpoint(
        path="/v1/embeddings", methods=("POST",), handler=create_embeddings, tag="reading", doc="Embeddings of texts.",
        body=EMBED_BODY,
        answer=EmbeddingAnswer, errors=(404, 429, 503, 504),
    ),
    Endpoint(
        path="/encode", methods=("POST",), handler=encode, tag="native", doc="Embeddings of texts (SGLang's API).",
        body=ENCODE_BODY,
        answer=Encoded | list[Encoded], errors=(429, 503, 504),
    ),
    *(
        Endpoint(
            path=path, methods=("POST",), handler=rerank, tag="reading",
            doc="Order documents by how well they answer a query.", body=RERANK_BODY,
            answer=RerankAnswer, errors=(404, 429, 503, 504),
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Endpoint(
            path=path, methods=("POST",), handler=score, tag="reading",
            doc="Score pairs of texts, or label tokens after a text.", body=SCORE_BODY,
            answer=ScoreAnswer, errors=(404, 429, 503, 504),
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Endpoint(
            path=path, methods=("POST",), handler=classify, tag="reading", doc="Classes of texts.", body=CLASSIFY_BODY,
            answer=ClassifyAnswer,
            errors=(404, 429, 503, 504),
        )
        for path in ("/v1/classify", "/classify")
    ),
)
