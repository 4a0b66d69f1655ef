"""``/api/...``, Ollama's API: requests converted to `ChatRequest`, responses by `OllamaWriter`, streams of one line
each by `OllamaEvents`. Bodies of any declared type are accepted: neither Ollama nor its clients declare one."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request

from headrace.base import VERSION
from headrace.base.errors import HeadraceError, RequestError
from headrace.base.media import as_data_uri
from headrace.base.messages import ModelFacts
from headrace.base.pooling import unpack_floats
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.client.pooling import check_dimensions, shorten
from headrace.service.parsing.events import TextDelta
from headrace.serving.http.generation.chat import OutputPlan, OutputReader, prepare_chat
from headrace.serving.http.generation.context import AppContext, compute, context_of, read_request
from headrace.serving.http.generation.logprobs import TokenNames, chat_logprobs
from headrace.serving.http.generation.pooling import check_amount, encoder_for, require_kind, run_pooling, tokenize
from headrace.serving.http.generation.run import Generation, collect_generation
from headrace.serving.http.generation.stream import Events, EventStream, start_stream
from headrace.serving.http.protocol import ollama as wire
from headrace.serving.http.protocol.errors import describe_ollama_error
from headrace.serving.http.protocol.fields import JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.media import ContentPart, PlacedImage, TextPart
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest, ContentLogprob
from headrace.serving.http.protocol.pooling import PoolingFields
from headrace.serving.http.protocol.tools import AnyTool, Tool
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, Endpoint, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

OPTIONS = ("options", wire.OllamaOptions)
CHAT_BODY = JsonBody(wire.OllamaChatRequest, nested=OPTIONS, takes_any_type=True)
GENERATE_BODY = JsonBody(wire.OllamaGenerateRequest, nested=OPTIONS, takes_any_type=True)
SHOW_BODY = JsonBody(wire.OllamaShowRequest, takes_any_type=True)
EMBED_BODY = JsonBody(wire.OllamaEmbedRequest, nested=OPTIONS, takes_any_type=True)
LEGACY_EMBED_BODY = JsonBody(wire.OllamaLegacyEmbedRequest, nested=OPTIONS, takes_any_type=True)
FIELD_NAMES = {"max_tokens": "options.num_predict"}
SECOND = 1_000_000_000
NDJSON = "application/x-ndjson"
FAR_FUTURE = "2318-01-01T00:00:00Z"
"""When the model is unloaded: never, which Ollama reports as a time about 292 years ahead (Go's longest duration)."""


def plain_name(model: str) -> str:
    """The model's name without ``:latest``, which Ollama's clients append to names without a tag."""
    return model.removesuffix(":latest")


def format_time(seconds: float | None = None) -> str:
    """A time as RFC 3339; default: now."""
    return (datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)).isoformat()


def _chat_message(message: wire.OllamaMessage, where: str) -> ChatMessage:
    # Ollama's clients may leave out the content; `ChatRequest` requires it of all roles but the assistant.
    content = message.content if message.content is not None or message.tool_calls else ""
    return ChatMessage(
        role=message.role, content=_with_images(content, message.images, where),
        reasoning_content=message.thinking or None, tool_calls=message.tool_calls or None,
        tool_call_id=message.tool_call_id, name=message.tool_name,
    )


def _with_images(text: str | None, images: list[str] | None, where: str) -> str | list[ContentPart] | None:
    """A message's content: its images first, as Ollama's templates have it."""
    if not images:
        return text
    parts: list[ContentPart] = [
        PlacedImage(image_url=as_data_uri(image), param=f"{where}images[{i}]") for i, image in enumerate(images)
    ]
    return [*parts, TextPart(text=text)] if text else parts


def _set_options(chat: ChatRequest, options: wire.OllamaOptions, max_model_len: int) -> None:
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        raise RequestError(
            f"options.num_ctx must be at most {max_model_len}, the server's context; leave it out",
            param="options.num_ctx"
        )
    chat.stop, chat.seed = options.stop, options.seed
    chat.temperature, chat.top_k, chat.top_p, chat.min_p = (
        options.temperature, options.top_k, options.top_p, options.min_p
    )
    chat.presence_penalty, chat.frequency_penalty = options.presence_penalty, options.frequency_penalty
    chat.repetition_penalty = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:  # 0 or less: no limit
        chat.max_completion_tokens = options.num_predict


