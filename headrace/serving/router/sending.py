"""`Sender`: gives requests to the workers of a fleet, and keeps the accounts of each: load, failures, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from headrace.serving.http_client import Exchange, RawHeaders, ResponseSink
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.workers import FAILURE_STATUSES, Worker


@dataclass(slots=True)
class WorkerRequest:
    """A request as it is sent to a worker. ``tokens``: the load that it adds there. ``has_deadline``: the client gives
    it so many seconds."""

    method: str
    target: bytes
    headers: RawHeaders
    body: bytes
    tokens: int
    has_deadline: bool = False

    def blames_worker(self, status: int) -> bool | None:
        """Whether a response with this status is a failure of the worker, for its breaker; None if it says nothing of
        it: a client that chooses how long its requests may take must not keep a worker from others. Reading what a
        worker knows is no inference, whether it succeeds or not."""
        if self.method != "POST" or (self.has_deadline and status == HTTPStatus.GATEWAY_TIMEOUT):
            return None
        return status in FAILURE_STATUSES


class WorkerSink(ResponseSink, Protocol):
    """Takes the response of a worker. When it is not wanted any more, the worker is not blamed for its loss."""

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for it."""

    def abort(self) -> None:
        """Give it up, as if its connection had broken."""


class Sender:
    """Sends to workers of one fleet."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics):
        self.fleet, self._metrics = fleet, metrics

    def send(
        self, worker: Worker, request: WorkerRequest, sink: WorkerSink, on_end: Callable[[], None] | None = None
    ) -> Exchange:
        """Begin an exchange; ``on_end`` is called when its response is complete, or the worker was lost."""
        def end(error: Exception | None) -> None:
            worker.release(sink, request.tokens)
            if error is None:
                self._metrics.count(worker.url, str(sink.status))
                is_failure = request.blames_worker(sink.status)
                if is_failure is not None:
                    worker.note_outcome(failed=is_failure)
            elif sink.is_wanted:
                worker.note_lost(str(error) or type(error).__name__)
                self._metrics.count(worker.url, "lost")
                worker.note_outcome(failed=True)
            self.fleet.drop_if_drained(worker)
            if on_end is not None:
                on_end()

        worker.admit(sink, request.tokens)
        return worker.client.start(request.method, request.target, request.headers, request.body, sink, end)
