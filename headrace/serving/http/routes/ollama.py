"""``/api/chat``, ``/api/generate``, ``/api/tags``, ``/api/ps``, ``/api/show``, ``/api/version``: Ollama's dialect.
Bodies are taken whatever type they declare: neither Ollama nor its clients declare one."""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from headrace import __version__
from headrace.base.errors import RequestError
from headrace.base.messages import ModelFacts
from headrace.serving.http.body import JsonBody
from headrace.serving.http.chatting import prepare_chat
from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.dialects.ollama import plain_name, read_chat, read_generate
from headrace.serving.http.dialects.ollama_answers import OllamaEvents, OllamaWriter, tell_time
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import collect_generation
from headrace.serving.http.logprobs import TokenNames
from headrace.serving.http.protocol.chat import ChatRequest
from headrace.serving.http.protocol.ollama import (
    OllamaCard,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaDetails,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaList,
    OllamaModel,
    OllamaRunning,
    OllamaRunningList,
    OllamaShowRequest,
    OllamaVersion,
)
from headrace.serving.http.stream import EventStream, start_stream

CHAT_BODY = JsonBody(OllamaChatRequest, is_lenient=True)
GENERATE_BODY = JsonBody(OllamaGenerateRequest, is_lenient=True)
SHOW_BODY = JsonBody(OllamaShowRequest, is_lenient=True)
NDJSON = "application/x-ndjson"
FAR_FUTURE = "2318-01-01T00:00:00Z"


async def _answer(
    request: Request, model: str, chat_body: ChatRequest | None, *, is_chat: bool
) -> JsonResponse | EventStream:
    context = context_of(request)
    names = TokenNames(context.client.tokenizer)
    if chat_body is None:
        context.check_available()
        context.check_model(plain_name(model))
        return JsonResponse(OllamaWriter(model, None, names, is_chat=is_chat).end(None, "load", None))
    chat = await prepare_chat(request, context, chat_body, id_prefix="ollama-", fits=True)
    writer = OllamaWriter(model, chat.plan, names, is_chat=is_chat)
    if chat_body.stream:
        return await start_stream(request, chat.ask, lambda g: OllamaEvents(writer, g))
    generation, (output,) = await collect_generation(request, chat.ask)
    (choice,) = output.outputs
    return JsonResponse(writer.end(choice, choice.finish_reason, generation))


async def chat(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await CHAT_BODY.read(request, context.server.max_body_bytes)
    return await _answer(request, body.model, read_chat(body, context.facts().max_model_len), is_chat=True)


async def generate(request: Request) -> JsonResponse | EventStream:
    """Answer a question."""
    context = context_of(request)
    body = await GENERATE_BODY.read(request, context.server.max_body_bytes)
    return await _answer(request, body.model, read_generate(body, context.facts().max_model_len), is_chat=False)


def _details(facts: ModelFacts) -> OllamaDetails:
    return OllamaDetails(facts.family, [facts.family], f"{facts.num_parameters / 1e9:.1f}B", facts.dtype)


def _card(context: AppContext, facts: ModelFacts) -> OllamaCard:
    name, size = context.model_name, sum(line.num_bytes for line in context.client.memory if line.name == "weights")
    return OllamaCard(
        name, name, tell_time(context.created), size, hashlib.sha256(name.encode()).hexdigest(), _details(facts)
    )


async def list_tags(request: Request) -> JsonResponse:
    """The served model."""
    context = context_of(request)
    return JsonResponse(OllamaList([_card(context, context.facts())]))


async def list_running(request: Request) -> JsonResponse:
    """The served model, as one that is loaded and stays so."""
    context = context_of(request)
    facts = context.facts()
    card, size = _card(context, facts), sum(line.num_bytes for line in context.client.memory if line.name != "free")
    is_on_cpu = facts.device == "cpu"
    return JsonResponse(OllamaRunningList([OllamaRunning(
        card.name, card.model, size, card.digest, card.details, expires_at=FAR_FUTURE,
        size_vram=0 if is_on_cpu else size, context_length=facts.max_model_len,
    )]))


async def show(request: Request) -> JsonResponse:
    """Facts of the model."""
    context = context_of(request)
    body = await SHOW_BODY.read(request, context.server.max_body_bytes)
    facts, name = context.facts(), body.model or body.name
    if name is None:
        raise RequestError("model is required", param="model")
    context.check_model(plain_name(name))
    info = {
        "general.architecture": facts.family, "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": facts.max_model_len, f"{facts.family}.vocab_size": facts.vocab_size,
    }
    if facts.pooling is not None:
        return JsonResponse(OllamaModel(_details(facts), info, ["embedding"], tell_time(context.created)))
    formats = context.formats()
    found = {"completion": True, "tools": formats.tools is not None, "thinking": formats.reasoning is not None}
    return JsonResponse(
        OllamaModel(_details(facts), info, [n for n, has in found.items() if has], tell_time(context.created))
    )


async def tell_version(_request: Request) -> JsonResponse:
    """The version."""
    return JsonResponse(OllamaVersion(__version__))


ERRORS = (404, 429, 503, 504)
ENDPOINTS = (
    Endpoint(
        path="/api/chat", methods=("POST",), handler=chat, tag="ollama",
        doc="Answer a conversation, in Ollama's dialect.", body=CHAT_BODY,
        answer=OllamaChatAnswer, event=OllamaChatAnswer, event_media=NDJSON, errors=ERRORS,
    ),
    Endpoint(
        path="/api/generate", methods=("POST",), handler=generate, tag="ollama",
        doc="Answer a question, in Ollama's dialect.", body=GENERATE_BODY,
        answer=OllamaGenerateAnswer, event=OllamaGenerateAnswer, event_media=NDJSON, errors=ERRORS,
    ),
    Endpoint(
        path="/api/tags", handler=list_tags, tag="ollama", doc="List the served models.", answer=OllamaList,
        errors=(503,)
    ),
    Endpoint(
        path="/api/ps", handler=list_running, tag="ollama", doc="List the models in memory.", answer=OllamaRunningList,
        errors=(503,)
    ),
    Endpoint(
        path="/api/show", methods=("POST",), handler=show, tag="ollama", doc="Describe a model.", body=SHOW_BODY,
        answer=OllamaModel, errors=(404, 503)
    ),
    Endpoint(path="/api/version", handler=tell_version, tag="ollama", doc="The version.", answer=OllamaVersion),
)