def _set_common(chat: ChatRequest, body: wire.OllamaRequest, max_model_len: int) -> ChatRequest:
    chat.model, chat.stream = plain_name(body.model), body.stream is not False
    if body.options is not None:
        _set_options(chat, body.options, max_model_len)
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


def convert_chat(body: wire.OllamaChatRequest, max_model_len: int) -> ChatRequest | None:
    """The chat request of ``body``; None without messages."""
    if not body.messages:
        return None
    messages = [_chat_message(m, f"messages[{i}].") for i, m in enumerate(body.messages)]
    tools: list[AnyTool] = [Tool(function=tool.function) for tool in body.tools or ()]
    return _set_common(ChatRequest(messages=messages, tools=tools or None), body, max_model_len)


def convert_generate(body: wire.OllamaGenerateRequest, max_model_len: int) -> ChatRequest | None:
    """The chat request of ``body``; None without a prompt."""
    if not body.prompt:
        return None
    messages = [ChatMessage(role="system", content=body.system)] if body.system else []
    messages.append(ChatMessage(role="user", content=_with_images(body.prompt, body.images, "")))
    return _set_common(ChatRequest(messages=messages), body, max_model_len)


class OllamaWriter:
    """Writes one response. Calls are written when they are complete; incomplete ones are dropped."""

    def __init__(self, model: str, plan: OutputPlan | None, names: TokenNames, *, is_chat: bool):
        self._model, self._names = model, names
        self._logprobs: list[ContentLogprob] = []
        self._reader = OutputReader(plan) if plan is not None else None
        self._is_chat = is_chat
        self._num_calls = 0

    def write(self, delta: ChoiceDelta) -> wire.OllamaResponse | None:
        """A line with the new parts; None if there are none yet."""
        content, thinking, calls = self._read(delta)
        return self._line(content, thinking, calls) if content or thinking or calls else None

    def end(
        self, output: CompletionOutput | None, reason: str | None, generation: Generation | None
    ) -> wire.OllamaResponse:
        """The last line, with all of ``output`` if nothing was streamed, and the counts of ``generation``."""
        line = self._line(*self._read(output)) if output is not None else self._line("", "", [])
        line.done, line.done_reason = True, reason or "stop"
        if generation is None:
            return line
        usage, timer = generation.usage(), generation.timers[0]
        total, first = int(timer.elapsed_s * SECOND), int(timer.first_token_s * SECOND)
        line.total_duration, line.load_duration = total, 0  # nanoseconds; the model is always loaded
        # the time to the first token, so queueing is included
        line.prompt_eval_count, line.prompt_eval_duration = usage.prompt_tokens, first
        line.eval_count, line.eval_duration = usage.completion_tokens, total - first
        return line

    def _read(self, delta: ChoiceDelta | CompletionOutput) -> tuple[str, str, list[wire.OllamaResponseCall]]:
        """``(content, thinking, calls)`` of a delta or of a whole output."""
        texts: dict[bool, str] = {False: "", True: ""}  # by whether it is reasoning
        if delta.logprobs is not None:
            self._logprobs += chat_logprobs(delta.logprobs, self._names).content
        calls = []
        for part in self._reader.read_whole(delta) if self._reader is not None else ():
            if isinstance(part, TextDelta):
                texts[part.is_reasoning] += part.text
            else:
                arguments = msgspec.Raw(part.arguments.encode())
                function = wire.OllamaResponseFunction(self._num_calls, part.name, arguments)
                calls.append(wire.OllamaResponseCall(part.call_id, function))
                self._num_calls += 1
        return texts[False], texts[True], calls

    def _line(self, content: str, reasoning: str, calls: list[wire.OllamaResponseCall]) -> wire.OllamaResponse:
        thinking, logprobs = reasoning or msgspec.UNSET, self._logprobs or msgspec.UNSET
        self._logprobs = []
        if not self._is_chat:
            return wire.OllamaGenerateResponse(
                model=self._model, created_at=format_time(), done=False, response=content, thinking=thinking,
                logprobs=logprobs
            )
        message = wire.OllamaResponseMessage(content, thinking=thinking, tool_calls=calls or msgspec.UNSET)
        return wire.OllamaChatResponse(
            model=self._model, created_at=format_time(), done=False, message=message, logprobs=logprobs
        )


