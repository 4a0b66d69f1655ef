"""What the router costs: ``python -m benchmarks.router [--rate 2000] [--seconds 5] [--streams 64] [--chunks 200]``.

Workers that answer at once, a router, and a client, each a process. Prints

- the latency of small requests at a fixed rate, straight to a worker and through the router, and what that adds
- the router's processor time a request, and a relayed chunk of a stream
- how many streams run at once without one that fails (``--most-streams``)
- the same two times of a relay that copies bytes between connections and knows no HTTP: what the system and the event
  loop take, below which no router in Python comes

Processor time says more than the clock on a machine that does something else, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from headrace.serving.http_client import HttpClient, HttpResponse, loop_factory

CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
FRAMED = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
EVENTS_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SMALL = b'{"choices":[{"text":" token"}]}'
BASE_PORT = 9310


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
        self.other, _ = await loop.create_connection(lambda: BareRelay(0, self.transport), "127.0.0.1", self.target)
        self.other.write(self.pending)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.pending += data
        else:
            self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


async def serve_bare(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BareRelay(BASE_PORT), "127.0.0.1", port, backlog=8192)
    await server.serve_forever()


async def serve_worker(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(WorkerProtocol, "127.0.0.1", port, backlog=8192)
    await server.serve_forever()


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
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


def cpu_s(process: psutil.Process) -> float:
    """Seconds on a processor, to the nanosecond: `cpu_times` counts ticks of ten milliseconds."""
    found = Path("/proc", str(process.pid), "task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in found) / 1e9


async def measure_bare(options: argparse.Namespace, relay: psutil.Process, body: bytes) -> tuple[float, float]:
    """Microseconds of processor time of `BareRelay`, a request and a chunk; the medians of the rounds."""
    client, costs = HttpClient(f"http://127.0.0.1:{BASE_PORT + 8}", timeout_s=120), []
    await until_ready(client)
    await send_at_rate(client, 200, 0.5, body)
    for _ in range(options.rounds):
        begin = cpu_s(relay)
        count = len(await send_at_rate(client, options.rate, options.seconds, body))
        middle = cpu_s(relay)
        await stream_many(client, options.streams, options.chunks, options.pause_s)
        chunk = (cpu_s(relay) - middle) / (options.streams * options.chunks)
        costs.append(((middle - begin) / count * 1e6, chunk * 1e6))
    client.close()
    request, chunk = (statistics.median(column) for column in zip(*costs, strict=True))
    return request, chunk


async def measure(options: argparse.Namespace, router: psutil.Process, bare: psutil.Process) -> None:
    straight = HttpClient(f"http://127.0.0.1:{BASE_PORT}", timeout_s=120)
    routed = HttpClient(f"http://127.0.0.1:{BASE_PORT + 9}", timeout_s=120)
    await until_ready(straight)
    await until_ready(routed)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * options.words}]}).encode()
    for client in (straight, routed):
        await send_at_rate(client, 200, 0.5, body)
    table = Table(box=None, pad_edge=False)
    for column in ("", "p50 ms", "p99 ms", "router's CPU"):
        table.add_column(column, justify="left" if not column else "right")
    medians: dict[str, list[float]] = {"straight": [], "routed": []}
    for _ in range(options.rounds):
        for name, client in (("straight", straight), ("routed", routed)):
            begin = cpu_s(router)
            times = sorted(await send_at_rate(client, options.rate, options.seconds, body))
            used = cpu_s(router) - begin
            medians[name].append(statistics.median(times) * 1e3)
            p99 = times[int(0.99 * len(times))] * 1e3
            cost = f"{used / len(times) * 1e6:.0f} us a request" if name == "routed" else ""
            table.add_row(
                f"{name}, {len(times) / options.seconds:.0f} requests/s", f"{medians[name][-1]:.2f}", f"{p99:.2f}", cost
            )
    added = statistics.median(medians["routed"]) - statistics.median(medians["straight"])
    table.add_row("added, median of the rounds", f"{added:.2f}")
    for _ in range(options.rounds):
        begin = cpu_s(router)
        whole = await stream_many(routed, options.streams, options.chunks, options.pause_s)
        per_chunk = (cpu_s(router) - begin) / (options.streams * options.chunks) * 1e6
        label = f"{options.streams} streams of {options.chunks} chunks, {whole} whole"
        table.add_row(label, "", "", f"{per_chunk:.1f} us a chunk")
    if options.most_streams:
        begin = cpu_s(router)
        whole = await stream_many(routed, options.most_streams, 20, 0.5)
        table.add_row(
            f"{options.most_streams} streams at once, {whole} whole", "", "", f"{cpu_s(router) - begin:.1f} s in all"
        )
    request, chunk = await measure_bare(options, bare, body)
    table.add_row("a relay without HTTP", "", "", f"{request:.0f} us a request, {chunk:.1f} us a chunk")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=100, help="length of a prompt")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--pause-s", type=float, default=0.01)
    parser.add_argument("--most-streams", type=int, default=0)
    parser.add_argument("--policy", default="cache-aware")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if options.worker is not None:
            runner.run(serve_worker(options.worker))
            return
        if options.bare is not None:
            runner.run(serve_bare(options.bare))
            return
        ports = [BASE_PORT, BASE_PORT + 1]
        with contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(running(["benchmarks.router", "--worker", str(port)]))
            time.sleep(1.0)  # the bare relay expects a worker
            bare = stack.enter_context(running(["benchmarks.router", "--bare", str(BASE_PORT + 8)]))
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            command = ["headrace", "router", *urls, "--port", str(BASE_PORT + 9), "--policy", options.policy]
            runner.run(measure(options, stack.enter_context(running(command)), bare))


if __name__ == "__main__":
    main()
