"""Health, readiness, metrics, the model list; and SGLang's control routes: abort, server and model information."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from pathlib import PurePath
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.base import VERSION
from headrace.base.adapters import LoRARequest
from headrace.base.config import flatten
from headrace.base.errors import EngineUnavailable, RequestError
from headrace.base.messages import EngineStats
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.service.client.prompts import new_request_id
from headrace.serving.http.generation.context import AppContext, context_of, read_request
from headrace.serving.http.generation.run import GenerationRequest, collect_generation
from headrace.serving.http.protocol.admin import (
    AbortRequest,
    AbortResponse,
    ModelInfo,
    ReplicaHealth,
    ReplicaInfo,
    ServerInfo,
    ServerLoad,
    State,
    Version,
)
from headrace.serving.http.protocol.openai import ModelCard, ModelList
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

logger = logging.getLogger(__name__)

ABORT_BODY = JsonBody(AbortRequest)
SECRETS = ("api_key", "admin_api_key")
TIMEOUT_S = 20.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.05, 600.0
STATS_TIMEOUT_S = 1.0


def _state(context: AppContext, status: str) -> State:
    state = State(status, context.state)
    if context.client.state in ("starting", "restarting"):
        state.stage, state.progress = context.client.progress
    replicas = context.client.statuses
    if len(replicas) > 1:
        state.replicas = [ReplicaHealth(r.index, r.state, r.stage, r.progress) for r in replicas]
    return state


async def show_health(request: Request) -> JsonResponse:
    """Whether the HTTP process is alive."""
    return JsonResponse(_state(context_of(request), "ok"))


async def show_ready(request: Request) -> JsonResponse:
    """Whether requests are accepted: the engine has sampled a token, and nothing is shutting down."""
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
    """Whether a token can be generated now: one is run through the model."""
    context, timeout_s = context_of(request), _read_timeout(request)
    context.check_available()
    is_pooling = context.facts().pooling is not None
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    # The highest priority: under that policy the check does not wait behind queued requests.
    generation = GenerationRequest(
        request_id=new_request_id("health-"), prompts=[[0]], params=[PoolingSpec() if is_pooling else params],
        priority=2**31 - 1
    )
    try:
        async with asyncio.timeout(timeout_s):
            await collect_generation(request, generation)
    except TimeoutError:
        raise EngineUnavailable(f"no token within {timeout_s:g} s", retry_after=5.0) from None
    return JsonResponse(_state(context, "ok"))


async def current_stats(context: AppContext) -> EngineStats:
    """The engine's statistics; the last known ones if it does not answer at once."""
    if context.client.state in ("ready", "draining", "asleep"):
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await context.client.stats()
        # Statistics must be available while the engine is busy or restarts: use the last known ones.
        except (TimeoutError, EngineUnavailable) as error:
            logger.debug("engine statistics are not current: %s", error)
    return context.client.last_stats


