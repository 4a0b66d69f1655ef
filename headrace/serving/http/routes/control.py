"""Is the process alive, does it take requests, does it really produce tokens; and ``/metrics``.

``/v1/models``.

SGLang's control routes: abort requests, server and model information."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headrace.base import VERSION
from headrace.base.config import flatten
from headrace.base.errors import EngineUnavailable, RequestError
from headrace.base.messages import EngineStats
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.generation.run import Ask, collect_generation
from headrace.serving.http.generation.sampling import draw_request_id
from headrace.serving.http.protocol.admin import AbortAnswer, AbortRequest, ModelInfo, ServerInfo, State, Version
from headrace.serving.http.protocol.openai import ModelCard, ModelList
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import JsonResponse

logger = logging.getLogger(__name__)
TIMEOUT_S = 20.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.05, 600.0
STATS_TIMEOUT_S = 1.0


def _state(context: AppContext, status: str) -> State:
    if context.client.state in ("starting", "restarting"):
        stage, fraction = context.client.progress
        return State(status, context.state, stage, fraction)
    return State(status, context.state)


async def tell_health(request: Request) -> JsonResponse:
    """The HTTP process answers."""
    return JsonResponse(_state(context_of(request), "ok"))


async def tell_ready(request: Request) -> JsonResponse:
    """A token has been produced, and nothing is shutting down."""
    context = context_of(request)
    context.check_available()
    return JsonResponse(_state(context, "ready"))


def _read_timeout(request: Request) -> float:
    given = request.query_params.get("timeout")
    try:
        seconds = TIMEOUT_S if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
        raise RequestError(f"timeout must be from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds", param="timeout")
    return seconds


async def generate_health(request: Request) -> JsonResponse:
    """One real token, now."""
    context, timeout_s = context_of(request), _read_timeout(request)
    context.check_available()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    is_reader = context.facts().pooling is not None
    ask = Ask(
        request_id=draw_request_id("health-"), prompts=[[0]], params=[PoolingSpec() if is_reader else params],
        priority=2**31 - 1
    )
    try:
        async with asyncio.timeout(timeout_s):
            await collect_generation(request, ask)
    except TimeoutError:
        raise EngineUnavailable(f"no token within {timeout_s:g} s", retry_after=5.0) from None
    return JsonResponse(_state(context, "ok"))


async def current_stats(context: AppContext) -> EngineStats:
    """The engine's statistics; the latest known ones when it does not answer at once."""
    if context.client.state in ("ready", "draining", "asleep"):
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await context.client.stats()
        except (TimeoutError, EngineUnavailable) as error:
            logger.debug("engine statistics are not fresh: %s", error)
    return context.client.last_stats


async def tell_metrics(request: Request) -> Response:
    """Prometheus text."""
    context = context_of(request)
    text = context.metrics.render(await current_stats(context), is_ready=context.is_ready)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def tell_version(_request: Request) -> JsonResponse:
    """The version."""
    return JsonResponse(Version(VERSION))


def _card(context: AppContext) -> ModelCard:
    facts = context.facts()
    task = facts.pooling.kind if facts.pooling is not None else "generate"
    return ModelCard(
        id=context.model_name, created=context.created, max_model_len=facts.max_model_len, root=facts.model, task=task
    )


async def list_models(request: Request) -> JsonResponse:
    """The served model."""
    return JsonResponse(ModelList([_card(context_of(request))]))


async def show_model(request: Request) -> JsonResponse:
    """One model; names may hold slashes."""
    context = context_of(request)
    card = _card(context)
    context.check_model(request.path_params["model"])
    return JsonResponse(card)


ABORT_BODY = JsonBody(AbortRequest)
SECRETS = ("api_key", "admin_api_key")


async def abort_request(request: Request) -> JsonResponse:
    """End one running request, or all. An unknown id is no error: it may just have finished."""
    context = context_of(request)
    body = await ABORT_BODY.read(request, context.server.max_body_bytes)
    if body.abort_all:
        return JsonResponse(AbortAnswer(sum(context.abort(rid) for rid in list(context.running))))
    if not body.rid:
        raise RequestError("give rid, or abort_all", param="rid")
    return JsonResponse(AbortAnswer(context.abort(body.rid)))


def _options(context: AppContext) -> dict[str, Any]:
    options = (
        flatten(context.client.config) | dataclasses.asdict(context.server) | dataclasses.asdict(context.operations)
    )
    return {name: "***" if name in SECRETS and value is not None else value for name, value in options.items()}


async def show_server(request: Request) -> JsonResponse:
    """Options, model, memory, counters."""
    context = context_of(request)
    facts = context.client.facts
    return JsonResponse(ServerInfo(
        version=VERSION, state=context.state, served_model_name=context.model_name,
        max_total_num_tokens=facts.num_kv_tokens if facts else None,
        num_inflight=context.client.num_inflight,
        model=msgspec.structs.asdict(facts) if facts else None,
        memory=[msgspec.structs.asdict(line) for line in context.client.memory],
        stats=msgspec.structs.asdict(await current_stats(context)),
        options=_options(context),
    ))


async def show_model_info(request: Request) -> JsonResponse:
    """Static facts of the model."""
    context = context_of(request)
    facts = context.facts()
    model = context.client.config.model
    return JsonResponse(ModelInfo(
        model_path=facts.model, served_model_name=context.model_name, tokenizer_path=model.tokenizer or facts.model,
        is_generation=facts.pooling is None,
        architectures=[facts.architecture], model_type=facts.family, max_model_len=facts.max_model_len,
        dtype=facts.dtype, device=facts.device,
        num_parameters=facts.num_parameters, preferred_sampling_params=facts.default_sampling,
        weight_version=context.admin.weight_version,
    ))


ENDPOINTS = (
    Endpoint(path="/health", handler=tell_health, tag="health", doc="Whether the HTTP process is alive.", answer=State),
    Endpoint(
        path="/ready", handler=tell_ready, tag="health", doc="Whether requests are taken.", answer=State, errors=(503,)
    ),
    Endpoint(
        path="/health_generate", handler=generate_health, tag="health", doc="Whether a token can be produced now.",
        answer=State,
        query={"timeout": {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S}},
        errors=(400, 429, 503, 504),
    ),
    Endpoint(path="/metrics", handler=tell_metrics, tag="health", doc="Prometheus metrics."),
    Endpoint(path="/version", handler=tell_version, tag="health", doc="The version of the server.", answer=Version),
    Endpoint(
        path="/v1/models", handler=list_models, tag="openai", doc="List the served models.", answer=ModelList,
        errors=(503,)
    ),
    Endpoint(
        path="/v1/models/{model:path}", handler=show_model, tag="openai", doc="Describe a model.", answer=ModelCard,
        errors=(404, 503)
    ),
    Endpoint(
        path="/abort_request", methods=("POST",), handler=abort_request, tag="control", doc="End running requests.",
        body=ABORT_BODY,
        answer=AbortAnswer,
    ),
    *(
        Endpoint(
            path=path, handler=show_server, tag="control", doc="Options, model, memory plan and counters.",
            answer=ServerInfo
        )
        for path in ("/server_info", "/get_server_info")
    ),
    *(
        Endpoint(
            path=path, handler=show_model_info, tag="control", doc="Facts of the model.", answer=ModelInfo,
            errors=(503,)
        )
        for path in ("/model_info", "/get_model_info")
    ),
)
