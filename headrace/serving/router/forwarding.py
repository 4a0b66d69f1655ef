"""`Forwarder`: gives a request to a worker, to another if that one is lost before the client has got anything, and
tells the client when none is left."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict

from starlette.types import Receive, Scope, Send

from headrace.base.errors import EngineUnavailable
from headrace.service.balancing import RoutedRequest
from headrace.serving.http.transport.errors import end_of_stream
from headrace.serving.http_client import HttpResponse, RawHeaders
from headrace.serving.router.fleet import RETRY_AFTER_S, Fleet
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.pairing import Exchange, Pair, Pairing
from headrace.serving.router.prompt_view import PromptView, pack_hint, text_of, view_prompt
from headrace.serving.router.relay import Relay, end_to_end
from headrace.serving.router.workers import FAILURE_STATUSES, Worker

LOST = "the worker was lost while this request ran; try again"
RESPONSES = "/v1/responses"
BROADCAST_S = 10.0
OUTPUT_TOKENS = 256
"""Load of a request beyond its prompt: what it will generate is not known."""
MAX_STORED = 1 << 16
"""Stored responses whose worker is remembered."""
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
OWN_HEADERS = frozenset({b"host", b"content-length", b"expect"})
"""Headers of the connection to the router, or set anew for the worker."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
SESSION_HEADERS = frozenset({b"x-session-id", b"x-affinity-key"})
"""Name a conversation, for the policy consistent-hash."""


class Forwarder:
    """Routes of stored responses are found by the response's id; everything else by the policy. With ``pairing``
    prompts are computed by prefill workers."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, pairing: Pairing | None = None):
        self._fleet, self._metrics, self._pairing = fleet, metrics, pairing
        self._max_tries, self._key = fleet.options.max_tries, fleet.options.worker_api_key
        self._stored: OrderedDict[str, str] = OrderedDict()  # id of a response: URL of its worker

    async def forward(self, path: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises `HeadraceError` while nothing was sent."""
        begin, view = time.perf_counter(), view_prompt(body)
        hint = pack_hint(view.hint)
        exchange = Exchange(
            scope["method"], _target_of(scope), self._headers_for_worker(scope), body, len(hint) + OUTPUT_TOKENS
        )
        if self._pairing is not None:
            exchange = self._pairing.strip(path, exchange)
        request = RoutedRequest(hint, _namespace(view), _affinity(view, scope))
        self._metrics.prompt_tokens.inc(len(hint))
        tried: list[Worker] = []
        relay = None
        client = asyncio.get_running_loop().create_task(_await_end(receive))
        try:
            for num_left in reversed(range(self._max_tries)):
                try:
                    worker = self._choose(path, view, request, tried)
                except EngineUnavailable:
                    if relay is None or not relay.is_complete:
                        raise
                    break  # what the last one said tells the client more
                tried.append(worker)
                relay = Relay(scope, send, may_retry=num_left > 0)
                pair = self._begin_pair(path, exchange, request, view)
                try:
                    await self._exchange(exchange if pair is None else pair.exchange, worker, relay, client)
                finally:
                    if pair is not None:
                        pair.end(is_answered=relay.is_complete)
                if not relay.is_complete and client.done():
                    return
                if not relay.is_complete and relay.has_begun:
                    await _end_stream(relay, scope, send)
                    return
                if relay.is_complete and not relay.is_held:
                    break
                if num_left:
                    self._metrics.retries.inc()
            if relay is None or not relay.is_complete:
                raise EngineUnavailable(LOST, retry_after=RETRY_AFTER_S)
            self._metrics.first_byte.observe(relay.begun_at - begin)
            self._note_stored(path, relay, tried[-1])
            await relay.finish()
        finally:
            client.cancel()

    async def broadcast(self, scope: Scope, body: bytes) -> bytes:
        """Send a request to all workers that can be reached; returns the body of a successful response, if any."""
        headers, target = self._headers_for_worker(scope), _target_of(scope)

        async def ask(worker: Worker) -> bytes:
            response = HttpResponse()
            try:
                await worker.client.forward(scope["method"], target, headers, body, response)
            except (OSError, ValueError):  # a worker that is lost holds no requests either
                return b""
            return response.body if response.status == 200 else b""

        workers = [worker for worker in self._fleet if worker.health == "ready"]
        async with asyncio.timeout(BROADCAST_S):
            answers = await asyncio.gather(*map(ask, workers))
        return max(answers, key=len, default=b"")

    async def _exchange(
        self, exchange: Exchange, worker: Worker, relay: Relay, client: asyncio.Task[None]
    ) -> None:
        """Give a request to one worker; its response is complete, whatever its status, or the worker was lost."""
        def leave(_: object) -> None:
            relay.abort()

        client.add_done_callback(leave)  # called soon if the client has left already
        worker.relays.add(relay)
        worker.load += exchange.tokens
        try:
            await worker.client.forward(exchange.method, exchange.target, exchange.headers, exchange.body, relay)
        except (OSError, ValueError) as error:
            await relay.flush()
            if not client.done():
                worker.note_lost(str(error) or type(error).__name__)
        finally:
            client.remove_done_callback(leave)
            worker.relays.discard(relay)
            worker.load -= exchange.tokens
            if relay.is_complete or not client.done():
                worker.note_outcome(failed=not relay.is_complete or relay.status in FAILURE_STATUSES)
                self._metrics.requests.labels(worker.url, str(relay.status) if relay.is_complete else "lost").inc()
            self._fleet.drop_if_drained(worker)

    def _begin_pair(
        self, path: str, exchange: Exchange, request: RoutedRequest, view: PromptView
    ) -> Pair | None:
        """Send the request to a prefill worker too, where there are any."""
        if self._pairing is None:
            return None
        return self._pairing.begin(path, exchange, request, text_of(view.model))

    def _choose(self, path: str, view: PromptView, request: RoutedRequest, tried: list[Worker]) -> Worker:
        home = self._stored.get(_stored_id(path, view)) if self._stored else None
        for worker in self._fleet if home is not None else ():
            if worker.url == home and worker.takes_requests and worker not in tried:
                return worker
        worker, choice = self._fleet.choose(request, text_of(view.model), tried)
        self._metrics.cached_tokens.inc(choice.cached_len)
        return worker

    def _headers_for_worker(self, scope: Scope) -> RawHeaders:
        headers = end_to_end(scope["headers"], OWN_HEADERS if self._key is None else OWN_HEADERS | KEY_HEADERS)
        if self._key is not None:
            headers.append((b"authorization", b"Bearer " + self._key.encode()))
        address = str((scope.get("client") or ("", 0))[0]).encode()
        if address:
            earlier = [value for name, value in headers if name == b"x-forwarded-for"]
            headers = [header for header in headers if header[0] != b"x-forwarded-for"]
            headers.append((b"x-forwarded-for", b", ".join([*earlier, address])))
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


async def _await_end(receive: Receive) -> None:
    """Return when the client has left, or has its response."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end_stream(relay: Relay, scope: Scope, send: Send) -> None:
    """A worker was lost in the middle of its response: say so where the body has a place for it; otherwise the
    connection is closed, which the client notices, as the body is not complete."""
    last = end_of_stream(EngineUnavailable(LOST, retry_after=RETRY_AFTER_S), scope, relay.media_type)
    if last is not None:
        await send({"type": "http.response.body", "body": last, "more_body": False})
