"""What the router costs: ``python -m benchmarks.router [--rate 2000] [--seconds 5] [--streams 64] [--chunks 200]``.

Workers that answer at once, a router, and a client, each a process. Prints

- the latency of small requests at a fixed rate, straight to a worker and through the router, and what that adds
- the router's processor time a request, and a relayed chunk of a stream
- how many requests a second one core of it relays, from connections that send the next request with each response
- how many streams run at once without one that fails (``--most-streams``)
- the same times of two relays that copy bytes between connections: one that knows no HTTP, which tells what the system
  and the event loop take, and one that also parses both sides with httptools, below which no router in Python comes

Processor time says more than the clock on a machine that does something else, too. ``--cpus 0,1,2,3`` gives the
workers, the router, the client and the other relays a processor each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httptools
from rich.console import Console
from rich.table import Table

from headrace.serving.http_client import HttpClient, HttpResponse, loop_factory

CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
FRAMED = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
EVENTS_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SMALL = b'{"choices":[{"text":" token"}]}'
BASE_PORT = 9310
RELAYS = {"bare": BASE_PORT + 7, "parsing": BASE_PORT + 8}
ROUTER_PORT = BASE_PORT + 9
SHOWN = {"bare": "a relay without HTTP", "parsing": "a relay that parses HTTP"}


class WorkerProtocol(asyncio.Protocol):
    """Answers POST with a small body, or with a stream of ``n`` chunks, ``pause_s`` apart, and GET with 200."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head, length = self.buffer[:end].lower(), 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n")[0])
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            if b'"stream"' in body:
                asyncio.get_running_loop().create_task(self.stream(json.loads(body)))
            else:
                answer = SMALL if head.startswith(b"post") else b'{"data":[{"id":"m"}]}'
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(answer), answer)
                )

    async def stream(self, options: dict) -> None:
        self.transport.write(EVENTS_HEAD)
        for _ in range(options["n"]):
            await asyncio.sleep(options["pause_s"])
            self.transport.write(FRAMED)
        self.transport.write(b"0\r\n\r\n")


class BareRelay(asyncio.Protocol):
    """A connection of a client, and one to a worker: what comes in one goes out of the other. ``other`` is None while
    the second is being made."""

    def __init__(self, target: int, other: Any = None):
        self.target, self.other, self.pending = target, other, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self.other is None:
            asyncio.get_running_loop().create_task(self.join())

    async def join(self) -> None:
        loop = asyncio.get_running_loop()
        self.other, _ = await loop.create_connection(
            lambda: type(self)(0, self.transport), "127.0.0.1", self.target
        )
        self.other.write(self.pending)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.pending += data
        else:
            self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class ParsingRelay(BareRelay):
    """Also parses requests and responses, and notes their headers, but passes bytes on as they are."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parser = (httptools.HttpResponseParser if self.other else httptools.HttpRequestParser)(self)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.headers.clear()

    def on_body(self, piece: bytes) -> None:
        """As a router, which needs the body."""

    def on_message_complete(self) -> None:
        """As a router, which notes the end."""


KINDS: dict[str, type[BareRelay]] = {"bare": BareRelay, "parsing": ParsingRelay}


async def serve_relay(kind: str) -> None:
    loop, relay = asyncio.get_running_loop(), KINDS[kind]
    server = await loop.create_server(lambda: relay(BASE_PORT), "127.0.0.1", RELAYS[kind], backlog=8192)
    await server.serve_forever()


async def serve_worker(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(WorkerProtocol, "127.0.0.1", port, backlog=8192)
    await server.serve_forever()


class Repeater(asyncio.Protocol):
    """Sends its request again with each response, until ``is_over``."""

    def __init__(self, request: bytes):
        self.request, self.num_answered, self.is_over, self.tail = request, 0, False, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-len(SMALL) :]
        if self.tail == SMALL:
            self.num_answered += 1
            if not self.is_over:
                self.transport.write(self.request)


@contextlib.contextmanager
def running(command: list[str], cpu: int | None) -> Iterator[int]:
    """A process; yields its id."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if cpu is not None:
            os.sched_setaffinity(process.pid, {cpu})  # its threads have it from the one that starts them
        yield process.pid
    finally:
        process.terminate()
        process.wait()


