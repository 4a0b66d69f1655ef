"""Servers that answer by script, and a router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.serving.http.listening import open_listener
from headrace.serving.http_client import HttpClient
from headrace.serving.router.app import Router
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.options import RouterOptions, WorkerOptions
from headrace.serving.router.server import create_server


@dataclass
class Asked:
    """A request as a worker got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


def reply(status: int, content: Any, *headers: str) -> bytes:
    """A whole JSON response."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


EVENTS_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def events(*texts: str) -> list[bytes]:
    """A stream of events, a piece each, that ends as it should."""
    return [EVENTS_HEAD, *(chunk(b"data: %b\n\n" % text.encode()) for text in texts), chunk(b"data: [DONE]\n\n"),
            b"0\r\n\r\n"]


Answer = bytes | list[bytes | asyncio.Event] | None
"""The bytes of a response; pieces, with events to wait for in between; None: close without a response."""


@dataclass
class Worker:
    """``answer`` is called for each request but those for health and models. After the last piece of a list that does
    not end a response the connection is closed."""

    name: str = "worker"
    models: tuple[str, ...] = ("m",)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    answer: Callable[[Asked], Answer] | None = None
    status: int = 200
    asked: list[Asked] = field(default_factory=list)
    num_lost_clients: int = 0
    is_stopped: bool = False
    num_checks: int = 0
    """Health checks that were answered."""
    listing: bytes | None = None
    """Answers ``/v1/models`` instead of ``models``."""
    url: str = ""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and all connections, as a killed process does."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router has left
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        asked = Asked(method, target, headers, await reader.readexactly(int(headers.get("content-length", 0))))
        while self.is_stopped:
            await asyncio.sleep(0.01)
        if target in ("/ready", "/v1/models"):
            content = {"data": [{"id": model, "from": self.name, **self.cards.get(model, {})} for model in self.models]}
            listed = target == "/v1/models" and self.listing is not None
            writer.write(reply(self.status, self.listing if listed else content))
            self.num_checks += target == "/ready"
            return True
        self.asked.append(asked)
        answer = self.answer(asked) if self.answer else reply(200, {"from": self.name})
        if answer is None:
            return False
        try:
            return await self._send(answer, reader, writer)
        except ConnectionError:
            self.num_lost_clients += 1
            raise

    async def _send(self, answer: bytes | list, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in [answer] if isinstance(answer, bytes) else answer:
            if isinstance(piece, asyncio.Event):
                gone = asyncio.ensure_future(reader.read(1))
                waiting = asyncio.ensure_future(piece.wait())
                await asyncio.wait({gone, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    raise ConnectionResetError
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await gone
            else:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        return isinstance(answer, bytes) or answer[-1:] == [b"0\r\n\r\n"]


@dataclass
class Running:
    """A router that runs, and a client of it."""

    router: Router
    fleet: Fleet
    client: HttpClient
    port: int

    async def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The status, and the content of a JSON response."""
        response = await self.client.send("POST", path, json.dumps(body).encode(), headers=headers)
        return response.status, json.loads(response.body)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, 10 s at most."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_ready(self, num_workers: int) -> None:
        """Wait until so many workers take requests."""
        await self.until(lambda: sum(worker.takes_requests for worker in self.fleet) >= num_workers)


@asynccontextmanager
async def routing(
    *workers: Worker, options: RouterOptions | None = None, prefill: Sequence[Worker] = (),
    awaits_prefill: bool = False, **worker_options: Any
) -> AsyncIterator[Running]:
    """Start workers and a router over them, with ``prefill`` workers beside. Health is checked often."""
    options = options or RouterOptions(port=0, policy="round-robin")
    for worker in (*prefill, *workers):
        await worker.start()
    settings = WorkerOptions(**{"health_interval_s": 0.05, "health_timeout_s": 0.5, **worker_options})
    fleet = Fleet(settings, options.policy)
    prefills = Fleet(settings, options.policy, is_prefill=True) if prefill else None
    router = Router(fleet, options, prefills, awaits_prefill=awaits_prefill)
    server = create_server(router, options)
    with open_listener(options) as listener:
        serving = asyncio.create_task(server.run(listener))
        port = listener.getsockname()[1]
        client = HttpClient(f"http://127.0.0.1:{port}", timeout_s=10)
        running = Running(router, fleet, client, port)
        try:
            for worker in workers:
                fleet.add(worker.url)
            await running.until_ready(sum(worker.status == 200 for worker in workers))
            if prefills is not None:
                for worker in prefill:
                    added = prefills.add(worker.url)
                    await running.until(lambda: added.takes_requests == (worker.status == 200))  # noqa: B023
            await running.until(lambda: server.is_started)
            yield running
        finally:
            client.close()
            await fleet.close()
            if prefills is not None:
                await prefills.close()
            server.end(at_once=True)
            await serving
            for worker in (*prefill, *workers):
                await worker.stop()
