"""Ollama's requests as chat requests.

Answers in Ollama's words: `OllamaWriter` for both ways to ask, `OllamaEvents` for their streams, a line each.

``/api/chat``, ``/api/generate``, ``/api/tags``, ``/api/ps``, ``/api/show``, ``/api/version``: Ollama's dialect.
Bodies are taken whatever type they declare: neither Ollama nor its clients declare one.

``/api/embed`` and, as older clients ask, ``/api/embeddings``: texts to vectors in Ollama's dialect."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request

from headrace.base import VERSION
from headrace.base.errors import HeadraceError, RequestError, UnsupportedFeature
from headrace.base.messages import ModelFacts
from headrace.base.pooling import unpack_floats
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.client.pooling import shorten
from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, TextDelta
from headrace.serving.http.generation.chat import AnswerPlan, AnswerReader, prepare_chat
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.generation.logprobs import TokenNames, chat_logprobs
from headrace.serving.http.generation.pooling import (
    check_amount,
    check_dimensions,
    read_all,
    reader_for,
    require_kind,
    tokenize,
)
from headrace.serving.http.generation.run import Generation, collect_generation
from headrace.serving.http.generation.stream import Events, EventStream, start_stream
from headrace.serving.http.protocol.errors import describe_ollama_error
from headrace.serving.http.protocol.fields import MEDIA, JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.ollama import (
    AskedCall,
    AskedFunction,
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaCard,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaList,
    OllamaMessage,
    OllamaModel,
    OllamaOldEmbedRequest,
    OllamaOptions,
    OllamaRequest,
    OllamaRunning,
    OllamaRunningList,
    OllamaShowRequest,
    OllamaVersion,
)
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest, ContentLogprob
from headrace.serving.http.protocol.pooling import ReadFields
from headrace.serving.http.protocol.tools import CallRecord, FunctionCall
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import JsonResponse

LATEST = ":latest"
SAME = ("stop", "seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


def plain_name(model: str) -> str:
    """The model's name without the tag that clients put on names that have none."""
    return model.removesuffix(LATEST)


def _chat_message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        raise UnsupportedFeature(f"{where}.images is not supported: {MEDIA}", param=f"{where}.images")
    calls = [
        CallRecord(
            id=c.id, type="function", function=FunctionCall(name=c.function.name, arguments=c.function.arguments)
        )
        for c in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role, content=message.content if message.content is not None or calls else "",
        reasoning_content=message.thinking or None,
        tool_calls=calls or None, tool_call_id=message.tool_call_id, name=message.tool_name,
    )


def _read_options(chat: ChatRequest, options: OllamaOptions, max_model_len: int) -> None:
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        raise RequestError(
            f"options.num_ctx must be at most {max_model_len}, the server's context; leave it out",
            param="options.num_ctx"
        )
    for name in SAME:
        setattr(chat, name, getattr(options, name))
    chat.repetition_penalty = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        chat.max_completion_tokens = options.num_predict


def _finish(chat: ChatRequest, body: OllamaRequest, max_model_len: int) -> ChatRequest:
    chat.model, chat.stream = plain_name(body.model), body.stream is not False
    if body.options is not None:
        _read_options(chat, body.options, max_model_len)
    chat.logprobs, chat.top_logprobs = body.logprobs, body.top_logprobs
    if body.format == "json":
        chat.response_format = ResponseFormat(type="json_object")
    elif isinstance(body.format, dict):
        chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=body.format))
    if isinstance(body.think, str):
        chat.reasoning_effort = body.think
    else:
        chat.enable_thinking = body.think
    return chat


def read_chat(body: OllamaChatRequest, max_model_len: int) -> ChatRequest | None:
    """The chat request of ``body``; None when there is nothing to answer."""
    if not body.messages:
        return None
    messages = [_chat_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    return _finish(ChatRequest(messages=messages, tools=body.tools or None), body, max_model_len)


def read_generate(body: OllamaGenerateRequest, max_model_len: int) -> ChatRequest | None:
    """The chat request of ``body``; None when there is nothing to answer."""
    if not body.prompt:
        return None
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    return _finish(ChatRequest(messages=[*system, ChatMessage(role="user", content=body.prompt)]), body, max_model_len)


SECOND = 1_000_000_000


def tell_time(seconds: float | None = None) -> str:
    """A moment as RFC 3339; now by default."""
    return (datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)).isoformat()


