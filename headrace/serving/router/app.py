"""`Router`: passes requests on to workers, with routes of its own for health, models, metrics and the list of workers.
Refuses: gates (`front.py`) and bytes (`client_connection.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response

from headrace.base.errors import ConfigError, EngineUnavailable, NotFound, RequestError
from headrace.serving.http.app import ENDPOINTS
from headrace.serving.http.transport.access import client_of
from headrace.serving.http.transport.client_request import ClientRequest
from headrace.serving.http.transport.errors import BodyTooLarge, EncodedResponse, JsonResponse, route_of
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.forwarding import Forwarder
from headrace.serving.router.limits import RateLimit
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.options import RouterOptions
from headrace.serving.router.pairing import Pairing
from headrace.serving.router.workers import Worker

RETRY_AFTER_S = 5.0
RELAYED = frozenset(endpoint.path for endpoint in ENDPOINTS if not endpoint.is_admin)
BROADCAST = frozenset({"/abort_request"})
"""Sent to all workers: nobody knows which one has the request."""
ADMIN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_admin)


def describe_state(worker: Worker) -> str:
    """One word for what a worker does."""
    if worker.is_draining:
        return "draining"
    return worker.health if worker.health != "ready" or worker.takes_requests else "resting"


class WorkerInfo(msgspec.Struct):
    """A worker in the answer of ``/workers``."""

    url: str
    state: str
    reason: str
    models: list[str]
    requests: int
    load_tokens: int
    role: str


class WorkerName(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST and DELETE ``/workers``."""

    url: str


