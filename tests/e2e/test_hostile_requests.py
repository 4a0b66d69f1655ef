"""Over 500 hostile requests against a live server under load: each is refused or answered rightly, nobody else
notices."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import httpx
import pytest
from hostile_corpus import Case, all_cases
from live import LiveServer, idle_stats

LIMIT_S = 60.0
"""Without an answer within that, a request hangs."""
BREADTH = 12
STREAM_LEN = 400
GROWTH_BYTES = 192 << 20


async def send(http: httpx.AsyncClient, case: Case) -> str | None:
    """Why the case failed, None when it did not."""
    begin = time.monotonic()
    try:
        request = http.build_request(
            case.method, "/", content=case.body,
            headers=[(k.encode(), v.encode("latin-1")) for k, v in case.headers.items()]
        )
        request.url = request.url.copy_with(raw_path=case.path.encode())
        answer = await http.send(request)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        return (
            None if len(case.body) > 1 << 20 or sum(map(len, case.headers.values())) > 1 << 14
            else f"{case.name}: the connection was cut"
        )
    except httpx.TimeoutException:
        return f"{case.name}: no answer within {LIMIT_S:g} s"
    status, seconds = answer.status_code, time.monotonic() - begin
    if (
        (status != 200 and not 400 <= status < 500) or (case.must == "refuse" and status == 200)
        or (case.must == "answer" and status != 200)
    ):
        return f"{case.name}: {status} after {seconds:.1f} s, must {case.must}: {answer.text[:300]}"
    if (
        status != 200 and case.method != "OPTIONS" and status not in (431, 400) and answer.content
        and "message" not in answer.text
    ):
        return f"{case.name}: {status} without a message: {answer.text[:200]}"
    if "Traceback" in answer.text or "/site-packages/" in answer.text or "/headrace/" in answer.text:
        return f"{case.name}: the answer tells of the inside: {answer.text[:300]}"
    return None


async def send_all(url: str, cases: list[Case]) -> list[str]:
    queue, failures = list(reversed(cases)), []
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=BREADTH)) as http:

        async def work() -> None:
            while queue:
                failure = await send(http, queue.pop())
                if failure is not None:
                    failures.append(failure)

        await asyncio.gather(*(work() for _ in range(BREADTH)))
    return failures


async def stand_by(url: str, over: asyncio.Event) -> int:
    """Stream one text after the other; each must come whole and without a pause. Returns how many came."""
    body = {
        "prompt": "The mill", "max_tokens": STREAM_LEN, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True
    }
    count = 0
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        while not over.is_set() or not count:
            tokens, usage, is_done = [], None, False
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    is_done = is_done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        usage = event["usage"] or usage
                        tokens += [i for choice in event["choices"] for i in choice["token_ids"]]
            assert is_done and len(tokens) == STREAM_LEN == usage["completion_tokens"]
            count += 1
    return count


def resident_bytes(server: LiveServer) -> int:
    """Memory of both processes."""
    pages = (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (server.process.pid, server.engine_pid())
    )
    return sum(pages) * 4096


async def test_hostile_requests_hurt_nobody(tiny_server: LiveServer):
    server, pid = tiny_server, tiny_server.engine_pid()
    cases = all_cases(server.get("/openapi.json").json())
    assert len(cases) >= 1000
    random.Random(3).shuffle(cases)
    # the first opens its library, which takes seconds where the machine is busy
    for grammar in ({"regex": "x"}, {"guided_json": {}}):
        assert server.post("/v1/completions", {"prompt": "The mill", "max_tokens": 3, **grammar}).status_code == 200
    before = idle_stats(server)
    over = asyncio.Event()
    bystanders = [asyncio.create_task(stand_by(server.url, over)) for _ in range(2)]
    failures = await send_all(server.url, cases)
    warm = resident_bytes(server)  # what is kept of grammars is bounded by their number, and there now
    failures += await send_all(server.url, cases[::4])
    ready = await asyncio.to_thread(server.get, "/ready")
    over.set()
    counts = await asyncio.wait_for(asyncio.gather(*bystanders), 2 * LIMIT_S)
    assert not failures, f"{len(failures)} of {len(cases)}:\n" + "\n".join(failures[:60])
    assert ready.status_code == 200 and all(counts)
    stats = idle_stats(server)
    assert (stats["num_used_pages"], stats["failed_steps_total"] - before["failed_steps_total"]) == (0, 0)
    assert server.engine_pid() == pid, "the engine crashed and was replaced"
    growth = resident_bytes(server) - warm
    assert growth < GROWTH_BYTES, f"{growth >> 20} MiB more after the same requests again"
    assert server.post("/flush_cache").status_code == 200 and idle_stats(server)["num_evictable_pages"] == 0


BAD_HTTP = (
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    b"99999999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET "
    b"/smuggled HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"GET / HTTP/9.9\r\n\r\n", b"\x00\x01\x02\x03", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n", b"G" * 200_000,
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
)


@pytest.mark.parametrize("number", range(len(BAD_HTTP)))
async def test_bad_http_is_refused_or_cut(tiny_server: LiveServer, number: int):
    host, port = tiny_server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(BAD_HTTP[number])
        await writer.drain()
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(1 << 20), LIMIT_S)
    except TimeoutError:  # one of OSError's
        pytest.fail("neither answered nor cut")
    except OSError:
        answer = b""
    finally:
        writer.close()
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), answer[:200]
    assert tiny_server.get("/ready").status_code == 200