def _encode_line(line: object) -> bytes:
    return msgspec.json.encode(line) + b"\n"


class OllamaEvents(Events):
    """Stream of lines, the last of which is ``done``."""

    media_type = NDJSON.encode()
    done = b""

    def __init__(self, writer: OllamaWriter, generation: Generation):
        self._writer = writer
        self._generation = generation
        self._reason: str | None = None

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The line of one delta; nothing while its text is held back."""
        self._reason = delta.finish_reason or self._reason
        line = self._writer.write(delta)
        return b"" if line is None else _encode_line(line)

    def end(self) -> bytes:
        """The last line."""
        return _encode_line(self._writer.end(None, self._reason, self._generation))

    def fail(self, error: HeadraceError) -> bytes:
        """A line with the error."""
        return _encode_line(describe_ollama_error(error))


async def _respond(
    request: Request, model: str, body: ChatRequest | None, *, is_chat: bool
) -> JsonResponse | EventStream:
    context = context_of(request)
    names = TokenNames(context.client.tokenizer)
    if body is None:  # the client checks that the model is loaded
        context.check_request(plain_name(model))
        return JsonResponse(OllamaWriter(model, None, names, is_chat=is_chat).end(None, "load", None))
    chat = await prepare_chat(request, context, body, id_prefix="ollama-", fits=True, field_names=FIELD_NAMES)
    writer = OllamaWriter(model, chat.plan, names, is_chat=is_chat)
    if body.stream:
        return await start_stream(request, chat.request, lambda g: OllamaEvents(writer, g))
    generation, (output,) = await collect_generation(request, chat.request)
    (choice,) = output.outputs
    return JsonResponse(writer.end(choice, choice.finish_reason, generation))


async def chat(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation (Ollama's API)."""
    context, body = await read_request(request, CHAT_BODY)
    converted = await compute(request, lambda: convert_chat(body, context.facts().max_model_len))
    return await _respond(request, body.model, converted, is_chat=True)


async def generate(request: Request) -> JsonResponse | EventStream:
    """Answer a prompt (Ollama's API)."""
    context, body = await read_request(request, GENERATE_BODY)
    return await _respond(request, body.model, convert_generate(body, context.facts().max_model_len), is_chat=False)


def _details(facts: ModelFacts) -> wire.OllamaDetails:
    return wire.OllamaDetails(facts.family, [facts.family], f"{facts.num_parameters / 1e9:.1f}B", facts.dtype)


def _cards(context: AppContext, facts: ModelFacts) -> list[wire.OllamaCard]:
    """The served model under each of its names, and its adapters."""
    return [_card(context, facts, name) for name in (*context.model_names, *context.adapters.names)]


def _card(context: AppContext, facts: ModelFacts, name: str) -> wire.OllamaCard:
    size = sum(line.num_bytes for line in context.client.memory if line.name == "weights")
    # Clients compare digests to find out whether a model has changed; the weights are not hashed.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return wire.OllamaCard(name, name, format_time(context.created), size, digest, _details(facts))


async def list_tags(request: Request) -> JsonResponse:
    """List the served model and its adapters."""
    context = context_of(request)
    return JsonResponse(wire.OllamaList(_cards(context, context.facts())))


