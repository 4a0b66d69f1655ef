"""What answers in a chat: a model that this process loads (`LocalModel`), or that of a running server
(`ServerModel`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.base.errors import ConfigError, HeadraceError
from headrace.serving.cli.options import SamplingOptions
from headrace.serving.http_client import EventSplitter, HttpClient, HttpResponse

if TYPE_CHECKING:
    from headrace.serving.offline.async_llm import AsyncLLM

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it arrives: ``text``, or ``reasoning`` before it. ``num_tokens``: those of the answer so
    far, 0 while unknown; ``num_accepted``: how many of them were accepted drafts. ``finish_reason`` is set at the end.
    """

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    num_accepted: int = 0
    finish_reason: str | None = None


class ChatModel(Protocol):
    """``answer`` raises `HeadraceError`, after which the next question may be asked; cancelling it stops the model."""

    @property
    def title(self) -> str:
        """The model's name, and where it runs."""
        ...

    def answer(self, messages: Messages, sampling: SamplingOptions) -> AsyncGenerator[Piece, None]: ...

    async def close(self) -> None: ...


class LocalModel:
    """A model in an engine process of this command. ``llm`` has been started and has a chat template."""

    def __init__(self, llm: AsyncLLM, title: str):
        self._llm = llm
        self.title = title

    async def answer(self, messages: Messages, sampling: SamplingOptions) -> AsyncGenerator[Piece, None]:
        """Generate with the chat template."""
        llm = self._llm
        assert llm.tokenizer is not None and llm.facts is not None
        prompt = llm.tokenizer.encode(llm.tokenizer.render_chat(messages), add_special_tokens=False)
        room = llm.facts.max_model_len - len(prompt)
        params = sampling.to_params(llm.facts.default_sampling, max_tokens=max(1, min(sampling.max_tokens, room)))
        length = 0
        async for output in llm.generate(prompt, params):
            choice = output.outputs[0]
            num_tokens, num_accepted = len(choice.token_ids), choice.num_accepted_tokens
            yield Piece(choice.text[length:], "", num_tokens, num_accepted, choice.finish_reason)
            length = len(choice.text)

    async def close(self) -> None:
        """Stop the engine."""
        await self._llm.close()


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Timings(msgspec.Struct):
    accepted_tokens: int = 0


class _Event(msgspec.Struct):
    """The parts of a streamed chunk that a chat shows."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


class _Model(msgspec.Struct):
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


_decode_event = msgspec.json.Decoder(_Event).decode


class ServerModel:
    """A model behind OpenAI's API at ``url``, with or without ``/v1`` or the whole route. `join` must be called first.
    """

    def __init__(self, url: str, *, api_key: str | None, model: str | None):
        address = url.rstrip("/").removesuffix("/chat/completions")
        self._http = HttpClient(address if "://" in address else f"http://{address}", api_key=api_key)
        self._model = model or ""
        self._has_timings = False  # a field of this server alone; others may refuse it

    @property
    def title(self) -> str:
        """The model's name and the server's address."""
        return f"{self._model} at {self._http.root}"

    async def join(self) -> None:
        """Find the server's model unless one was named. Raises `ConfigError` if the server cannot be reached, refuses
        the key, or serves several models."""
        response = HttpResponse()
        try:
            await self._http.send("GET", "/v1/models", response=response)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._http.explain(error)}; is it running?", param="url") from error
        if response.status != 200:
            raise ConfigError(f"{self._http.root}: {_refusal(response)}", param="url")
        self._model = self._model or _only_model(response.body, self._http.root)
        self._has_timings = _is_headrace(response.body)

    async def answer(self, messages: Messages, sampling: SamplingOptions) -> AsyncGenerator[Piece, None]:
        """Stream ``/v1/chat/completions``. Options that were not given are left to the server."""
        # Every field of the section has the name of a field of the request.
        values = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        body = {
            "model": self._model, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            **given, **({"return_timings": True} if self._has_timings else {})
        }
        response, splitter = HttpResponse(), EventSplitter()
        is_finished = False
        try:
            async for data in self._http.stream("POST", "/v1/chat/completions", msgspec.json.encode(body), response):
                for event in splitter.feed(data) if response.status == 200 else ():
                    if event != b"[DONE]":
                        piece = _read_piece(event)
                        is_finished = is_finished or piece.finish_reason is not None
                        yield piece
        except OSError as error:
            raise HeadraceError(self._http.explain(error)) from error
        except ValueError as error:
            raise HeadraceError(f"the server sent what is no chat completion: {error}") from error
        if response.status != 200:
            raise HeadraceError(_refusal(response))
        if not is_finished:
            raise HeadraceError("the server ended the stream before the answer was complete")

    async def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _refusal(response: HttpResponse) -> str:
    """A server's error in a line, with what helps."""
    try:
        content = msgspec.json.decode(response.body)
        error = content.get("error", content)
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, AttributeError, LookupError):
        message = response.body[:300].decode("utf-8", "replace").replace("\n", " ").strip()
    hint = {
        401: " (give --api-key, or set HEADRACE_API_KEY)", 403: " (give --api-key, or set HEADRACE_API_KEY)",
        404: " (is it the address of an OpenAI-compatible server?)" if not message else ""
    }
    return f"the server answered {response.status}: {message}{hint.get(response.status, '')}"


def _is_headrace(models: bytes) -> bool:
    """Whether the server that lists ``models`` is one of this package's."""
    try:
        return any(model.owned_by == "headrace" for model in msgspec.json.decode(models, type=_Models).data)
    except msgspec.DecodeError:
        return False


def _only_model(body: bytes, root: str) -> str:
    try:
        models = msgspec.json.decode(body)["data"]
        names = [str(model["id"]) for model in models]
        bases = [str(model["id"]) for model in models if not model.get("parent")]  # adapters have one
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{root}/v1/models lists no models; give --model", param="model") from error
    if len(bases) != 1:
        raise ConfigError(
            f"the server at {root} has {len(names)} models; choose one with --model: {', '.join(names[:20])}"
            if names else f"the server at {root} has no model", param="model"
        )
    return bases[0]


def _read_piece(data: bytes) -> Piece:
    event = _decode_event(data)
    if event.error:
        detail = event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
        raise HeadraceError(f"the server stopped: {detail}")
    num_tokens = (event.usage and event.usage.completion_tokens) or 0
    num_accepted = event.timings.accepted_tokens if event.timings else 0
    if not event.choices:
        return Piece(num_tokens=num_tokens, num_accepted=num_accepted)
    choice = event.choices[0]
    delta = choice.delta or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Piece(delta.get("content") or "", reasoning, num_tokens, num_accepted, choice.finish_reason)
