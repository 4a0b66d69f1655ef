"""`Forwarder`: gives a request to a worker, to another if that one is lost before the client has got anything, and
tells the client when none is left."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import NamedTuple

from starlette.types import Scope

from headrace.base.errors import EngineUnavailable
from headrace.service.balancing import RoutedRequest
from headrace.serving.http.transport.client_request import ClientRequest
from headrace.serving.http.transport.errors import end_of_stream
from headrace.serving.http_client import HttpResponse, RawHeaders
from headrace.serving.router.fleet import RETRY_AFTER_S, Fleet
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.pairing import Pair, Pairing
from headrace.serving.router.prompt_view import PromptView, pack_hint, text_of, view_prompt
from headrace.serving.router.relay import HOP_BY_HOP, Relay, end_to_end
from headrace.serving.router.sending import Sender, WorkerRequest
from headrace.serving.router.workers import Worker

LOST = "the worker was lost while this request ran; try again"
RESPONSES = "/v1/responses"
BROADCAST_S = 10.0
OUTPUT_TOKENS = 256
"""Load of a request beyond its prompt: what it will generate is not known."""
MAX_STORED = 1 << 16
"""Stored responses whose worker is remembered."""
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
OWN_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
"""Headers of the connection to the router, or set anew for the worker."""
FORWARDED_FOR = b"x-forwarded-for"
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
SESSION_HEADERS = (b"x-session-id", b"x-affinity-key")
"""Name a conversation, for the policy consistent-hash; the first one given counts."""


class Forwarder:
    """Routes of stored responses are found by the response's id; everything else by the policy. With ``pairing``
    prompts are computed by prefill workers."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, pairing: Pairing | None = None):
        self._fleet, self.metrics, self._pairing = fleet, metrics, pairing
        self.sender = Sender(fleet, metrics)
        self.max_tries, self._key = fleet.options.max_tries, fleet.options.worker_api_key
        self._dropped = OWN_HEADERS if self._key is None else OWN_HEADERS | KEY_HEADERS
        self._stored: OrderedDict[str, str] = OrderedDict()  # id of a response: URL of its worker

    def forward(self, client: ClientRequest, body: bytes) -> None:
        """Answer a request, now or later."""
        begin, view, scope = time.perf_counter(), view_prompt(body), client.scope
        hint = pack_hint(view.hint)
        request = WorkerRequest(
            scope["method"], _target_of(scope), self._headers_for_worker(client), body, len(hint) + OUTPUT_TOKENS,
            view.has_deadline
        )
        if self._pairing is not None:
            request = self._pairing.strip(client.path, request)
        model = text_of(view.model)
        # Prompts of different models or salts share no cache.
        routed = RoutedRequest(hint, f"{model} {text_of(view.cache_salt)}", _affinity(view, client.given))
        self.metrics.prompt_tokens.inc(len(hint))
        _Passage(self, _Asked(client.path, view, model, routed, request, begin), client).ask_next()

    async def broadcast(self, client: ClientRequest, body: bytes) -> bytes:
        """Send a request to all workers that can be reached, which have `BROADCAST_S` to answer; returns the body of a
        successful response, if any."""
        headers, target, method = self._headers_for_worker(client), _target_of(client.scope), client.scope["method"]

        async def ask(worker: Worker) -> bytes:
            response = HttpResponse()
            try:
                async with asyncio.timeout(BROADCAST_S):
                    await worker.client.forward(method, target, headers, body, response)
            except (OSError, ValueError):  # `TimeoutError` too; a worker that is lost holds no requests either
                return b""
            return response.body if response.status == 200 else b""

        fleets = [self._fleet] if self._pairing is None else [self._pairing.fleet, self._fleet]
        workers = [worker for fleet in fleets for worker in fleet if worker.health == "ready"]
        answers = await asyncio.gather(*map(ask, workers))
        return max(answers, key=len, default=b"")

    def choose(self, asked: _Asked, tried: list[Worker]) -> Worker:
        """A worker that was not tried yet. Raises `EngineUnavailable`."""
        home = self._stored.get(_stored_id(asked.path, asked.view)) if self._stored else None
        for worker in self._fleet if home is not None else ():
            if worker.url == home and worker.takes_requests and worker not in tried:
                return worker
        worker, choice = self._fleet.choose(asked.routed, asked.model, tried)
        self.metrics.cached_tokens.inc(choice.cached_len)
        return worker

    def pair(self, asked: _Asked) -> Pair | None:
        """Give a request to a prefill worker, if there are any."""
        if self._pairing is None:
            return None
        return self._pairing.begin(asked.path, asked.request, asked.routed, asked.model)

    def note_complete(self, asked: _Asked, relay: Relay, worker: Worker) -> None:
        """A worker has answered."""
        self.metrics.first_byte.observe(relay.begun_at - asked.begin)
        if asked.path == RESPONSES and relay.status == HTTPStatus.OK:
            found = RESPONSE_ID.search(relay.beginning)
            if found:
                self._stored[found[1].decode("latin-1")] = worker.url
                while len(self._stored) > MAX_STORED:
                    self._stored.popitem(last=False)

    def _headers_for_worker(self, client: ClientRequest) -> RawHeaders:
        headers, hops = end_to_end(client.scope["headers"], self._dropped), []
        if self._key is not None:
            headers.append((b"authorization", b"Bearer " + self._key.encode()))
        if FORWARDED_FOR in client.given:
            hops = [value for name, value in headers if name == FORWARDED_FOR]
            headers = [header for header in headers if header[0] != FORWARDED_FOR]
        address = client.scope.get("client")
        if address:
            hops.append(address[0].encode())
        if hops:
            headers.append((FORWARDED_FOR, b", ".join(hops)))
        return headers