class OllamaWriter:
    """Words what comes of one answer. Calls are told when they are whole; one that is cut short is left out."""

    def __init__(self, model: str, plan: AnswerPlan | None, names: TokenNames, *, is_chat: bool):
        self._model, self._names = model, names
        self._logprobs: list[ContentLogprob] = []
        self._reader = AnswerReader(plan) if plan is not None else None
        self._is_chat = is_chat
        self._call = AskedCall("", AskedFunction(0, "", msgspec.Raw(b"{}")))
        self._arguments: list[str] = []

    def write(self, news: ChoiceDelta | CompletionOutput) -> OllamaAnswer | None:
        """A line with what ``news`` tell; None when that is nothing yet."""
        content, thinking, calls = self._read(news)
        return self._answer(content, thinking, calls) if content or thinking or calls else None

    def end(self, news: CompletionOutput | None, reason: str | None, generation: Generation | None) -> OllamaAnswer:
        """The last line, with all of the answer if it is told at once, and its counts when something was generated."""
        answer = self._answer(*self._read(news)) if news is not None else self._answer("", "", [])
        answer.done, answer.done_reason = True, reason or "stop"
        if generation is None:
            return answer
        usage, timer = generation.usage(), generation.timers[0]
        total, first = int(timer.elapsed_s * SECOND), int(timer.first_token_s * SECOND)
        answer.total_duration, answer.load_duration = total, 0
        answer.prompt_eval_count, answer.prompt_eval_duration = usage.prompt_tokens, first
        answer.eval_count, answer.eval_duration = usage.completion_tokens, total - first
        return answer

    def _read(self, news: ChoiceDelta | CompletionOutput) -> tuple[str, str, list[AskedCall]]:
        """``(content, thinking, calls)`` of the news."""
        texts: dict[bool, str] = {False: "", True: ""}
        if news.logprobs is not None:
            self._logprobs += chat_logprobs(news.logprobs, self._names).content
        calls = []
        for event in self._reader.read(news) if self._reader is not None else ():
            match event:
                case TextDelta(text, is_reasoning):
                    texts[is_reasoning] += text
                case CallStart(index, call_id, name):
                    self._call, self._arguments = AskedCall(call_id, AskedFunction(index, name, msgspec.Raw(b"{}"))), []
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallEnd(_, True):
                    self._call.function.arguments = msgspec.Raw("".join(self._arguments).encode() or b"{}")
                    calls.append(self._call)
        return texts[False], texts[True], calls

    def _answer(self, content: str, thinking: str, calls: list[AskedCall]) -> OllamaAnswer:
        shown, logprobs = thinking or msgspec.UNSET, self._logprobs or msgspec.UNSET
        self._logprobs = []
        if not self._is_chat:
            return OllamaGenerateAnswer(
                model=self._model, created_at=tell_time(), done=False, response=content, thinking=shown,
                logprobs=logprobs
            )
        message = OllamaAnswerMessage(content, thinking=shown, tool_calls=calls or msgspec.UNSET)
        return OllamaChatAnswer(
            model=self._model, created_at=tell_time(), done=False, message=message, logprobs=logprobs
        )


def _line(answer: object) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


class OllamaEvents(Events):
    """The wording of a stream: news line by line, then a line that is ``done``."""

    media_type = b"application/x-ndjson"
    done = b""

    def __init__(self, writer: OllamaWriter, generation: Generation):
        self._writer = writer
        self._generation = generation
        self._reason: str | None = None

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The line of one delta; nothing when its text must wait."""
        self._reason = delta.finish_reason or self._reason
        answer = self._writer.write(delta)
        return b"" if answer is None else _line(answer)

    def end(self) -> bytes:
        """The last line."""
        return _line(self._writer.end(None, self._reason, self._generation))

    def fail(self, error: HeadraceError) -> bytes:
        """A line with the error."""
        return _line(describe_ollama_error(error))


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
    return JsonResponse(OllamaVersion(VERSION))


ERRORS = (404, 429, 503, 504)

EMBED_BODY = JsonBody(OllamaEmbedRequest, is_lenient=True)
OLD_EMBED_BODY = JsonBody(OllamaOldEmbedRequest, is_lenient=True)


async def _embed(request: Request, body: OllamaEmbedRequest) -> OllamaEmbeddings:
    context, began = context_of(request), time.perf_counter_ns()
    context.check_available()
    context.check_model(plain_name(body.model))
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_amount(len(texts), context.server.max_batch_prompts, "input")
    reader = reader_for(request, None if body.truncate is False else -1)
    readings = await tokenize(lambda: [reader.read(text) for text in texts], texts)
    results = await read_all(request, readings, ReadFields(), "ollama-")
    vectors = [shorten(unpack_floats(packed), body.dimensions) for packed in results.packed]
    return OllamaEmbeddings(body.model, vectors, time.perf_counter_ns() - began, 0, results.usage.prompt_tokens)


async def embed(request: Request) -> JsonResponse:
    """Texts to vectors."""
    return JsonResponse(await _embed(request, await EMBED_BODY.read(request, context_of(request).server.max_body_bytes)))


async def embed_one(request: Request) -> JsonResponse:
    """A text to a vector."""
    body = await OLD_EMBED_BODY.read(request, context_of(request).server.max_body_bytes)
    answer = await _embed(request, OllamaEmbedRequest(model=body.model, input=body.prompt))
    return JsonResponse(OllamaEmbedding(answer.embeddings[0]))


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
    Endpoint(
        path="/api/embed", methods=("POST",), handler=embed, tag="ollama",
        doc="Embeddings of texts, in Ollama's dialect.", body=EMBED_BODY,
        answer=OllamaEmbeddings, errors=ERRORS,
    ),
    Endpoint(
        path="/api/embeddings", methods=("POST",), handler=embed_one, tag="ollama",
        doc="The embedding of a text, as older clients ask for it.",
        body=OLD_EMBED_BODY, answer=OllamaEmbedding, errors=ERRORS,
    ),
)
