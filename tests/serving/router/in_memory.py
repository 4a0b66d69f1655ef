"""A router whose sockets are in memory: what is sent when is up to the test."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from uvicorn.server import ServerState

from headrace.serving.http.transport.connection import ClientConnection
from headrace.serving.http_client import Exchange, HttpClient, _Connection
from headrace.serving.router.app import Router
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.front import RouterFront
from headrace.serving.router.options import RouterOptions, WorkerOptions
from headrace.serving.router.workers import Breaker, Worker


class _Socket(socket.socket):
    """Its options can be set."""

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.1", 5


class Transport:
    """What a protocol has written. As sockets do, it tells its protocol of an end only in the next turn."""

    def __init__(self, protocol: Any):
        self.protocol, self.sent, self.num_writes = protocol, bytearray(), 0
        self.is_over = self.is_reading_paused = self.has_sent_eof = False
        self._is_lost = False
        self._socket = _Socket()
        protocol.connection_made(self)

    def write(self, data: bytes) -> None:
        assert not self._is_lost, "written behind the end"
        if not self.is_over:
            assert data and not self.has_sent_eof
            self.sent += data
            self.num_writes += 1

    def write_eof(self) -> None:
        self.has_sent_eof = True

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            asyncio.get_running_loop().call_soon(self.lose)

    abort = close

    def lose(self, error: Exception | None = None) -> None:
        self.is_over = True
        if not self._is_lost:
            self._is_lost = True
            self._socket.close()
            self.protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        assert not self.is_reading_paused
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        assert self.is_reading_paused
        self.is_reading_paused = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def receive(self, data: bytes) -> bool:
        """Give what the other side has sent; False while it is not read."""
        if self.is_over or self.is_reading_paused:
            return False
        self.protocol.data_received(data)
        return True

    def receive_eof(self) -> None:
        if not self.is_over and not self.protocol.eof_received():
            self.close()


@dataclass
class _Config:
    """The part of uvicorn's configuration that `ClientConnection` reads."""

    loaded_app: Any


class MemoryRouter:
    """``num_workers`` workers; ``workers`` has the connections to them, in the order in which they were made."""

    def __init__(self, num_workers: int = 2, options: RouterOptions | None = None):
        options = options or RouterOptions(port=0, policy="round-robin")
        self.fleet = Fleet(WorkerOptions(), options.policy)
        self.router = Router(self.fleet, options)
        self.workers: list[Transport] = []
        self._state, self._front = ServerState(), RouterFront(self.router, options)
        for index in range(num_workers):
            client = HttpClient(f"http://worker{index}:80")
            client._connect = lambda exchange, client=client: self._connect(client, exchange)  # type: ignore
            worker = Worker(index, client.root, client, Breaker(5), health="ready")
            self.fleet._workers[worker.url] = worker

    def connect(self) -> Transport:
        """A client's connection."""
        config: Any = _Config(self._front)
        return Transport(ClientConnection(config, self._state, {}))

    async def _connect(self, client: HttpClient, exchange: Exchange) -> None:
        connection = _Connection(client._finish)
        self.workers.append(Transport(connection))
        exchange.connecting = None
        connection.start(exchange)

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        assert self.router.num_running == self.router.metrics.http.num_active == 0
        assert not any(worker.relays or worker.load for worker in self.fleet)


async def settle() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(6):
        await asyncio.sleep(0)
