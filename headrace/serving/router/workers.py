"""`Worker`: a server behind the router: whether it takes requests, what it serves, how busy it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from headrace.base.disaggregation import BOOTSTRAP_PORT
from headrace.service.balancing import ReplicaState
from headrace.serving.http_client import HttpClient, HttpResponse

logger = logging.getLogger(__name__)

IDLE_S = 4.0
"""How long an idle connection is kept: shorter than servers keep theirs, which is five seconds for uvicorn's."""
FIRST_BREAK_S, LONGEST_BREAK_S = 1.0, 30.0
FAILURE_STATUSES = frozenset({500, 502, 503, 504})
Health = Literal["starting", "ready", "failing"]


class Running(Protocol):
    """A request that runs on a worker."""

    def abort(self) -> None:
        """Break its connection."""


class _Settings(msgspec.Struct):
    """The fields of ``/get_server_info`` that are used."""

    disaggregation_bootstrap_port: int | None = None


class _Listing(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[dict[str, Any]] = []


@dataclass
class Breaker:
    """``failures`` counts requests that failed one after the other; from ``most`` on requests are kept away until
    ``open_until`` (`time.monotonic`), and then one passes at a time."""

    most: int
    failures: int = 0
    open_until: float = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether any number of requests may pass."""
        return self.failures < self.most

    @property
    def is_resting(self) -> bool:
        """Whether none may."""
        return time.monotonic() < self.open_until

    def note_success(self) -> None:
        """A request has ended well."""
        self.failures = 0

    def note_failure(self) -> float:
        """A request has failed; returns for how many seconds none may pass now, if that is new, else 0."""
        if self.is_resting:  # it began before the break, and ended with those that caused it
            return 0.0
        self.failures += 1
        if self.is_closed:
            return 0.0
        break_s = min(LONGEST_BREAK_S, FIRST_BREAK_S * 2.0 ** min(self.failures - self.most, 10))
        self.open_until = time.monotonic() + break_s
        return break_s


@dataclass(eq=False)
class Worker:
    """``index`` is never used again. ``models``: what it lists, by id; empty until it was asked. ``load``: tokens,
    roughly, of the requests that run there.
    ``was_lost`` asks for a health check at once. ``bootstrap_port``: of a prefill worker's transfer agent; 0 until it
    has told.
    ``silent_s``: seconds for which it was asked and said nothing, though it could be reached; an answer and a refused
    connection end them."""

    index: int
    url: str
    client: HttpClient
    breaker: Breaker
    is_prefill: bool = False
    health: Health = "starting"
    is_draining: bool = False
    reason: str = "not asked yet"
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    relays: set[Running] = field(default_factory=set)
    load: int = 0
    was_lost: asyncio.Event = field(default_factory=asyncio.Event)
    bootstrap_port: int = 0
    silent_s: float = 0.0
    _state: ReplicaState | None = field(default=None, init=False, repr=False)

    @property
    def host(self) -> str:
        """The host of its URL."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    def lists(self, model: str) -> bool:
        """Whether it serves a model: by its id, or an adapter as ``parent:id``."""
        if model in self.models or ":" not in model:
            return model in self.models
        return any(  # ``model`` is not searched for colons: it may be as long as a body
            model.endswith(name) and found.get("parent") and model == f"{found['parent']}:{name}"
            for name, found in self.models.items()
        )

    @property
    def takes_requests(self) -> bool:
        """Whether a request may be sent there now."""
        if self.health != "ready" or self.is_draining:
            return False
        breaker = self.breaker
        return breaker.failures < breaker.most or (not self.relays and not breaker.is_resting)  # `is_closed`

    @property
    def state(self) -> ReplicaState:
        """For a balancing policy. Kept until it changes: each request asks it of all workers."""
        if self._state is None:
            self._state = ReplicaState(
                self.index, num_running=len(self.relays), prefill_tokens=self.load, name=self.url
            )
        return self._state

    def admit(self, relay: Running, tokens: int) -> None:
        """A request begins there."""
        self.relays.add(relay)
        self.load += tokens
        self._state = None

    def release(self, relay: Running, tokens: int) -> None:
        """A request has ended."""
        self.relays.discard(relay)
        self.load -= tokens
        self._state = None

    def note_outcome(self, *, failed: bool) -> None:
        """Note how a request to it ended, for the circuit breaker."""
        if not failed:
            self.breaker.note_success()
        elif break_s := self.breaker.note_failure():
            logger.warning(
                "%s: %d requests failed in a row; it gets none for %g s", self.url, self.breaker.failures, break_s
            )

    def note_lost(self, reason: str) -> None:
        """Note that it cannot be reached: it gets no requests until a health check succeeds."""
        if self.health != "failing":
            logger.warning("%s is not reachable: %s", self.url, reason)
        self.health, self.reason = "failing", reason
        self.was_lost.set()

    def give_up(self) -> None:
        """End what runs there, as if its connections had broken."""
        for relay in list(self.relays):
            relay.abort()

    async def check_health(self, timeout_s: float) -> int:
        """Ask whether it takes requests, by ``/ready`` or, where there is no such route, by ``/health``. Returns the
        status of the answer, 0 for none; it does with 200."""
        answer = await self._ask("/ready", timeout_s)
        if isinstance(answer, HttpResponse) and answer.status in (404, 405):
            answer = await self._ask("/health", timeout_s)
        if isinstance(answer, str):
            self.note_lost(answer)
            return 0
        if answer.status != 200:
            if self.health == "ready":
                logger.warning("%s takes no requests: status %d", self.url, answer.status)
            self.health = "starting" if self.health == "starting" else "failing"
            self.reason = f"status {answer.status}"
            return answer.status
        is_new = self.health != "ready"
        if is_new:
            await self.read_models(timeout_s)
        if self.is_prefill and (is_new or not self.bootstrap_port):
            await self.read_port(timeout_s)
        if is_new:
            logger.info("%s is ready: %s", self.url, ", ".join(self.models) or "models unknown")
        self.health, self.reason = "ready", ""
        return answer.status

    async def read_models(self, timeout_s: float) -> None:
        """Learn which models it serves. A worker that does not say gets requests for any."""
        answer = await self._ask("/v1/models", timeout_s)
        if isinstance(answer, str) or answer.status != 200:
            return
        try:
            listing = msgspec.json.decode(answer.body, type=_Listing)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        self.models = {str(model["id"]): model for model in listing.data if "id" in model}

    async def read_port(self, timeout_s: float) -> None:
        """Learn where its transfer agent listens. It is asked again if it does not answer."""
        self.bootstrap_port = 0
        answer = await self._ask("/get_server_info", timeout_s)
        if isinstance(answer, str):
            return
        self.bootstrap_port = BOOTSTRAP_PORT
        if answer.status in (401, 403):
            logger.warning(
                "%s does not tell the port of its transfer agent (status %d), and %d is assumed; give --worker-api-key",
                self.url, answer.status, BOOTSTRAP_PORT
            )
        elif answer.status == 200:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found = msgspec.json.decode(answer.body, type=_Settings).disaggregation_bootstrap_port
                self.bootstrap_port = found or BOOTSTRAP_PORT

    async def _ask(self, route: str, timeout_s: float) -> HttpResponse | str:
        """The response, or why there is none."""
        try:
            answer: HttpResponse | str = await self.client.send("GET", route, timeout_s=timeout_s)
        except TimeoutError:
            self.silent_s += timeout_s
            return f"no answer within {timeout_s:g} s"
        except (OSError, ValueError) as error:
            answer = str(error) or type(error).__name__
        self.silent_s = 0.0
        return answer
