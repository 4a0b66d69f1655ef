"""`Forwarder`: gives a request to a worker, to another if that one is lost before the client has got anything, and
tells the client when none is left."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from http import HTTPStatus

from starlette.types import Scope, Send

from headrace.base.errors import EngineUnavailable
from headrace.service.balancing import RoutedRequest
from headrace.serving.http.transport.connection import body_writer
from headrace.serving.http.transport.errors import end_of_stream
from headrace.serving.http_client import HttpResponse, RawHeaders
from headrace.serving.router.fleet import RETRY_AFTER_S, Fleet
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.pairing import Pairing
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
SESSION_HEADERS = frozenset({b"x-session-id", b"x-affinity-key"})
"""Name a conversation, for the policy consistent-hash."""


class Forwarder:
    """Routes of stored responses are found by the response's id; everything else by the policy. With ``pairing``
    prompts are computed by prefill workers."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, pairing: Pairing | None = None):
        self._fleet, self._metrics, self._pairing = fleet, metrics, pairing
        self._sender = Sender(fleet, metrics)
        self._max_tries, self._key = fleet.options.max_tries, fleet.options.worker_api_key
        self._dropped = OWN_HEADERS if self._key is None else OWN_HEADERS | KEY_HEADERS
        self._stored: OrderedDict[str, str] = OrderedDict()  # id of a response: URL of its worker

    async def forward(self, path: str, body: bytes, scope: Scope, send: Send) -> None:
        """Answer a request. Raises `HeadraceError` while nothing was sent."""
        begin, view, writer = time.perf_counter(), view_prompt(body), body_writer(scope)
        assert writer is not None, "the router runs on a server with `BoundedHttp`"
        hint = pack_hint(view.hint)
        request = WorkerRequest(
            scope["method"], _target_of(scope), self._headers_for_worker(scope), body, len(hint) + OUTPUT_TOKENS
        )
        if self._pairing is not None:
            request = self._pairing.strip(path, request)
        routed = RoutedRequest(hint, _namespace(view), _affinity(view, scope))
        self._metrics.prompt_tokens.inc(len(hint))
        tried: list[Worker] = []
        relay: Relay | None = None
        try:
            for num_left in reversed(range(self._max_tries)):
                try:
                    worker = self._choose(path, view, routed, tried)
                except EngineUnavailable:
                    if relay is None or not relay.is_complete:
                        raise
                    break  # what the last one said tells the client more
                tried.append(worker)
                relay = Relay(scope, send, writer, may_retry=num_left > 0)
                writer.watch(relay.abort)
                await self._exchange(path, request, routed, view, worker, relay)
                if relay.has_begun or writer.is_lost or (relay.is_complete and not relay.is_held):
                    break
                if num_left:
                    self._metrics.retries.inc()
        finally:
            writer.watch(None)
        assert relay is not None
        if writer.is_lost:
            return
        if not relay.is_complete:
            if not relay.has_begun:
                raise EngineUnavailable(LOST, retry_after=RETRY_AFTER_S)
            await _end_lost(relay, scope)
            return
        self._metrics.first_byte.observe(relay.begun_at - begin)
        self._note_stored(path, relay, tried[-1])
        await relay.finish()

    async def broadcast(self, scope: Scope, body: bytes) -> bytes:
        """Send a request to all workers that can be reached, which have `BROADCAST_S` to answer; returns the body of a
        successful response, if any."""
        headers, target = self._headers_for_worker(scope), _target_of(scope)

        async def ask(worker: Worker) -> bytes:
            response = HttpResponse()
            try:
                async with asyncio.timeout(BROADCAST_S):
                    await worker.client.forward(scope["method"], target, headers, body, response)
            except (OSError, ValueError):  # `TimeoutError` too; a worker that is lost holds no requests either
                return b""
            return response.body if response.status == 200 else b""

        fleets = [self._fleet] if self._pairing is None else [self._pairing.fleet, self._fleet]
        workers = [worker for fleet in fleets for worker in fleet if worker.health == "ready"]
        answers = await asyncio.gather(*map(ask, workers))
        return max(answers, key=len, default=b"")

    async def _exchange(
        self, path: str, request: WorkerRequest, routed: RoutedRequest, view: PromptView, worker: Worker, relay: Relay
    ) -> None:
        """Give a request to one worker, and to a prefill worker where there are any; the response is complete, whatever
        its status, or the worker was lost."""
        pair = None
        if self._pairing is not None:
            pair = self._pairing.begin(path, request, routed, text_of(view.model))
        sent = request if pair is None else pair.request
        try:
            await relay.pass_on(lambda on_end: self._sender.send(worker, sent, relay, on_end))
        finally:
            if pair is not None:
                pair.end(is_answered=relay.is_complete and relay.status == HTTPStatus.OK)

    def _choose(self, path: str, view: PromptView, routed: RoutedRequest, tried: list[Worker]) -> Worker:
        home = self._stored.get(_stored_id(path, view)) if self._stored else None
        for worker in self._fleet if home is not None else ():
            if worker.url == home and worker.takes_requests and worker not in tried:
                return worker
        worker, choice = self._fleet.choose(routed, text_of(view.model), tried)
        self._metrics.cached_tokens.inc(choice.cached_len)
        return worker

    def _headers_for_worker(self, scope: Scope) -> RawHeaders:
        headers = end_to_end(scope["headers"], self._dropped)
        if self._key is not None:
            headers.append((b"authorization", b"Bearer " + self._key.encode()))
        hops = [value for name, value in headers if name == FORWARDED_FOR]
        if hops:
            headers = [header for header in headers if header[0] != FORWARDED_FOR]
        client = scope.get("client")
        if client:
            hops.append(client[0].encode())
        if hops:
            headers.append((FORWARDED_FOR, b", ".join(hops)))
        return headers

    def _note_stored(self, path: str, relay: Relay, worker: Worker) -> None:
        if path == RESPONSES and relay.status == 200:
            found = RESPONSE_ID.search(relay.beginning)
            if found:
                self._stored[found[1].decode("latin-1")] = worker.url
                while len(self._stored) > MAX_STORED:
                    self._stored.popitem(last=False)


def _target_of(scope: Scope) -> bytes:
    query = scope.get("query_string", b"")
    target: bytes = scope["raw_path"]
    return target + b"?" + query if query else target


def _namespace(view: PromptView) -> str:
    """Prompts of different models or salts share no cache."""
    return f"{text_of(view.model)} {text_of(view.cache_salt)}"


def _affinity(view: PromptView, scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name in SESSION_HEADERS:
            return str(value.decode("latin-1"))
    return text_of(view.prompt_cache_key)


def _stored_id(path: str, view: PromptView) -> str:
    """The stored response that a request of ``/v1/responses`` is about; empty if there is none."""
    if path == RESPONSES:
        return text_of(view.previous_response_id)
    return path.removeprefix(RESPONSES + "/").partition("/")[0] if path.startswith(RESPONSES) else ""


async def _end_lost(relay: Relay, scope: Scope) -> None:
    """A worker was lost in the middle of its response: say so where the body has a place for it; otherwise the
    connection is closed, which the client notices, as the body is not complete."""
    last = end_of_stream(EngineUnavailable(LOST, retry_after=RETRY_AFTER_S), scope, relay.media_type)
    if last is None:
        await relay.break_off()
    else:
        await relay.finish(last)
