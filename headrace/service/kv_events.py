"""`EventPublisher`: KV events over ZeroMQ, as vLLM publishes them, on a thread; `EventGate`: takes them from the
scheduler. Leads to pyzmq (``headrace[kv-events]``).

A message has three parts: the topic, its number (8 bytes, big-endian), and a `KvEventBatch` in msgpack. A subscriber
that missed some asks the replay endpoint (ROUTER) for all from a number on, and gets them, then one numbered -1 without
contents.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.kv_events import KvEvent, KvEventBatch, KvEventOptions, shift_endpoint
from headrace.base.messages import EngineRequest
from headrace.scheduling.changes import PrefixChanges

logger = logging.getLogger(__name__)

NUMBER_BYTES = 8
LAST = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
POLL_S = 0.05
LINGER_MS = 500


class EventPublisher:
    """Publishes the KV events of one engine. ``replica`` is added to ports, so that each replica has its own. Raises
    `ConfigError` if an endpoint cannot be opened."""

    def __init__(self, options: KvEventOptions, replica: int = 0):
        zmq = import_zmq()
        self._options, self._replica = options, replica
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(options.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._next, self._num_dropped = 0, 0
        self._context = zmq.Context()
        self._replays = None
        try:
            self._publisher = self._open(zmq.PUB, options.endpoint)
            if options.replay_endpoint is not None:
                self._replays = self._open(zmq.ROUTER, options.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events cannot be published: {error}", param="kv_events_config") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KvEvent]) -> None:
        """Send without waiting. What finds the queue full is dropped; subscribers see a gap in the numbers."""
        payload = msgspec.msgpack.encode(KvEventBatch(time.time(), events, self._replica))
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, payload))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning("KV events are dropped: more than %d messages wait", self._options.max_queue_size)

    def close(self) -> None:
        """Send what waits, briefly, and end."""
        try:
            self._queue.put(None, timeout=POLL_S)
        except queue.Full:
            return  # the thread is a daemon
        self._thread.join(timeout=1.0)

    def _open(self, kind: int, endpoint: str) -> Any:
        line = self._context.socket(kind)
        line.set_hwm(self._options.hwm)
        endpoint = shift_endpoint(endpoint, self._replica)
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            line.bind(endpoint)
            if endpoint.startswith("tcp://"):
                logger.warning(
                    "%s tells anyone who reaches it what prompts and outputs consist of: keep others away from it, or "
                    "set an ipc:// endpoint or that of a subscriber in kv_events_config", endpoint
                )
        else:
            line.connect(endpoint)
        return line

    def _run(self) -> None:
        topic = self._options.topic.encode()
        while True:
            if self._replays is not None and self._replays.poll(0):
                self._replay(self._replays)
            try:
                message = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if message is None:
                break
            self._sent.append(message)
            number, payload = message
            self._publisher.send_multipart((topic, number.to_bytes(NUMBER_BYTES, "big"), payload))
        self._context.destroy(linger=LINGER_MS)

    def _replay(self, line: Any) -> None:
        """Answer one request: its client, an empty part, and the first number wanted."""
        parts = line.recv_multipart()
        if len(parts) != 3 or len(parts[2]) != NUMBER_BYTES:
            logger.warning("a request for KV events has %d parts, not a client, nothing and a number", len(parts))
            return
        client, first = parts[0], int.from_bytes(parts[2], "big")
        for number, payload in self._sent:
            if number >= first:
                line.send_multipart((client, b"", number.to_bytes(NUMBER_BYTES, "big"), payload))
        line.send_multipart((client, b"", LAST, b""))


class EventGate:
    """A request coordinator that holds nothing: it is called in every step."""

    def __init__(self, publisher: EventPublisher, changes: PrefixChanges):
        self._publisher, self._changes = publisher, changes
        changes.begin()

    @property
    def is_waiting(self) -> bool:
        """See `RequestCoordinator`."""
        return False

    def concerns(self, request: EngineRequest) -> bool:
        """See `RequestCoordinator`."""
        return False

    def hold(self, request: EngineRequest) -> None:
        """See `RequestCoordinator`."""

    def poll(self) -> list[tuple[EngineRequest, HeadraceError | None]]:
        """See `RequestCoordinator`."""
        if self._changes.has_events:
            self._publisher.publish(self._changes.take())
        return []

    def pause(self) -> None:
        """See `RequestCoordinator`."""

    def decline(self, rooms: Sequence[str], reason: str) -> None:
        """See `headrace.service.coordination.Gate`, here and below."""

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()


def import_zmq() -> Any:
    """The module ``zmq``; raises `ConfigError`."""
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("KV events need ZeroMQ; install headrace[kv-events]", param="kv_events_config") from error
    return zmq
