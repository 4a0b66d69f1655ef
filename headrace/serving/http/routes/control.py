"""SGLang's control routes: abort requests, server and model information."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request

from headrace import __version__
from headrace.base.config import flatten
from headrace.base.errors import RequestError
from headrace.serving.http.body import JsonBody
from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.protocol.native import AbortAnswer, AbortRequest, ModelInfo, ServerInfo
from headrace.serving.http.routes.health import current_stats

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
        version=__version__, state=context.state, served_model_name=context.model_name,
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
        weight_version=context.upkeep.weight_version,
    ))


ENDPOINTS = (
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
