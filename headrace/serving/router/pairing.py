"""`Pairing`: prefill workers beside those that answer. A request goes to both: the prefill worker computes its prompt
and sends the KV pages to the other, by the room that the router names in both bodies (SGLang's fields ``bootstrap_*``).

Refuses: waiting for prefill workers. Where one fails, the decode worker finds out and computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace

import msgspec

from headrace.base.errors import EngineUnavailable
from headrace.service.balancing import RoutedRequest
from headrace.serving.http_client import RawHeaders
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.workers import FAILURE_STATUSES, Worker

PAIRED = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""Routes whose bodies name a room. Requests of other routes are computed by decode workers alone."""
NO_PLACES: dict[str, object] = dict.fromkeys(
    ("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params")
)


@dataclass(frozen=True)
class Exchange:
    """What is sent to a worker. ``tokens``: its load there."""

    method: str
    target: bytes
    headers: RawHeaders
    body: bytes
    tokens: int


class _Sink:
    """A `ResponseSink` for a response that nobody reads."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self._transport: asyncio.Transport | None = None
        self._is_aborted = False

    def connected(self, transport: asyncio.Transport) -> None:
        """See `ResponseSink`."""
        self._transport = transport
        if self._is_aborted:
            transport.abort()

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        self.status = status

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""

    def abort(self) -> None:
        """Break the exchange."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()


class Pair:
    """One request at a prefill worker. ``exchange``: what goes to both workers."""

    def __init__(self, fleet: Fleet, worker: Worker, exchange: Exchange, metrics: RouterMetrics):
        self.exchange = exchange
        self._fleet, self._worker, self._metrics = fleet, worker, metrics
        self._sink = _Sink()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self, *, is_answered: bool) -> None:
        """The decode worker has answered, or was lost; then the prompt is of no use."""
        if not is_answered:
            self._task.cancel()

    async def _run(self) -> None:
        worker, exchange, sink = self._worker, self.exchange, self._sink
        worker.relays.add(sink)
        worker.load += exchange.tokens
        try:
            await worker.client.forward(exchange.method, exchange.target, exchange.headers, exchange.body, sink)
        except (OSError, ValueError) as error:
            worker.note_lost(str(error) or type(error).__name__)
        finally:
            worker.relays.discard(sink)
            worker.load -= exchange.tokens
            self._metrics.requests.labels(worker.url, str(sink.status) if sink.is_complete else "lost").inc()
            self._fleet.drop_if_drained(worker)
        worker.note_outcome(failed=not sink.is_complete or sink.status in FAILURE_STATUSES)


class Pairing:
    """Chooses a prefill worker for each request."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics):
        self.fleet, self._metrics = fleet, metrics

    def strip(self, path: str, exchange: Exchange) -> Exchange:
        """The request without places of an exchange that its client has named: only the router decides from where a
        decode worker takes pages."""
        return replace(exchange, body=add_fields(exchange.body, NO_PLACES)) if path in PAIRED else exchange

    def begin(self, path: str, exchange: Exchange, request: RoutedRequest, model: str) -> Pair | None:
        """Send a request to a prefill worker; None where there is none that takes requests, or nothing to exchange."""
        if path not in PAIRED:
            return None
        try:
            worker, choice = self.fleet.choose(request, model, ())
        except EngineUnavailable:
            return None
        self._metrics.cached_tokens.inc(choice.cached_len)
        body = name_room(exchange.body, worker.host, worker.bootstrap_port)
        return Pair(self.fleet, worker, replace(exchange, body=body), self._metrics)


def name_room(body: bytes, host: str, port: int) -> bytes:
    """A JSON object with the place of an exchange added."""
    fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(63)}
    return add_fields(body, fields)


def add_fields(body: bytes, fields: dict[str, object]) -> bytes:
    """A JSON object with fields added; its own ones with these names do not count, as the last one does. What is no
    object stays as it is, and is refused by the worker."""
    if not body.rstrip().endswith(b"}"):
        return body
    begin = body.rstrip()[:-1].rstrip()
    return begin + (b"" if begin.endswith(b"{") else b",") + msgspec.json.encode(fields)[1:]
