"""The router between a client and workers whose bytes are cut anywhere and come in any order, with h11 at both ends."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.router.in_memory import MemoryRouter, Transport, settle
from serving.router.test_reading import cut

from headrace.serving.http.transport import connection, endpoint
from headrace.serving.http.transport.connection import PROBE
from headrace.serving.router.options import RouterOptions

BODIES = st.binary(max_size=30).map(lambda body: json.dumps({"prompt": body.hex()}).encode())
EVENT = b"data: one\n\n"


def post(body: bytes, *lines: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = [b"POST %b HTTP/1.1" % path, b"host: a", b"content-length: %d" % len(body), *lines, b"", b""]
    return b"\r\n".join(head) + body


@dataclass
class Answered:
    """A response as h11 reads it: ``is_whole`` unless the connection ended before it."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes = b""
    is_whole: bool = False


def read_responses(sent: bytes, num_requests: int, *, is_over: bool, method: str = "POST") -> list[Answered]:
    """The responses to so many requests on one connection."""
    client, answered = h11.Connection(h11.CLIENT), []
    client.receive_data(sent)
    if is_over:
        client.receive_data(b"")
    for _ in range(num_requests):
        client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        while True:
            try:
                event = client.next_event()
            except h11.RemoteProtocolError as error:
                ended = ("without sending complete", "incomplete chunked", "event type ConnectionClosed")
                assert any(words in str(error) for words in ended), error
                return answered
            if isinstance(event, h11.Response):
                headers = {bytes(name): bytes(value) for name, value in event.headers}
                answered.append(Answered(event.status_code, headers))
            elif isinstance(event, h11.Data):
                answered[-1].body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                answered[-1].is_whole = True
                break
            elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return answered
        if client.their_state is not h11.DONE or client.our_state is not h11.DONE:
            return answered
        client.start_next_cycle()
    assert client.next_event() is h11.NEED_DATA or is_over, "more than was asked for"
    return answered


