"""``/v1/models``."""

from __future__ import annotations

from starlette.requests import Request

from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.protocol.answers import ModelCard, ModelList


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


ENDPOINTS = (
    Endpoint(
        path="/v1/models", handler=list_models, tag="openai", doc="List the served models.", answer=ModelList,
        errors=(503,)
    ),
    Endpoint(
        path="/v1/models/{model:path}", handler=show_model, tag="openai", doc="Describe a model.", answer=ModelCard,
        errors=(404, 503)
    ),
)
