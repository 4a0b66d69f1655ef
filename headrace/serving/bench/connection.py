"""Sends streaming requests to an OpenAI-compatible server and measures when output arrives."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.base.errors import ConfigError
from headrace.serving.bench.options import TargetOptions, TrafficOptions
from headrace.serving.bench.traffic import TrafficRequest
from headrace.serving.http_client import EventSplitter, HttpClient, HttpResponse

_DRAFT_METRIC = re.compile(
    r"^\w+[:_]spec_decode_num_(?P<what>drafts|accepted_tokens)(?:_total)?(?:\{[^}\n]*\})? (?P<value>[\d.eE+]+)\s*$",
    re.MULTILINE,
)


@dataclass
class Timing:
    """Measurements of one request. Times are `time.perf_counter` seconds; ``arrivals`` are those of output pieces.
    ``error`` is the kind of failure, None for success; ``detail`` describes it. ``pieces`` is the raw stream until
    `read_stream` parses it."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    detail: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list, repr=False)

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def ttft(self) -> float:
        """Seconds until the first output; the request must have some."""
        return self.arrivals[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for shorter outputs."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class ServerConnection:
    """One server under load. Used as ``async with``; raises `ConfigError` when it cannot be reached at all."""

    def __init__(self, target: TargetOptions, traffic: TrafficOptions):
        self._http = HttpClient(target.base_url, api_key=target.api_key, timeout_s=target.timeout_s)
        self._target, self._traffic = target, traffic
        self._model = target.model or ""
        # a file of options may have them with their paths, as for the server
        self._adapters = [name.partition("=")[0] for name in target.lora_modules.split()]
        self._random = Random(0)

    @property
    def model(self) -> str:
        """The name sent, once entered."""
        return self._model

    async def __aenter__(self) -> ServerConnection:
        self._model = self._target.model or await self._first_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.close()

    async def _first_model(self) -> str:
        url = f"{self._http.root}/v1/models"
        try:
            response = await self._http.send("GET", "/v1/models")
        except OSError as error:
            raise ConfigError(self._http.explain(error), param="base_url") from error
        if response.status != 200:
            detail = f"{response.status}: {_shorten(response.body)}"
            raise ConfigError(f"{url} responds with {detail}; give --model or --api-key", param="base_url")
        try:
            return str(msgspec.json.decode(response.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{url} lists no models; give --model", param="model") from error

    async def flush_cache(self) -> None:
        """Flush the server's prefix cache; raises `ConfigError` if it cannot."""
        response = await self._http.send("POST", "/flush_cache")
        if response.status != 200:
            raise ConfigError(
                f"the server responds to POST /flush_cache with {response.status}; leave out --flush-cache",
                param="flush_cache"
            )

    async def count_drafts(self) -> tuple[float, float] | None:
        """Drafts and accepted tokens since the server's start, by its metrics (ours or vLLM's names); None if it counts
        none."""
        try:
            response = await self._http.send("GET", "/metrics")
        except (OSError, ValueError):  # no HTTP, or no route: these metrics are an extra
            return None
        if response.status != 200:
            return None
        found = dict.fromkeys(("drafts", "accepted_tokens"), 0.0)
        matches = list(_DRAFT_METRIC.finditer(response.body.decode("utf-8", "replace")))
        for match in matches:  # one per engine, where there are several
            found[match["what"]] += float(match["value"])
        return (found["drafts"], found["accepted_tokens"]) if matches else None

    def body_of(self, request: TrafficRequest) -> dict[str, Any]:
        """The JSON body of a request."""
        model = self._random.choice(self._adapters) if self._adapters else self._model
        body: dict[str, Any] = {
            "model": model, "max_tokens": request.max_tokens, "temperature": self._traffic.temperature,
            # usage: servers may merge tokens into one event, so events cannot be counted
            "stream": True, "stream_options": {"include_usage": True},
        }
        if self._traffic.ignore_eos:
            body["ignore_eos"] = True
        if self._target.endpoint == "completions":
            return {**body, "prompt": request.prompt}
        prompt = request.prompt
        return {**body, "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}

    async def send(self, request: TrafficRequest) -> Timing:
        """Send one request and receive its whole stream, which `read_stream` parses later. Failures are recorded in the
        result, never raised."""
        route = "/v1/completions" if self._target.endpoint == "completions" else "/v1/chat/completions"
        body = msgspec.json.encode(self.body_of(request))
        timing = Timing(time.perf_counter(), prompt_tokens=len(request.prompt) if _is_ids(request.prompt) else 0)
        # Shares the list: nothing is parsed while requests are being timed (`read_stream` parses later).
        response = HttpResponse(pieces=timing.pieces)
        try:
            await self._http.send("POST", route, body, response=response)
            if response.status != 200:
                timing.error, timing.detail = f"http {response.status}", _shorten(response.body)
        except TimeoutError:
            timing.error, timing.detail = "timeout", f"no end after {self._target.timeout_s:g} s"
        except OSError as error:
            timing.error, timing.detail = "connection", f"{type(error).__name__}: {error}"
        except ValueError as error:
            timing.error, timing.detail = "bad stream", f"{type(error).__name__}: {error}"
        timing.ended = time.perf_counter()
        return timing


class _Choice(msgspec.Struct):
    """A streamed choice: ``text`` of a completion, or ``delta`` of a chat."""

    text: str | UnsetType = UNSET
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether it has output. An empty text counts until the choice ends (a token of an incomplete character); a
        chat's first chunk, which has only a role, does not."""
        if self.text is not UNSET:
            return bool(self.text) or self.finish_reason is None
        delta = self.delta or {}
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


class _Event(msgspec.Struct):
    """The parts of an event that are measured."""

    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def read_stream(timing: Timing) -> Timing:
    """Parse ``timing.pieces`` into arrival times and token counts, and free them. An invalid stream is recorded as
    an error."""
    pieces, timing.pieces = timing.pieces, []
    if timing.error is None:
        try:
            _read_events(pieces, timing)
        except ValueError as error:
            timing.error, timing.detail = "bad stream", f"{type(error).__name__}: {error}"
    return timing


def _read_events(pieces: list[tuple[float, bytes]], timing: Timing) -> None:
    is_finished, usage = False, None
    for arrived, data in split_events(pieces):
        if data == b"[DONE]":
            break
        event = _decode_event(data)
        if event.error:
            timing.error, timing.detail = "server error", str(event.error)[:200]
            return
        # Some servers send the running usage with every event; the last one counts.
        usage = event.usage or usage
        for choice in event.choices or ():
            is_finished = is_finished or choice.finish_reason is not None
            if choice.has_output:
                timing.arrivals.append(arrived)
    if not is_finished:
        timing.error, timing.detail = "cut short", "the stream ended without a finish_reason"
        return
    _count_tokens(timing, usage)


def _count_tokens(timing: Timing, usage: dict[str, Any] | None) -> None:
    """Set the token counts: the server's usage if it sent one, else the length of the prompt and the number of
    output pieces."""
    usage = usage or {}
    timing.prompt_tokens = usage.get("prompt_tokens") or timing.prompt_tokens
    timing.output_tokens = usage.get("completion_tokens") or len(timing.arrivals)
    timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not timing.arrivals:
        timing.error, timing.detail = "empty", "the stream ended without output"


def split_events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """``(arrival time, data)`` of each server-sent event, however the network splits them; comments are skipped."""
    splitter = EventSplitter()
    for arrived, piece in pieces:
        for data in splitter.feed(piece):
            yield arrived, data


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _shorten(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace").replace("\n", " ")