@dataclass
class Asked:
    """Requests as a worker's h11 reads them, on one connection."""

    transport: Transport
    requests: list[tuple[h11.Request, bytes]] = field(default_factory=list)
    num_read: int = 0
    answered: int = 0

    def look(self) -> bool:
        """Whether a request waits for its response."""
        self.requests.clear()
        server = h11.Connection(h11.SERVER)
        server.receive_data(bytes(self.transport.sent))
        request, body = None, b""
        while (event := server.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                self.requests.append((request, body))
                server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                server.send(h11.EndOfMessage())
                server.start_next_cycle()
        return len(self.requests) > self.answered


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, int, bytes, bool]:
    """The bytes of a worker's response, its status and body, and whether the connection ends behind it."""
    status = draw(st.sampled_from([200, 200, 201, 400, 404, 500]))
    body = draw(st.one_of(st.just(b""), st.binary(max_size=60), st.just(EVENT * 3)))
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\nlink: </a>\r\n\r\n"]))
    head = interim + b"HTTP/1.1 %d X\r\nx-own: 1\r\n" % status
    framing = draw(st.sampled_from(["length", "chunks", "end", "length, close"]))
    if framing.startswith("length"):
        close = b"connection: close\r\n" if "close" in framing else b""
        return head + close + b"content-length: %d\r\n\r\n" % len(body) + body, status, body, bool(close)
    if framing == "end":
        return head + b"\r\n" + body, status, body, True
    cuts = sorted(set(draw(st.lists(st.integers(1, max(1, len(body))), max_size=3))) | {0, len(body)})
    pieces = [body[begin:end] for begin, end in itertools.pairwise(cuts)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", status, body, False


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_request_gets_the_response_of_its_worker(data: st.DataObject):
    """Pipelined or not, in whatever pieces the bytes of both sides come, and whoever pauses whom."""
    bodies = data.draw(st.lists(BODIES, min_size=1, max_size=4))
    to_router = data.draw(cut(b"".join(post(body, b"x-n: %d" % n) for n, body in enumerate(bodies))))

    async def run() -> None:
        memory = MemoryRouter()
        client, asked, expected = memory.connect(), [], []
        to_worker: list[tuple[Transport, bytes | None]] = []  # None: it closes
        while True:
            await settle()
            asked += [Asked(transport) for transport in memory.workers[len(asked) :]]
            for worker in asked:
                if worker.look():
                    worker.answered += 1
                    assert all(piece is None for _, piece in to_worker), "a client's requests are answered in order"
                    request, body = worker.requests[-1]
                    headers = dict(request.headers)
                    assert body == bodies[len(expected)] and headers[b"x-n"] == b"%d" % len(expected)
                    assert headers[b"x-forwarded-for"] == b"10.0.0.1"
                    answer, status, content, ends = data.draw(responses())
                    expected.append((status, content))
                    to_worker += [(worker.transport, piece) for piece in data.draw(cut(answer))]
                    to_worker += [(worker.transport, None)] * ends
            if data.draw(st.integers(0, 3)) == 3:
                (client.protocol.resume_writing if client.protocol.is_paused else client.protocol.pause_writing)()
            elif to_router and not client.is_reading_paused and (not to_worker or data.draw(st.booleans())):
                client.receive(to_router.pop(0))
            elif to_worker:
                transport, piece = to_worker[0]
                if piece is None:
                    transport.lose()
                    to_worker.pop(0)
                elif transport.is_over or transport.receive(piece):
                    to_worker.pop(0)
                elif client.protocol.is_paused:
                    client.protocol.resume_writing()
            elif client.protocol.is_paused:  # the next request may wait for that
                client.protocol.resume_writing()
            elif not to_router or client.is_over:
                break
        found = read_responses(bytes(client.sent), len(bodies), is_over=client.is_over)
        assert [(each.status, each.body, each.is_whole) for each in found] == [(*each, True) for each in expected]
        assert len(found) == len(bodies) and not client.is_over
        assert all(each.headers[b"x-own"] == b"1" and b"x-request-id" in each.headers for each in found)
        memory.check_idle()

    asyncio.run(run())


BROKEN = [
    b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", b"HTTP/1.1 200 OK\r\ncontent-le",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nb\r\n" + EVENT + b"\r\n",
    b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}", b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"",
]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_what_a_broken_worker_sent_is_never_taken_for_a_response(data: st.DataObject):
    """It is asked of the others, or told: by a status, by an event, or by an incomplete body. Clients that leave at any
    moment leave nothing behind."""
    body, to_router = data.draw(BODIES), []
    for _ in range(num := data.draw(st.integers(1, 2))):
        to_router += data.draw(cut(post(body)))
    leaves = data.draw(st.sampled_from([None, None, "closes", "resets"]))

    async def run() -> None:
        memory = MemoryRouter(3)
        client, asked, num_sent = memory.connect(), [], 0
        while not client.is_over:
            await settle()
            asked += [Asked(transport) for transport in memory.workers[len(asked) :]]
            if leaves and data.draw(st.integers(0, 9)) == 9:
                client.receive_eof() if leaves == "closes" and to_router else client.lose(ConnectionResetError())
                break
            waiting = [worker for worker in asked if worker.look()]
            if to_router and not client.is_reading_paused and (not waiting or data.draw(st.booleans())):
                client.receive(to_router.pop(0))
            elif waiting:
                waiting[0].answered += 1
                answer = data.draw(st.sampled_from(BROKEN))
                for piece in data.draw(cut(answer)):
                    waiting[0].transport.receive(piece)
                    num_sent += 1
                waiting[0].transport.lose()
            else:
                break
        await settle()
        found = read_responses(bytes(client.sent), num, is_over=client.is_over)
        for each in found:
            if each.status == 200 and each.is_whole:
                assert each.body.startswith(EVENT) and b"engine_unavailable" in each.body
            elif each.status == 200:
                assert each.body in (b"", b"a", b"ab") and client.is_over
            else:
                assert each.status == 503 and each.is_whole
        client.lose()
        await settle()
        memory.check_idle()

    asyncio.run(run())


async def test_a_worker_may_answer_before_it_has_read_everything():
    """Its response is passed on, and its connection is used again: what it was sent is a whole request."""
    memory = MemoryRouter(1)
    client = memory.connect()
    for _ in range(2):
        client.receive(post(b"x" * 1000))
        await settle()
        memory.workers[0].receive(b"HTTP/1.1 413 X\r\ncontent-length: 2\r\n\r\nno")
    assert [(each.status, each.body) for each in read_responses(bytes(client.sent), 2, is_over=False)] == [
        (413, b"no"), (413, b"no")
    ]
    assert len(memory.workers) == 1
    memory.check_idle()


async def test_what_came_together_is_sent_together():
    memory = MemoryRouter(1)
    client, head = memory.connect(), b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    counts = []
    for pieces in ([head, chunk * 3, chunk, chunk + b"0\r\n\r\n"], [head + chunk + b"0\r\n\r\n"],
                   [b"HTTP/1.1 429 X\r\ncontent-length: 4\r\n\r\nno", b"no"], [b"HTTP/1.1 204 X\r\n\r\n"]):
        begin = client.num_writes
        client.receive(post(b"{}"))
        await settle()
        for piece in pieces:
            memory.workers[0].receive(piece)
        counts.append(client.num_writes - begin)
    assert counts == [3, 1, 1, 1], "the third was held back, as another worker might have taken the request"
    found = read_responses(bytes(client.sent), 4, is_over=False)
    assert [each.body for each in found] == [EVENT * 5, EVENT, b"nono", b""] and all(each.is_whole for each in found)


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_refused_body_is_dropped_and_the_connection_used_again(keeps: bool):
    memory = MemoryRouter(1, RouterOptions(port=0, max_body_bytes=1024))
    client = memory.connect()
    client.receive(post(b"x" * 500, *([] if keeps else [b"connection: close"]), path=b"/nowhere")[:-100])
    assert client.sent.startswith(b"HTTP/1.1 404 ") and client.has_sent_eof != keeps
    client.receive(b"x" * 100 + b"GET /health HTTP/1.1\r\n\r\n")
    found = read_responses(bytes(client.sent), 2, is_over=not keeps)
    assert [each.status for each in found] == ([404, 200] if keeps else [404])
    client.receive_eof()
    await settle()
    memory.check_idle()


