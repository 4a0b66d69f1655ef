"""`Pairing`: prefill workers beside those that answer. A request goes to both: the prefill worker computes its prompt
and sends the KV pages to the other, by the room that the router names in both bodies (SGLang's fields ``bootstrap_*``).

Refuses: waiting for prefill workers. Where one fails, the decode worker finds out and computes the prompt itself.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import msgspec

from headrace.base.disaggregation import BOOTSTRAP_PORT
from headrace.base.errors import EngineUnavailable
from headrace.service.balancing import RoutedRequest
from headrace.serving.http_client import Exchange, RawHeaders
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.sending import Sender, WorkerRequest

PAIRED = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""Routes whose bodies name a room. Requests of other routes are computed by decode workers alone."""
NO_PLACES: dict[str, object] = dict.fromkeys(
    ("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params")
)


class Pair:
    """One request at a prefill worker, whose response nobody reads; a `WorkerSink`. ``request``: what goes to both
    workers."""

    def __init__(self, request: WorkerRequest):
        self.request = request
        self.status = 0
        self.is_complete, self.is_wanted = False, True
        self.exchange: Exchange | None = None

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        self.status = status

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""

    def abort(self) -> None:
        """See `WorkerSink`."""
        if self.exchange is not None:
            self.exchange.abort()

    def end(self, *, is_answered: bool) -> None:
        """The decode worker has answered, or has refused or was lost; then the prompt is of no use."""
        if not is_answered:
            self.is_wanted = False
            self.abort()


class Pairing:
    """Chooses a prefill worker for each request."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics):
        self.fleet, self._metrics, self._sender = fleet, metrics, Sender(fleet, metrics)

    def strip(self, path: str, request: WorkerRequest) -> WorkerRequest:
        """The request without places of an exchange that its client has named: only the router decides from where a
        decode worker takes pages."""
        return replace(request, body=add_fields(request.body, NO_PLACES)) if path in PAIRED else request

    def begin(self, path: str, request: WorkerRequest, routed: RoutedRequest, model: str) -> Pair | None:
        """Send a request to a prefill worker; None where there is none that takes requests, or nothing to exchange."""
        if path not in PAIRED:
            return None
        try:
            worker, choice = self.fleet.choose(routed, model, ())
        except EngineUnavailable:
            return None
        self._metrics.cached_tokens.inc(choice.cached_len)
        body = name_room(request.body, worker.host, worker.bootstrap_port or BOOTSTRAP_PORT)
        pair = Pair(replace(request, body=body))
        pair.exchange = self._sender.send(worker, pair.request, pair)
        return pair


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