class _Asked(NamedTuple):
    """A request, and what the choice of a worker needs of it. ``begin``: when it came, by `time.perf_counter`."""

    path: str
    view: PromptView
    model: str
    routed: RoutedRequest
    request: WorkerRequest
    begin: float


class _Passage:
    """The way of one request: to one worker after the other, until one has answered or none is left."""

    __slots__ = ("_asked", "_client", "_forwarder", "_pair", "_relay", "_tried")

    def __init__(self, forwarder: Forwarder, asked: _Asked, client: ClientRequest):
        self._forwarder, self._asked, self._client = forwarder, asked, client
        self._tried: list[Worker] = []
        self._relay: Relay | None = None
        self._pair: Pair | None = None

    def ask_next(self) -> None:
        """Give it to a worker."""
        forwarder, client = self._forwarder, self._client
        try:
            worker = forwarder.choose(self._asked, self._tried)
        except EngineUnavailable as error:
            if self._relay is None or not self._relay.is_complete:
                client.refuse(error)
            else:
                self._finish(self._relay)  # what the last one said tells the client more
            return
        self._tried.append(worker)
        relay = self._relay = client.answering = Relay(client, may_retry=len(self._tried) < forwarder.max_tries)
        pair = self._pair = forwarder.pair(self._asked)
        request = self._asked.request if pair is None else pair.request
        relay.exchange = forwarder.sender.send(worker, request, relay, self._end)

    def _end(self) -> None:
        """The response is complete, whatever its status, or the worker was lost."""
        relay, client = self._relay, self._client
        assert relay is not None
        relay.exchange = None  # which has the relay: nothing is left for the garbage collector
        if self._pair is not None:
            self._pair.end(is_answered=relay.is_complete and relay.status == HTTPStatus.OK)
        if client.is_lost:
            return
        if relay.is_complete and not relay.is_held:
            self._finish(relay)
        elif relay.has_begun:
            self._end_lost(relay)
        elif len(self._tried) < self._forwarder.max_tries:
            self._forwarder.metrics.retries.inc()
            self.ask_next()
        else:
            client.refuse(EngineUnavailable(LOST, retry_after=RETRY_AFTER_S))

    def _finish(self, relay: Relay) -> None:
        self._forwarder.note_complete(self._asked, relay, self._tried[-1])
        relay.finish()

    def _end_lost(self, relay: Relay) -> None:
        """A worker was lost in the middle of its response: say so where the body has a place for it; otherwise the
        connection is closed, which the client notices, as the body is not complete. A body of a declared length has no
        place: the client would take what comes next on the connection for a part of it."""
        error = EngineUnavailable(LOST, retry_after=RETRY_AFTER_S)
        last = end_of_stream(error, self._client.scope, relay.media_type)
        if last is None or relay.has_length:
            self._client.break_off()
        else:
            relay.finish(last)


def _target_of(scope: Scope) -> bytes:
    query = scope.get("query_string", b"")
    target: bytes = scope["raw_path"]
    return target + b"?" + query if query else target


def _affinity(view: PromptView, given: dict[bytes, bytes]) -> str:
    for name in SESSION_HEADERS:
        if name in given:
            return given[name].decode("latin-1")
    return text_of(view.prompt_cache_key)


def _stored_id(path: str, view: PromptView) -> str:
    """The stored response that a request of ``/v1/responses`` is about; empty if there is none."""
    if path == RESPONSES:
        return text_of(view.previous_response_id)
    return path.removeprefix(RESPONSES + "/").partition("/")[0] if path.startswith(RESPONSES) else ""