async def until_ready(client: HttpClient) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                if (await client.send("GET", "/ready")).status == 200:
                    return
            await asyncio.sleep(0.05)


async def send_at_rate(client: HttpClient, rate: float, seconds: float, body: bytes) -> list[float]:
    """Latencies in seconds of requests that begin at random times, ``rate`` a second."""
    loop, times, tasks, dice = asyncio.get_running_loop(), [], [], random.Random(0)

    async def one() -> None:
        begin = time.perf_counter()
        response = await client.send("POST", "/v1/completions", body)
        assert response.status == 200, response.body
        times.append(time.perf_counter() - begin)

    begin = at = loop.time()
    while at < begin + seconds:
        at += dice.expovariate(rate)
        if (wait_s := at - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.ensure_future(one()))
    await asyncio.gather(*tasks)
    return times


async def stream_many(client: HttpClient, num_streams: int, chunks: int, pause_s: float) -> int:
    """How many of the streams came whole."""
    body = json.dumps({"stream": True, "n": chunks, "pause_s": pause_s, "model": "m", "prompt": "x"}).encode()

    async def one() -> bool:
        response = HttpResponse()
        try:
            await client.send("POST", "/v1/completions", body, response=response)
        except OSError:
            return False
        return response.status == 200 and len(response.body) == chunks * len(CHUNK)

    return sum(await asyncio.gather(*(one() for _ in range(num_streams))))


async def saturate(port: int, body: bytes, seconds: float, num_connections: int) -> int:
    """How many requests were answered."""
    loop = asyncio.get_running_loop()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\ncontent-type: application/json\r\n"
    request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    made = [await loop.create_connection(lambda: Repeater(request), "127.0.0.1", port) for _ in range(num_connections)]
    await asyncio.sleep(seconds)
    for _, repeater in made:
        repeater.is_over = True
    num_answered = sum(repeater.num_answered for _, repeater in made)
    await asyncio.sleep(0.2)
    for transport, _ in made:
        transport.close()
    return num_answered


