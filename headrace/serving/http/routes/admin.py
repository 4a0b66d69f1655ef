"""Routes for those who run the server: hold all generation, empty the cache, freeze the heap; and the load, for
routers.

All but the load are closed to strangers (`headrace.serving.http.access.AdminGate`).
"""

from __future__ import annotations

import gc
import time

from starlette.requests import Request

from headrace import __version__
from headrace.serving.http.body import JsonBody
from headrace.serving.http.context import context_of
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.protocol.admin import AdminAnswer, Load, Loads, PauseRequest
from headrace.serving.http.protocol.native import FlushAnswer
from headrace.serving.http.routes.health import current_stats

PAUSE_BODY = JsonBody(PauseRequest)
ADMIN_ERRORS = (401, 403, 503)


async def flush_cache(request: Request) -> JsonResponse:
    """Empty the prefix cache; pages of running requests stay."""
    context = context_of(request)
    context.check_available()
    is_empty = await context.client.reset_prefix_cache()
    message = (
        "the prefix cache is empty" if is_empty else "running requests hold pages; try again when they have finished"
    )
    return JsonResponse(FlushAnswer(is_empty, message), 200 if is_empty else 400)


async def pause_generation(request: Request) -> JsonResponse:
    """Hold everything; requests that come meanwhile wait. No body means the same as ``{}``."""
    context = context_of(request)
    mode = (await PAUSE_BODY.read_optional(request, context.server.max_body_bytes)).mode
    context.check_available()
    await context.upkeep.pause()
    num_ended = sum(context.abort(request_id) for request_id in list(context.running)) if mode != "in_place" else 0
    return JsonResponse(AdminAnswer(True, f"generation is paused; {num_ended} running requests were ended"))


async def continue_generation(request: Request) -> JsonResponse:
    """Go on after a pause."""
    context = context_of(request)
    context.check_available()
    await context.upkeep.pause(False)
    return JsonResponse(AdminAnswer(True, "generation goes on"))


async def freeze_gc(request: Request) -> JsonResponse:
    """Clean the heaps of both processes once, then leave what stays out of later cleaning."""
    context = context_of(request)
    context.check_available()
    await context.client.control("freeze_gc")
    gc.collect()
    gc.freeze()
    return JsonResponse(AdminAnswer(True, "the heaps are frozen"))


async def tell_loads(request: Request) -> JsonResponse:
    """How busy the engine is."""
    context = context_of(request)
    facts, stats = context.facts(), await current_stats(context)
    load = Load(
        dp_rank=0, num_running_reqs=stats.num_running, num_waiting_reqs=stats.num_queued,
        num_total_reqs=stats.num_running + stats.num_queued,
        num_used_tokens=stats.num_used_pages * facts.page_size, max_total_num_tokens=facts.num_kv_tokens,
        token_usage=stats.num_used_pages / max(1, stats.num_pages),
    )
    return JsonResponse(Loads(time.time(), __version__, 1, [load]))


ENDPOINTS = (
    *(
        Endpoint(
            path=path, methods=("GET", "POST"), handler=flush_cache, tag="admin", doc="Empty the prefix cache.",
            answer=FlushAnswer,
            errors=(400, *ADMIN_ERRORS), is_admin=True,
        )
        for path in ("/flush_cache", "/reset_prefix_cache")
    ),
    Endpoint(
        path="/pause_generation", methods=("POST",), handler=pause_generation, tag="admin", doc="Hold all generation.",
        answer=AdminAnswer,
        errors=(400, 413, 408, *ADMIN_ERRORS), is_admin=True,
    ),
    Endpoint(
        path="/continue_generation", methods=("POST",), handler=continue_generation, tag="admin",
        doc="Go on after a pause.", answer=AdminAnswer,
        errors=ADMIN_ERRORS, is_admin=True,
    ),
    Endpoint(
        path="/freeze_gc", methods=("POST",), handler=freeze_gc, tag="admin",
        doc="Keep what is in memory out of garbage collection.",
        answer=AdminAnswer, errors=ADMIN_ERRORS, is_admin=True,
    ),
    Endpoint(
        path="/v1/loads", handler=tell_loads, tag="control", doc="How busy the engine is.", answer=Loads, errors=(503,)
    ),
)
