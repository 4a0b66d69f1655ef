"""Routes that change what the engine has: its memory, its weights, its pace, and a profile of it; SGLang's and vLLM's
names.

All that change anything are closed to strangers (`headrace.serving.http.access.AdminGate`).


Routes for those who run the server: hold all generation, empty the cache, freeze the heap; and the load, for
routers.

All but the load are closed to strangers (`headrace.serving.http.access.AdminGate`).
"""

from __future__ import annotations

import gc
import os
import time
from typing import cast

from starlette.requests import Request

from headrace.base import VERSION
from headrace.base.admin import DEVICE_PARTS, DevicePart, StartProfile
from headrace.base.errors import ConfigError, ModelError, RequestError
from headrace.service.client.admin import SleepMode
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.protocol.admin import (
    AdminAnswer,
    FlushAnswer,
    Load,
    Loads,
    MemoryRequest,
    PauseRequest,
    PauseState,
    ProfileRequest,
    SleepState,
    UpdateAnswer,
    UpdateWeightsRequest,
)
from headrace.serving.http.routes.control import current_stats
from headrace.serving.http.transport.endpoint import Endpoint, Handler, JsonBody
from headrace.serving.http.transport.errors import JsonResponse

MEMORY_BODY, UPDATE_BODY, PROFILE_BODY = (
    JsonBody(MemoryRequest), JsonBody(UpdateWeightsRequest), JsonBody(ProfileRequest)
)
SLEEP_MODES: dict[str, SleepMode] = {"refuse": "refuse", "abort": "abort", "wait": "wait"}
PAUSE_MODES = ("abort", "keep")
CHANGE_ERRORS = (400, 401, 403, 408, 409, 413, 503)


def _check_running(context: AppContext) -> None:
    """Raise `EngineUnavailable` when there is no loaded engine, awake or asleep."""
    if context.state != "asleep":
        context.check_available()


def _read_choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    """A query parameter that takes few values; the first is the default."""
    given = request.query_params.get(name, choices[0])
    if given not in choices:
        raise RequestError(f"{name} must be one of {', '.join(choices)}", param=name)
    return given


def _read_tags(request: Request) -> list[DevicePart]:
    tags = request.query_params.getlist("tags")
    unknown = [tag for tag in tags if tag not in DEVICE_PARTS]
    if unknown:
        raise RequestError(f"tags must be of {', '.join(DEVICE_PARTS)}", param="tags")
    return cast("list[DevicePart]", tags) or list(DEVICE_PARTS)


def _memory_handler(*, is_release: bool) -> Handler:
    """Give memory back, or take it again (SGLang's names). Weights move to host memory."""

    async def change(request: Request) -> JsonResponse:
        context = context_of(request)
        body = await MEMORY_BODY.read_optional(request, context.server.max_body_bytes)
        _check_running(context)
        await (context.admin.sleep if is_release else context.admin.wake)(body.tags or DEVICE_PARTS)
        return _tell_memory(context)

    return change


async def sleep(request: Request) -> JsonResponse:
    """Give all memory back (vLLM's name). Level 1 keeps the weights in host memory, level 2 reads them again at the
    end."""
    context = context_of(request)
    level, mode = _read_choice(request, "level", ("1", "2")), _read_choice(request, "mode", tuple(SLEEP_MODES))
    _check_running(context)
    await context.admin.sleep(DEVICE_PARTS, discards_weights=level == "2", mode=SLEEP_MODES[mode])
    return _tell_memory(context)


async def wake_up(request: Request) -> JsonResponse:
    """Take all memory again, or what ``tags`` name (vLLM's name)."""
    context, tags = context_of(request), _read_tags(request)
    _check_running(context)
    await context.admin.wake(tags)
    return _tell_memory(context)


def _tell_memory(context: AppContext) -> JsonResponse:
    return JsonResponse(AdminAnswer(True, "the engine sleeps" if context.admin.is_asleep else "the engine is awake"))


async def tell_sleeping(request: Request) -> JsonResponse:
    """Whether the engine sleeps."""
    return JsonResponse(SleepState(context_of(request).admin.is_asleep))


async def pause(request: Request) -> JsonResponse:
    """Hold all generation (vLLM's name)."""
    context, mode = context_of(request), _read_choice(request, "mode", PAUSE_MODES)
    context.check_available()
    await context.admin.pause()
    if mode == "abort":
        await context.client.abort(None)
    return JsonResponse(AdminAnswer(True, "generation is paused"))


async def resume(request: Request) -> JsonResponse:
    """Go on after a pause (vLLM's name)."""
    context = context_of(request)
    context.check_available()
    await context.admin.pause(False)
    return JsonResponse(AdminAnswer(True, "generation goes on"))


async def tell_paused(request: Request) -> JsonResponse:
    """Whether generation is held."""
    return JsonResponse(PauseState(context_of(request).admin.is_paused))


