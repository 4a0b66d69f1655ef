"""Is the process alive, does it take requests, does it really produce tokens; and ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
import math

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.errors import EngineUnavailable, RequestError
from headrace.base.messages import EngineStats
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import Ask, collect_generation
from headrace.serving.http.protocol.native import State, Version
from headrace.serving.http.sampling import draw_request_id

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
    return JsonResponse(Version(__version__))


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
)
