"""Routes that load and unload LoRA adapters, under the names of vLLM and SGLang. All are guarded by `AdminGate`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from headrace.base.adapters import AdapterInfo
from headrace.serving.http.generation.context import context_of, read_request
from headrace.serving.http.protocol import adapters as wire
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

LOAD_BODY = JsonBody(wire.LoadAdapterRequest, is_optional=True)
UNLOAD_BODY = JsonBody(wire.UnloadAdapterRequest, is_optional=True)
TENSORS_BODY = JsonBody(wire.LoadTensorsRequest, is_optional=True)
LOAD_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 503)


async def load(request: Request) -> JsonResponse:
    """Load a LoRA adapter from one of the allowed folders."""
    context, body = await read_request(request, LOAD_BODY)
    context.check_available()
    info = await context.adapters.load(
        body.lora_name, body.lora_path, own_names=context.own_names, is_pinned=bool(body.pinned),
        replaces=bool(body.load_inplace),
    )
    return _loaded(info)


async def load_tensors(request: Request) -> JsonResponse:
    """Load a LoRA adapter from its content."""
    context, body = await read_request(request, TENSORS_BODY)
    context.check_available()
    config = msgspec.json.encode(body.config_dict).decode()
    info = await context.adapters.load_tensors(
        body.lora_name, body.tensors, config, own_names=context.own_names, is_pinned=bool(body.pinned),
        replaces=bool(body.load_inplace),
    )
    return _loaded(info)


def _loaded(info: AdapterInfo) -> JsonResponse:
    message = f"LoRA adapter {info.name!r} is loaded: rank {info.rank}, {info.num_bytes / 1e6:.1f} MB"
    return JsonResponse(wire.AdapterResponse(True, message, info))


async def unload(request: Request) -> JsonResponse:
    """Unload a LoRA adapter: new requests for it are refused, and it is freed when those that run have ended."""
    context, body = await read_request(request, UNLOAD_BODY)
    context.check_available()
    info = await context.adapters.unload(body.lora_name)
    waits = f", when its {info.num_requests} requests have ended" if info.num_requests else ""
    return JsonResponse(wire.AdapterResponse(True, f"LoRA adapter {info.name!r} is unloaded{waits}", info))


async def show(request: Request) -> JsonResponse:
    """List the loaded LoRA adapters."""
    context = context_of(request)
    context.check_available()
    return JsonResponse(wire.AdapterList(await context.adapters.describe()))


ENDPOINTS = (
    post(
        "/v1/load_lora_adapter", load, "admin", wire.AdapterResponse, body=LOAD_BODY, errors=LOAD_ERRORS, is_admin=True,
        aliases=("/load_lora_adapter",)
    ),
    post(
        "/v1/load_lora_adapter_from_tensors", load_tensors, "admin", wire.AdapterResponse, body=TENSORS_BODY,
        errors=LOAD_ERRORS, is_admin=True, aliases=("/load_lora_adapter_from_tensors",)
    ),
    post(
        "/v1/unload_lora_adapter", unload, "admin", wire.AdapterResponse, body=UNLOAD_BODY, errors=LOAD_ERRORS,
        is_admin=True, aliases=("/unload_lora_adapter",)
    ),
    Endpoint(
        "/v1/lora_adapters", show, "admin", wire.AdapterList, methods=("GET", "POST"), errors=(400, 401, 403, 415, 503),
        is_admin=True
    ),
)