async def update_weights(request: Request) -> JsonResponse:
    """Serve the weights of another checkpoint of the same shapes; running requests go on with them."""
    context = context_of(request)
    body = await UPDATE_BODY.read_optional(request, context.server.max_body_bytes)
    if body.flush_cache is False:
        raise RequestError(
            "flush_cache must be true: what was cached was computed with other weights", param="flush_cache"
        )
    model = _find_model(context, body.model_path)
    _check_running(context)
    if body.abort_all_requests:
        await context.client.abort(None)
    same_format = context.client.config.model.load_format if body.model_path is None else "auto"
    try:
        num_kept = await context.admin.replace_weights(
            model, load_format=body.load_format or same_format, version=body.weight_version
        )
    except (ModelError, ConfigError) as error:
        raise RequestError(
            f"the weights were not replaced: {_without_paths(context, error.message, model)}", param="model_path"
        ) from error
    return JsonResponse(UpdateAnswer(True, "the weights were replaced", 0 if body.abort_all_requests else num_kept))


def _find_model(context: AppContext, path: str | None) -> str:
    """The model to read, which must be the served one or lie in ``weights_root``; nothing is told of what lies
    elsewhere."""
    served, root = context.client.config.model.model, context.operations.weights_root
    if path is None or path == served:
        return served
    if root is None or "\0" in path:
        raise RequestError(
            "only the served model's own files can be read again: the server was started without --weights-root",
            param="model_path"
        )
    inside = os.path.realpath(root)
    wanted = os.path.realpath(os.path.join(inside, path))
    if os.path.commonpath([inside, wanted]) != inside:
        raise RequestError("model_path must lie in the folder that --weights-root names", param="model_path")
    return wanted


def _without_paths(context: AppContext, message: str, model: str) -> str:
    """What a client may hear of an error of reading a model."""
    root = context.operations.weights_root
    for path, name in ((model, os.path.basename(model)), (root and os.path.realpath(root), "--weights-root")):
        message = message.replace(path, name) if path else message
    return message


async def start_profile(request: Request) -> JsonResponse:
    """Record a trace of the engine, into the folder that the server was started with."""
    context = context_of(request)
    body = await PROFILE_BODY.read_optional(request, context.server.max_body_bytes)
    folder = context.operations.profile_folder
    if folder is None:
        raise RequestError(
            "there is no folder for profiles: start the server with --profile-folder", param="profile_folder"
        )
    context.check_available()
    await context.admin.start_profile(StartProfile(
        os.path.abspath(folder), num_steps=body.num_steps, has_stacks=bool(body.with_stack),
        has_shapes=bool(body.record_shapes),
        has_device=body.activities is None or bool({"GPU", "CUDA"} & set(body.activities)),
    ))
    return JsonResponse(AdminAnswer(True, "a profile is being recorded"))


async def stop_profile(request: Request) -> JsonResponse:
    """Write the trace."""
    context = context_of(request)
    if context.operations.profile_folder is None:
        raise RequestError(
            "there is no folder for profiles: start the server with --profile-folder", param="profile_folder"
        )
    context.check_available()
    return JsonResponse(AdminAnswer(True, f"written: {await context.admin.stop_profile()}"))


def _admin(
    path: str, handler: Handler, doc: str, *, answer: type = AdminAnswer,
    query: dict[str, dict[str, object]] | None = None
) -> Endpoint:
    return Endpoint(
        path=path, methods=("POST",), handler=handler, tag="admin", doc=doc, answer=answer, query=query,
        errors=CHANGE_ERRORS, is_admin=True
    )


_LEVEL, _TAGS = {"type": "string", "enum": ["1", "2"]}, {"type": "string", "enum": list(DEVICE_PARTS)}

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
    await context.admin.pause()
    num_ended = sum(context.abort(request_id) for request_id in list(context.running)) if mode != "in_place" else 0
    return JsonResponse(AdminAnswer(True, f"generation is paused; {num_ended} running requests were ended"))


async def continue_generation(request: Request) -> JsonResponse:
    """Go on after a pause."""
    context = context_of(request)
    context.check_available()
    await context.admin.pause(False)
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
    return JsonResponse(Loads(time.time(), VERSION, 1, [load]))


ENDPOINTS = (
    _admin("/release_memory_occupation", _memory_handler(is_release=True), "Give device memory back."),
    _admin("/resume_memory_occupation", _memory_handler(is_release=False), "Take device memory again."),
    _admin(
        "/sleep", sleep, "Give all device memory back.",
        query={"level": _LEVEL, "mode": {"type": "string", "enum": list(SLEEP_MODES)}}
    ),
    _admin("/wake_up", wake_up, "Take device memory again.", query={"tags": _TAGS}),
    Endpoint(
        path="/is_sleeping", handler=tell_sleeping, tag="control", doc="Whether the engine sleeps.", answer=SleepState
    ),
    _admin("/pause", pause, "Hold all generation.", query={"mode": {"type": "string", "enum": list(PAUSE_MODES)}}),
    _admin("/resume", resume, "Go on after a pause."),
    Endpoint(
        path="/is_paused", handler=tell_paused, tag="control", doc="Whether generation is held.", answer=PauseState
    ),
    _admin("/update_weights_from_disk", update_weights, "Serve other weights of the same shapes.", answer=UpdateAnswer),
    _admin("/start_profile", start_profile, "Record a profile of the engine."),
    _admin("/stop_profile", stop_profile, "Write the profile."),
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
