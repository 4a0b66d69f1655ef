"""Routes for operators, under the names of SGLang and vLLM: pause, prefix cache, sleep, weight updates, profiles; and
the load for routers.

All that change anything are guarded by `headrace.serving.http.transport.access.AdminGate`.
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
from headrace.service.client.outputs import ReplicaStatus
from headrace.serving.http.generation.context import AppContext, context_of, read_request
from headrace.serving.http.protocol import admin as wire
from headrace.serving.http.routes.control import current_stats
from headrace.serving.http.transport.endpoint import Endpoint, Handler, JsonBody, Query, post
from headrace.serving.http.transport.errors import JsonResponse

MEMORY_BODY = JsonBody(wire.MemoryRequest, is_optional=True)
UPDATE_BODY = JsonBody(wire.UpdateWeightsRequest, is_optional=True)
PAUSE_BODY = JsonBody(wire.PauseRequest, is_optional=True)
PROFILE_BODY = JsonBody(wire.ProfileRequest, is_optional=True)
SLEEP_MODES: dict[str, SleepMode] = {"refuse": "refuse", "abort": "abort", "wait": "wait"}
PAUSE_MODES = ("abort", "keep")
NO_PROFILES = "profiles need a folder: start the server with --profile-folder"
ADMIN_ERRORS = (401, 403, 415, 503)
CHANGE_ERRORS = (400, 401, 403, 408, 409, 413, 415, 503)


def _done(message: str) -> JsonResponse:
    return JsonResponse(wire.AdminResponse(True, message))


def _check_loaded(context: AppContext) -> None:
    """Raise `EngineUnavailable` unless the engine is loaded, awake or asleep."""
    if context.state != "asleep":
        context.check_available()


def _read_choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    """Read a query parameter that must be one of ``choices``; the first of them is the default."""
    given = request.query_params.get(name, choices[0])
    if given not in choices:
        raise RequestError(f"{name} must be one of {', '.join(choices)}", param=name)
    return given


def _read_tags(request: Request) -> list[DevicePart]:
    tags = request.query_params.getlist("tags")
    if not set(tags) <= set(DEVICE_PARTS):
        raise RequestError(f"tags must be of {', '.join(DEVICE_PARTS)}", param="tags")
    return cast("list[DevicePart]", tags) or list(DEVICE_PARTS)


async def flush_cache(request: Request) -> JsonResponse:
    """Empty the prefix cache; pages of running requests stay."""
    context = context_of(request)
    context.check_available()
    is_empty = await context.client.reset_prefix_cache()
    message = "the prefix cache is empty" if is_empty else "running requests hold pages; retry when they have finished"
    return JsonResponse(wire.AdminResponse(is_empty, message), 200 if is_empty else 400)


async def pause_generation(request: Request) -> JsonResponse:
    """Pause generation (SGLang's name); new requests wait. No body is the same as ``{}``."""
    context, body = await read_request(request, PAUSE_BODY)
    context.check_available()
    # Paused first: otherwise a queued request could start after the others were aborted.
    await context.admin.pause()
    num_aborted = context.abort_all() if body.mode != "in_place" else 0
    return _done(f"generation is paused; {num_aborted} running requests were aborted")


async def pause(request: Request) -> JsonResponse:
    """Pause generation (vLLM's name)."""
    context, mode = context_of(request), _read_choice(request, "mode", PAUSE_MODES)
    context.check_available()
    await context.admin.pause()
    if mode == "abort":
        await context.client.abort(None)
    return _done("generation is paused")


async def resume(request: Request) -> JsonResponse:
    """Continue after a pause."""
    context = context_of(request)
    context.check_available()
    await context.admin.pause(False)
    return _done("generation continues")


async def show_paused(request: Request) -> JsonResponse:
    """Whether generation is paused."""
    return JsonResponse(wire.PauseState(context_of(request).admin.is_paused))


async def freeze_gc(request: Request) -> JsonResponse:
    """Collect garbage in both processes, then exclude the surviving objects from later collections."""
    context = context_of(request)
    context.check_available()
    await context.client.control("freeze_gc")
    gc.collect()
    gc.freeze()  # this process; the engine process did the same in `control`
    return _done("the heaps are frozen")


async def show_loads(request: Request) -> JsonResponse:
    """The load of each replica."""
    context = context_of(request)
    context.facts()
    await current_stats(context)  # of every replica
    loads = [_load(replica) for replica in context.client.statuses if replica.facts is not None]
    return JsonResponse(wire.Loads(time.time(), VERSION, len(loads), loads))


def _load(replica: ReplicaStatus) -> wire.Load:
    stats, facts = replica.stats, replica.facts
    assert facts is not None
    return wire.Load(
        dp_rank=replica.index, num_running_reqs=stats.num_running, num_waiting_reqs=stats.num_queued,
        num_total_reqs=stats.num_running + stats.num_queued,
        num_used_tokens=stats.num_used_pages * facts.page_size, max_total_num_tokens=facts.num_kv_tokens,
        token_usage=stats.num_used_pages / max(1, stats.num_pages),
    )


async def release_memory(request: Request) -> JsonResponse:
    """Free device memory, or the parts in `tags` (SGLang's name). Weights move to host memory."""
    context, body = await read_request(request, MEMORY_BODY)
    _check_loaded(context)
    await context.admin.sleep(body.tags or DEVICE_PARTS)
    return _memory_response(context)


async def resume_memory(request: Request) -> JsonResponse:
    """Reallocate device memory, or the parts in `tags` (SGLang's name)."""
    context, body = await read_request(request, MEMORY_BODY)
    _check_loaded(context)
    await context.admin.wake(body.tags or DEVICE_PARTS)
    return _memory_response(context)


async def sleep(request: Request) -> JsonResponse:
    """Free all device memory (vLLM's name). Level 1 keeps the weights in host memory, level 2 reads them again on
    wake-up."""
    context = context_of(request)
    level, mode = _read_choice(request, "level", ("1", "2")), _read_choice(request, "mode", tuple(SLEEP_MODES))
    _check_loaded(context)
    await context.admin.sleep(DEVICE_PARTS, discards_weights=level == "2", mode=SLEEP_MODES[mode])
    return _memory_response(context)


async def wake_up(request: Request) -> JsonResponse:
    """Reallocate all device memory, or the parts in ``tags`` (vLLM's name). Graphs come back with the last part that
    they need: clients of vLLM ask for ``weights``, then for ``kv_cache``, and for nothing else."""
    context, tags = context_of(request), _read_tags(request)
    _check_loaded(context)
    await context.admin.wake(sorted({*tags, "cuda_graph"}))
    return _memory_response(context)


def _memory_response(context: AppContext) -> JsonResponse:
    return _done("the engine sleeps" if context.admin.is_asleep else "the engine is awake")


async def show_sleeping(request: Request) -> JsonResponse:
    """Whether the engine sleeps."""
    return JsonResponse(wire.SleepState(context_of(request).admin.is_asleep))


async def update_weights(request: Request) -> JsonResponse:
    """Serve the weights of another checkpoint with the same shapes; running requests continue with them."""
    context, body = await read_request(request, UPDATE_BODY)
    if body.flush_cache is False:
        raise RequestError("flush_cache must be true: cached values belong to the old weights", param="flush_cache")
    model = _find_model(context, body.model_path)
    _check_loaded(context)
    if body.abort_all_requests:
        await context.client.abort(None)
    # Another path may have another checkpoint format, so it is detected again.
    same_format = context.client.config.model.load_format if body.model_path is None else "auto"
    try:
        num_kept = await context.admin.replace_weights(
            model, load_format=body.load_format or same_format, version=body.weight_version
        )
    except (ModelError, ConfigError) as error:
        raise RequestError(
            f"the weights were not replaced: {_without_paths(context, error.message, model)}", param="model_path"
        ) from error
    # SGLang's name: requests that wait during the update and then continue.
    num_paused = 0 if body.abort_all_requests else num_kept
    return JsonResponse(wire.UpdateWeightsResponse(True, "the weights were replaced", num_paused))


def _find_model(context: AppContext, path: str | None) -> str:
    """The model to read: the served one, or a path inside ``weights_root``. Errors reveal nothing about other paths."""
    served, root = context.client.config.model.model, context.operations.weights_root
    if path is None or path == served:
        return served
    if root is None or "\0" in path:
        raise RequestError(
            "only the served model's own files can be read again: the server was started without --weights-root",
            param="model_path"
        )
    inside = os.path.realpath(root)
    wanted = os.path.realpath(os.path.join(inside, path))  # resolved first: neither .. nor symlinks lead outside
    if os.path.commonpath([inside, wanted]) != inside:
        raise RequestError("model_path must be inside the folder of --weights-root", param="model_path")
    return wanted


def _without_paths(context: AppContext, message: str, model: str) -> str:
    """The message without paths of this machine: clients may be on other machines."""
    root = context.operations.weights_root
    for path, name in ((model, os.path.basename(model)), (root and os.path.realpath(root), "--weights-root")):
        message = message.replace(path, name) if path else message
    return message


async def start_profile(request: Request) -> JsonResponse:
    """Record a trace of the engine into the folder of ``--profile-folder``."""
    context, body = await read_request(request, PROFILE_BODY)
    folder = context.operations.profile_folder
    if folder is None:
        raise RequestError(NO_PROFILES, param="profile_folder")
    context.check_available()
    await context.admin.start_profile(StartProfile(
        os.path.abspath(folder), num_steps=body.num_steps, has_stacks=bool(body.with_stack),
        has_shapes=bool(body.record_shapes),
        # SGLang says GPU, torch says CUDA.
        has_device=body.activities is None or bool({"GPU", "CUDA"} & set(body.activities)),
    ))
    return _done("a profile is being recorded")


async def stop_profile(request: Request) -> JsonResponse:
    """Write the trace."""
    context = context_of(request)
    if context.operations.profile_folder is None:
        raise RequestError(NO_PROFILES, param="profile_folder")
    context.check_available()
    return _done(f"written: {await context.admin.stop_profile()}")


def _admin(
    path: str, handler: Handler, *, response: type = wire.AdminResponse, query: Query | None = None,
    errors: tuple[int, ...] = CHANGE_ERRORS,
) -> Endpoint:
    return post(path, handler, "admin", response, query=query, errors=errors, is_admin=True)


LEVEL, TAGS = {"type": "string", "enum": ["1", "2"]}, {"type": "string", "enum": list(DEVICE_PARTS)}
SLEEP_QUERY: Query = {"level": LEVEL, "mode": {"type": "string", "enum": list(SLEEP_MODES)}}
PAUSE_QUERY: Query = {"mode": {"type": "string", "enum": list(PAUSE_MODES)}}
ENDPOINTS = (
    Endpoint(
        "/flush_cache", flush_cache, "admin", wire.AdminResponse, methods=("GET", "POST"), errors=(400, *ADMIN_ERRORS),
        is_admin=True, aliases=("/reset_prefix_cache",)
    ),
    _admin("/pause_generation", pause_generation, errors=(400, 413, 408, *ADMIN_ERRORS)),
    _admin("/continue_generation", resume, errors=ADMIN_ERRORS),
    _admin("/freeze_gc", freeze_gc, errors=ADMIN_ERRORS),
    Endpoint("/v1/loads", show_loads, "control", wire.Loads, errors=(503,)),
    _admin("/release_memory_occupation", release_memory),
    _admin("/resume_memory_occupation", resume_memory),
    _admin("/sleep", sleep, query=SLEEP_QUERY),
    _admin("/wake_up", wake_up, query={"tags": TAGS}),
    Endpoint("/is_sleeping", show_sleeping, "control", wire.SleepState),
    _admin("/pause", pause, query=PAUSE_QUERY),
    _admin("/resume", resume),
    Endpoint("/is_paused", show_paused, "control", wire.PauseState),
    _admin("/update_weights_from_disk", update_weights, response=wire.UpdateWeightsResponse),
    _admin("/start_profile", start_profile),
    _admin("/stop_profile", stop_profile),
)