async def test_what_is_dropped_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "MAX_REST_BYTES", 1 << 16)
    for path in (b"/nowhere", b"/v1/completions"):
        client = MemoryRouter(1, RouterOptions(port=0, max_body_bytes=1024)).connect()
        client.receive(b"POST %b HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n" % path)
        num_sent = 0
        while client.receive(b"x" * 1000):
            num_sent += 1
        assert num_sent == 66 and client.is_over


async def test_a_client_has_a_time_for_all_it_sends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.02)
    monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.02)
    monkeypatch.setattr(endpoint, "GAP_TIMEOUT_S", 0.02)
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.3)
    health = b"GET /health HTTP/1.1\r\n\r\n"
    for pieces, num_answered in (
        ([], 0), ([b"GET /hea"], 0), ([health, health[:9]], 1), ([post(b"{}", path=b"/nowhere")[:-1]], 1),
        ([post(b"{}")[:-1]], 1), ([health], 1),
    ):
        client = MemoryRouter(1).connect()
        for piece in pieces:
            client.receive(piece)
        loop = asyncio.get_running_loop()
        begin, is_idle = loop.time(), pieces == [health]
        async with asyncio.timeout(10):
            while not client.is_over:
                await asyncio.sleep(0.005)
        assert len(read_responses(bytes(client.sent), 3, is_over=True)) == num_answered
        assert loop.time() - begin >= (0.3 if is_idle else 0.02)


async def test_clients_that_leave_are_no_failures_of_the_router():
    memory = MemoryRouter(1)
    for pieces in ([post(b"{}")], [post(b"{}")[:-1]]):
        client = memory.connect()
        for piece in pieces:
            client.receive(piece)
        await settle()
        client.lose(ConnectionResetError())
    memory.check_idle()
    text = memory.router.metrics.render().decode()
    assert 'headrace_http_requests_total{method="POST",route="/v1/completions",status="499"} 2.0' in text


async def test_a_slow_body_that_makes_progress_is_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint, "GAP_TIMEOUT_S", 0.5)
    memory, whole = MemoryRouter(1), post(b"{}" * 4)
    client = memory.connect()
    client.receive(whole[:-8])
    for at in range(8):
        await asyncio.sleep(0.1)
        client.receive(whole[len(whole) - 8 + at : len(whole) - 7 + at])
    await settle()
    assert memory.workers and not client.sent


async def test_nothing_is_asked_for_that_is_refused():
    memory = MemoryRouter(1, RouterOptions(port=0, max_body_bytes=1024))
    for length, expected in ((1024, PROBE), (1025, b"HTTP/1.1 413 ")):
        client = memory.connect()
        client.receive(
            b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % length
        )
        assert client.sent.startswith(expected) and client.sent.count(b"HTTP/1.1 ") == 1
        client.lose()
    memory.check_idle()


async def test_pages_of_allowed_sites_may_read_relayed_responses():
    options = RouterOptions(port=0, cors_origins="http://page", api_key="k")
    memory = MemoryRouter(1, options)
    client = memory.connect()
    origin = b"origin: http://page"
    client.receive(b"OPTIONS /x HTTP/1.1\r\n%b\r\naccess-control-request-method: POST\r\n\r\n" % origin)
    client.receive(post(b"{}", origin, b"authorization: Bearer k"))
    await settle()
    memory.workers[0].receive(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    client.receive(post(b"{}", origin))
    found = read_responses(bytes(client.sent), 3, is_over=False)
    assert [each.status for each in found] == [200, 200, 401]
    assert [each.headers[b"access-control-allow-origin"] for each in found] == [b"http://page"] * 3
    assert b"x-request-id" in found[1].headers[b"access-control-expose-headers"].lower()


async def test_trusted_proxies_name_the_client():
    options = RouterOptions(port=0, trusted_proxies="10.0.0.0/8", max_concurrent_per_client=1)
    memory = MemoryRouter(1, options)
    answers = []
    for name in (b"1.2.3.4", b"1.2.3.5", b"1.2.3.4"):
        client = memory.connect()
        client.receive(post(b"{}", b"x-forwarded-for: " + name))
        await settle()
        answers.append(bytes(client.sent[:13]))
    assert answers == [b"", b"", b"HTTP/1.1 429 "]
    assert [b"x-forwarded-for: %b, %b\r\n" % (name, name) in worker.sent for name, worker in zip(
        (b"1.2.3.4", b"1.2.3.5"), memory.workers, strict=True)] == [True, True]