def cpu_s(pid: int) -> float:
    """Seconds on a processor, to the nanosecond."""
    found = Path("/proc", str(pid), "task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in found) / 1e9


async def measure_relay(options: argparse.Namespace, port: int, pid: int, body: bytes) -> tuple[float, float, float]:
    """Microseconds of processor time of a relay: a request at the rate, one when it has no rest, and a chunk; the least
    of the rounds."""
    client, costs = HttpClient(f"http://127.0.0.1:{port}", timeout_s=120), []
    await until_ready(client)
    await send_at_rate(client, 200, 0.5, body)
    for _ in range(options.rounds):
        used = [cpu_s(pid)]
        paced = len(await send_at_rate(client, options.rate, options.seconds, body))
        used.append(cpu_s(pid))
        repeated = await saturate(port, body, options.seconds, options.connections)
        used.append(cpu_s(pid))
        await stream_many(client, options.streams, options.chunks, options.pause_s)
        used.append(cpu_s(pid))
        counts = (paced, repeated, options.streams * options.chunks)
        costs.append([(used[n + 1] - used[n]) / count * 1e6 for n, count in enumerate(counts)])
    client.close()
    request, busy, chunk = (min(column) for column in zip(*costs, strict=True))
    return request, busy, chunk


async def measure_latency(options: argparse.Namespace, table: Table, pid: int, body: bytes) -> None:
    """What the router adds, in turns with a worker alone."""
    clients = {
        "straight": HttpClient(f"http://127.0.0.1:{BASE_PORT}", timeout_s=120),
        "routed": HttpClient(f"http://127.0.0.1:{ROUTER_PORT}", timeout_s=120),
    }
    for client in clients.values():
        await until_ready(client)
        await send_at_rate(client, 200, 0.5, body)
    medians: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(options.rounds):
        for name, client in clients.items():
            begin = cpu_s(pid)
            times = sorted(await send_at_rate(client, options.rate, options.seconds, body))
            used = cpu_s(pid) - begin
            medians[name].append(statistics.median(times) * 1e3)
            p99 = times[int(0.99 * len(times))] * 1e3
            cost = f"{used / len(times) * 1e6:.0f} us a request" if name == "routed" else ""
            table.add_row(
                f"{name}, {len(times) / options.seconds:.0f} requests/s", f"{medians[name][-1]:.2f}", f"{p99:.2f}", cost
            )
    added = [routed - straight for straight, routed in zip(medians["straight"], medians["routed"], strict=True)]
    table.add_row("added, median of the rounds", f"{statistics.median(added):.2f}")
    table.add_row("added, best round", f"{min(added):.2f}")
    for client in clients.values():
        client.close()


async def measure(options: argparse.Namespace, pid: int, relays: dict[str, int]) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * options.words}]}).encode()
    table = Table(box=None, pad_edge=False)
    for column in ("", "p50 ms", "p99 ms", "processor time"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    await measure_latency(options, table, pid, body)
    routed = HttpClient(f"http://127.0.0.1:{ROUTER_PORT}", timeout_s=120)
    for _ in range(options.rounds):
        begin = cpu_s(pid)
        whole = await stream_many(routed, options.streams, options.chunks, options.pause_s)
        per_chunk = (cpu_s(pid) - begin) / (options.streams * options.chunks) * 1e6
        label = f"{options.streams} streams of {options.chunks} chunks, {whole} whole"
        table.add_row(label, "", "", f"{per_chunk:.1f} us a chunk")
    for _ in range(options.rounds):
        begin = cpu_s(pid)
        count = await saturate(ROUTER_PORT, body, options.seconds, options.connections)
        used = cpu_s(pid) - begin
        label = f"{options.connections} busy connections, {count / options.seconds:.0f} requests/s"
        table.add_row(label, "", "", f"{used / count * 1e6:.0f} us a request: {count / used:.0f} a second and core")
    if options.most_streams:
        begin = cpu_s(pid)
        whole = await stream_many(routed, options.most_streams, 20, 0.5)
        table.add_row(
            f"{options.most_streams} streams at once, {whole} whole", "", "", f"{cpu_s(pid) - begin:.1f} s in all"
        )
    routed.close()
    for kind, port in RELAYS.items():
        request, busy, chunk = await measure_relay(options, port, relays[kind], body)
        cost = f"{request:.0f} us a request, {busy:.0f} us if busy, {chunk:.1f} us a chunk"
        table.add_row(f"{SHOWN[kind]}, best round", "", "", cost)
    Console(width=140).print(table)


def read_cpus(given: str | None) -> Sequence[int | None]:
    """The processors of the workers, the router, the client and the other relays."""
    cpus: list[int] = [int(cpu) for cpu in given.split(",")] if given else []
    return [cpus[n % len(cpus)] if cpus else None for n in range(4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=100, help="length of a prompt")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--pause-s", type=float, default=0.01)
    parser.add_argument("--connections", type=int, default=64, help="connections that send without a rest")
    parser.add_argument("--most-streams", type=int, default=0)
    parser.add_argument("--policy", default="cache-aware")
    parser.add_argument("--cpus", help="processors of the workers, the router, the client and the other relays")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--relay", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if options.worker is not None:
            runner.run(serve_worker(options.worker))
            return
        if options.relay is not None:
            runner.run(serve_relay(options.relay))
            return
        of_workers, of_router, of_client, of_relays = read_cpus(options.cpus)
        if of_client is not None:
            os.sched_setaffinity(0, {of_client})
        ports = [BASE_PORT, BASE_PORT + 1]
        with contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(running(["benchmarks.router", "--worker", str(port)], of_workers))
            time.sleep(1.0)  # the other relays expect a worker
            relays = {
                kind: stack.enter_context(running(["benchmarks.router", "--relay", kind], of_relays)) for kind in KINDS
            }
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            command = ["headrace", "router", *urls, "--port", str(ROUTER_PORT), "--policy", options.policy]
            runner.run(measure(options, stack.enter_context(running(command, of_router)), relays))


if __name__ == "__main__":
    main()