async def show_metrics(request: Request) -> Response:
    """Metrics in Prometheus text format."""
    context = context_of(request)
    stats = await current_stats(context)
    text = context.metrics.render(
        stats, context.client.statuses, is_ready=context.is_ready,
        num_slots=context.client.config.adapters.num_slots,
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def show_version(_request: Request) -> JsonResponse:
    """The version of the server."""
    return JsonResponse(Version(VERSION))


def _media_kinds(context: AppContext) -> list[str]:
    """The media that requests may hold."""
    facts = context.facts()
    taken = facts.media.kinds if facts.media is not None else ()
    return [kind for kind in taken if context.client.config.media.limit(kind)]


def _card(context: AppContext) -> ModelCard:
    facts = context.facts()
    task = facts.pooling.kind if facts.pooling is not None else "generate"
    return ModelCard(
        id=context.model_name, created=context.created, max_model_len=facts.max_model_len, root=facts.model, task=task,
        input_modalities=("text", *_media_kinds(context)),
    )


def _adapter_card(context: AppContext, adapter: LoRARequest) -> ModelCard:
    base = _card(context)
    # clients may be on other machines: they are told no folders of this one
    path = PurePath(adapter.path or adapter.name)
    root = path.name if path.is_absolute() else str(path)
    return msgspec.structs.replace(base, id=adapter.name, root=root, parent=base.id)


async def list_models(request: Request) -> JsonResponse:
    """List the served model under each of its names, and its adapters."""
    context, card = context_of(request), _card(context_of(request))
    return JsonResponse(ModelList([
        *(msgspec.structs.replace(card, id=name) for name in context.model_names),
        *(_adapter_card(context, adapter) for adapter in context.adapters.loaded)
    ]))


async def show_model(request: Request) -> JsonResponse:
    """Describe a model; names may contain slashes."""
    if not request.path_params["model"]:
        raise HTTPException(404)  # the list with a slash behind it: no model, though requests may leave theirs out
    context = context_of(request)
    card, given = _card(context), request.path_params["model"]
    name = context.check_model(given)
    adapter = next((one for one in context.adapters.loaded if one.name == name), None)
    if adapter is not None:
        return JsonResponse(_adapter_card(context, adapter))
    return JsonResponse(msgspec.structs.replace(card, id=given) if given in context.model_names else card)


async def abort_request(request: Request) -> JsonResponse:
    """Abort one running request, or all. An unknown id is no error: the request may just have finished."""
    context, body = await read_request(request, ABORT_BODY)
    if body.abort_all:
        return JsonResponse(AbortResponse(context.abort_all()))
    if not body.rid:
        raise RequestError("give rid, or abort_all", param="rid")
    return JsonResponse(AbortResponse(context.abort(body.rid)))


async def show_load(request: Request) -> JsonResponse:
    """The number of requests in progress (vLLM's form)."""
    return JsonResponse(ServerLoad(context_of(request).client.num_inflight))


def _options(context: AppContext) -> dict[str, Any]:
    server, operations = dataclasses.asdict(context.server), dataclasses.asdict(context.operations)
    options = flatten(context.client.config) | server | operations
    return {name: "***" if name in SECRETS and value is not None else value for name, value in options.items()}


def _bootstrap_port(context: AppContext) -> int | None:
    role = context.client.config.disaggregation
    return role.disaggregation_bootstrap_port if role.disaggregation_mode == "prefill" else None


async def show_server(request: Request) -> JsonResponse:
    """Options, model, memory and counters."""
    context = context_of(request)
    facts = context.client.facts
    return JsonResponse(ServerInfo(
        version=VERSION, state=context.state, served_model_name=context.model_name,
        max_total_num_tokens=facts.num_kv_tokens if facts else None, num_inflight=context.client.num_inflight,
        model=msgspec.structs.asdict(facts) if facts else None,
        memory=[msgspec.structs.asdict(line) for line in context.client.memory],
        stats=msgspec.structs.asdict(await current_stats(context)), options=_options(context),
        disaggregation_bootstrap_port=_bootstrap_port(context),
        replicas=[
            ReplicaInfo(
                one.index, one.state, one.pid, one.num_restarts, one.facts.device if one.facts else None,
                msgspec.structs.asdict(one.stats)
            )
            for one in context.client.statuses
        ],
    ))


async def show_model_info(request: Request) -> JsonResponse:
    """Facts of the model."""
    context = context_of(request)
    facts, model = context.facts(), context.client.config.model
    kinds = _media_kinds(context)
    return JsonResponse(ModelInfo(
        model_path=facts.model, served_model_name=context.model_name, tokenizer_path=model.tokenizer or facts.model,
        is_generation=facts.pooling is None, architectures=[facts.architecture], model_type=facts.family,
        max_model_len=facts.max_model_len, dtype=facts.dtype, device=facts.device, num_parameters=facts.num_parameters,
        preferred_sampling_params=facts.default_sampling, has_image_understanding="image" in kinds,
        has_audio_understanding="audio" in kinds, weight_version=context.admin.weight_version,
    ))


TIMEOUT = {"timeout": {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S}}
ENDPOINTS = (
    Endpoint("/v1/models", list_models, "openai", ModelList, errors=(503,)),
    Endpoint("/v1/models/{model:path}", show_model, "openai", ModelCard, errors=(404, 503)),
    post("/abort_request", abort_request, "control", AbortResponse, body=ABORT_BODY),
    Endpoint("/server_info", show_server, "control", ServerInfo, aliases=("/get_server_info",)),
    Endpoint("/model_info", show_model_info, "control", ModelInfo, errors=(503,), aliases=("/get_model_info",)),
    Endpoint("/health", show_health, "health", State),
    Endpoint("/ready", show_ready, "health", State, errors=(503,)),
    Endpoint("/ping", show_ready, "health", State, methods=("GET", "POST"), errors=(503,)),
    Endpoint("/load", show_load, "control", ServerLoad),
    Endpoint("/health_generate", generate_health, "health", State, query=TIMEOUT, errors=(400, 429, 503, 504)),
    Endpoint("/metrics", show_metrics, "health"),
    Endpoint("/version", show_version, "health", Version),
)