async def list_running(request: Request) -> JsonResponse:
    """List the loaded models: the served one and its adapters, which stay loaded."""
    context = context_of(request)
    facts = context.facts()
    size = sum(line.num_bytes for line in context.client.memory if line.name != "free")
    return JsonResponse(wire.OllamaRunningList([
        wire.OllamaRunning(
            card.name, card.model, size, card.digest, card.details, expires_at=FAR_FUTURE,
            size_vram=0 if facts.device == "cpu" else size, context_length=facts.max_model_len,
        )
        for card in _cards(context, facts)
    ]))


async def show(request: Request) -> JsonResponse:
    """Describe a model."""
    context, body = await read_request(request, SHOW_BODY)
    facts, name = context.facts(), body.model or body.name
    if name is None:
        raise RequestError("model is required", param="model")
    context.check_model(plain_name(name))
    info = {
        "general.architecture": facts.family, "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": facts.max_model_len, f"{facts.family}.vocab_size": facts.vocab_size,
    }
    capabilities = ["embedding"]
    if facts.pooling is None:
        formats = context.formats()
        has_images = facts.media is not None and "image" in facts.media.kinds
        found = {
            "completion": True, "vision": has_images, "tools": formats.tools is not None,
            "thinking": formats.reasoning is not None
        }
        capabilities = [name for name, has in found.items() if has]
    return JsonResponse(wire.OllamaModel(_details(facts), info, capabilities, format_time(context.created)))


async def show_version(_request: Request) -> JsonResponse:
    """The version."""
    return JsonResponse(wire.OllamaVersion(VERSION))


async def _embed(request: Request, body: wire.OllamaEmbedRequest) -> wire.OllamaEmbeddings:
    context, began = context_of(request), time.perf_counter_ns()
    context.check_request(plain_name(body.model))
    check_dimensions(body.dimensions, require_kind(context.facts(), "embed").width)
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_amount(len(texts), context.server.max_batch_prompts, "input")
    encoder = encoder_for(request, None if body.truncate is False else -1)
    inputs = await tokenize(request, lambda: [encoder.encode(text) for text in texts], texts)
    outputs = await run_pooling(request, inputs, PoolingFields(model=plain_name(body.model)), "ollama-")
    vectors = [shorten(unpack_floats(packed), body.dimensions) for packed in outputs.packed]
    return wire.OllamaEmbeddings(body.model, vectors, time.perf_counter_ns() - began, 0, outputs.usage.prompt_tokens)


async def embed(request: Request) -> JsonResponse:
    """Embeddings of texts (Ollama's API)."""
    _, body = await read_request(request, EMBED_BODY)
    return JsonResponse(await _embed(request, body))


async def embed_one(request: Request) -> JsonResponse:
    """The embedding of one text (older Ollama clients)."""
    _, body = await read_request(request, LEGACY_EMBED_BODY)
    result = await _embed(request, wire.OllamaEmbedRequest(model=body.model, input=body.prompt))
    return JsonResponse(wire.OllamaEmbedding(result.embeddings[0]))


ENDPOINTS = (
    post(
        "/api/chat", chat, "ollama", wire.OllamaChatResponse, body=CHAT_BODY, event=wire.OllamaChatResponse,
        event_media=NDJSON, errors=GENERATION_ERRORS
    ),
    post(
        "/api/generate", generate, "ollama", wire.OllamaGenerateResponse, body=GENERATE_BODY,
        event=wire.OllamaGenerateResponse, event_media=NDJSON, errors=GENERATION_ERRORS
    ),
    Endpoint("/api/tags", list_tags, "ollama", wire.OllamaList, errors=(503,)),
    Endpoint("/api/ps", list_running, "ollama", wire.OllamaRunningList, errors=(503,)),
    post("/api/show", show, "ollama", wire.OllamaModel, body=SHOW_BODY, errors=(404, 503)),
    Endpoint("/api/version", show_version, "ollama", wire.OllamaVersion),
    post("/api/embed", embed, "ollama", wire.OllamaEmbeddings, body=EMBED_BODY, errors=GENERATION_ERRORS),
    post(
        "/api/embeddings", embed_one, "ollama", wire.OllamaEmbedding, body=LEGACY_EMBED_BODY, errors=GENERATION_ERRORS
    ),
)