class Router:
    """Answers requests that have passed the gates. ``fleet`` answers those of inference; workers of ``prefill`` compute
    prompts for it. ``awaits_prefill``: it is not ready before one of these has been. ``is_draining`` refuses new
    requests; ``num_running`` counts those that are being relayed."""

    def __init__(
        self, fleet: Fleet, options: RouterOptions, prefill: Fleet | None = None, *, awaits_prefill: bool = False
    ):
        self.fleet, self.metrics = fleet, RouterMetrics([fleet] if prefill is None else [prefill, fleet])
        self._prefill, self._awaits_prefill = prefill, awaits_prefill
        self.is_draining = False
        self.num_running = 0
        self._options = options
        self._limit = RateLimit(options.rate_limit, options.rate_burst, options.max_concurrent_per_client)
        self._is_limited = self._limit.is_on
        self._has_keys = options.api_key is not None
        self._forwarder = Forwarder(
            fleet, self.metrics, None if prefill is None else Pairing(prefill, self.metrics)
        )
        self._broadcasts: set[asyncio.Task[None]] = set()
        self._routes: dict[str, Callable[[ClientRequest], Response | None]] = {
            "/health": self._health, "/ping": self._health, "/ready": self._ready, "/metrics": self._metrics,
            "/v1/models": self._models, "/workers": self._workers,
        }

    def begin_drain(self) -> None:
        """See `headrace.serving.http.listening.Drained`."""
        self.is_draining = True

    async def end_running(self) -> None:
        """See `headrace.serving.http.listening.Drained`."""
        for worker in self.all_workers():
            worker.give_up()

    def begin(self, request: ClientRequest) -> None:
        """The head of a request has come: answer it, or set its ``body_limit``. Raises `HeadraceError`."""
        path = request.path
        own = self._routes.get(path)
        if own is not None:
            response = own(request)
            if response is not None:
                request.respond(response)
            return
        if route_of(path, RELAYED) == "unmatched" or _has_dots(path):
            raise NotFound(f"{path} is an admin route: send it to a worker" if path in ADMIN_PATHS else
                           f"there is no {path}; the router passes on the routes of inference servers")
        if self.is_draining:
            raise EngineUnavailable("the router is shutting down", retry_after=RETRY_AFTER_S)
        undo: Callable[[], None] = self._note_left
        if self._is_limited:
            stack = ExitStack()
            stack.enter_context(self._limit.admit(client_of(request.scope, has_keys=self._has_keys)))
            stack.callback(undo)
            undo = stack.close
        self.num_running += 1
        request.undo = undo
        self._expect_body(request)

    def take(self, request: ClientRequest) -> None:
        """The body of a request has come. Raises `HeadraceError`."""
        path, body = request.path, request.take_body()
        if path == "/workers":
            request.respond(self._change_workers(request.scope["method"], _read_url(body)))
        elif path in BROADCAST:
            task = asyncio.get_running_loop().create_task(self._broadcast(request, body))
            self._broadcasts.add(task)
            task.add_done_callback(self._broadcasts.discard)
        else:
            self._forwarder.forward(request, body)

    def end(self, request: ClientRequest) -> None:
        """A request has its response, or its client has left."""
        if request.undo is not None:
            request.undo()

    def _note_left(self) -> None:
        self.num_running -= 1

    def _expect_body(self, request: ClientRequest) -> None:
        limit = request.body_limit = self._options.max_body_bytes
        declared = request.given.get(b"content-length", b"")
        digits = declared.lstrip(b"0")  # at most 20, or the parser has refused them
        if digits.isdigit() and int(digits) > limit:
            raise BodyTooLarge(f"the body has {int(digits)} bytes; at most {limit} are accepted")
        request.invite_body()

    async def _broadcast(self, request: ClientRequest, body: bytes) -> None:
        answer = await self._forwarder.broadcast(request, body)
        request.respond(EncodedResponse(answer or b"{}"))

    def _health(self, request: ClientRequest) -> Response:
        return JsonResponse({"status": "ok"})

    def _ready(self, request: ClientRequest) -> Response:
        if self._prefill is not None and self._prefill.is_ready:
            self._awaits_prefill = False  # later, decode workers do without
        is_ready = self.fleet.is_ready and not self._awaits_prefill and not self.is_draining
        states = [{"url": worker.url, "state": describe_state(worker)} for worker in self.all_workers()]
        content = {"status": "ready" if is_ready else "draining" if self.is_draining else "waiting", "workers": states}
        return JsonResponse(content, 200 if is_ready else 503, None if is_ready else {"Retry-After": "5"})

    def _metrics(self, request: ClientRequest) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _models(self, request: ClientRequest) -> Response:
        return JsonResponse({"object": "list", "data": list(self.fleet.models())})

    def _workers(self, request: ClientRequest) -> Response | None:
        """GET lists, POST adds, DELETE drains; the last two with ``{"url": ...}``, or ``?url=``."""
        scope = request.scope
        if scope["method"] not in ("POST", "DELETE"):
            return self._list_workers()
        named = parse_qs(scope["query_string"].decode("latin-1")).get("url")
        if named:
            return self._change_workers(scope["method"], named[0])
        self._expect_body(request)
        return None

    def _change_workers(self, method: str, url: str) -> Response:
        if method == "POST":
            try:
                self.fleet.add(url)
            except ConfigError as error:
                raise RequestError(error.message, param="url") from error
        elif not (self.fleet.drain(url) or (self._prefill is not None and self._prefill.drain(url))):
            raise NotFound(f"{url} is no worker of this router", param="url")
        return self._list_workers()

    def _list_workers(self) -> Response:
        infos = [
            WorkerInfo(w.url, describe_state(w), w.reason, list(w.models), len(w.relays), w.load, self._role_of(w))
            for w in self.all_workers()
        ]
        return JsonResponse({"workers": infos})

    def all_workers(self) -> list[Worker]:
        """Prefill workers, then those that answer."""
        return [*(self._prefill or ()), *self.fleet]

    def _role_of(self, worker: Worker) -> str:
        if self._prefill is None:
            return "worker"
        return "prefill" if worker.is_prefill else "decode"


def _has_dots(path: str) -> bool:
    """Whether a path has segments ``.`` or ``..``: what is before a worker may resolve them to another route."""
    return "/." in path and not {".", ".."}.isdisjoint(path.split("/"))


def _read_url(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=WorkerName).url
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f'the body must be {{"url": "http://host:port"}}: {error}', param="url") from error
