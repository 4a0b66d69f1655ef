"""The router over real sockets, before workers that answer by script, break off, or are not there."""

from __future__ import annotations

import asyncio
import json

import pytest
from serving.router.workers import EVENTS_HEAD, Asked, Worker, chunk, events, reply, routing

from headrace.serving.http.transport.connection import MAX_UNSENT_BYTES
from headrace.serving.http_client import BrokenExchange, EventSplitter, HttpResponse
from headrace.serving.router import fleet, forwarding
from headrace.serving.router.options import RouterOptions


async def stream_of(running, path="/v1/completions", **body) -> tuple[HttpResponse, list[bytes]]:
    response = await running.client.send("POST", path, json.dumps({"stream": True, **body}).encode())
    return response, list(EventSplitter().feed(response.body))


async def test_a_request_arrives_as_it_was_sent_and_its_response_too():
    answer = reply(418, {"a": 1}, "x-own: yes", "x-request-id: made-there", "connection: x-hop", "x-hop: 1")
    worker = Worker(answer=lambda asked: answer)
    async with routing(worker) as running:
        response = HttpResponse()
        headers = []
        response.begin = lambda status, given: (headers.extend(given), setattr(response, "status", status))
        sent = {"X-Custom": "kept", "X-Forwarded-For": "10.0.0.9", "Connection": "keep-alive, x-mine", "X-Mine": "1"}
        target, body = "/v1/completions?a=b%20c", b'{"prompt": "x"}'
        await running.client.send("POST", target, body, response=response, headers=sent)
    asked = worker.asked[0]
    assert (asked.method, asked.target, asked.body) == ("POST", target, body)
    assert asked.headers["x-custom"] == "kept" and "x-mine" not in asked.headers
    assert asked.headers["x-forwarded-for"] == "10.0.0.9, 127.0.0.1"
    assert asked.headers["host"] == worker.url.removeprefix("http://")
    assert response.status == 418 and json.loads(response.body) == {"a": 1}
    assert (b"x-own", b"yes") in headers and (b"x-request-id", b"made-there") in headers
    names = [name for name, _ in headers]
    assert names.count(b"x-request-id") == names.count(b"date") == 1 and b"x-hop" not in names


async def test_events_are_passed_on_when_they_come():
    gate = asyncio.Event()
    first, *rest = events("one", "two", "three")[1:]
    worker = Worker(answer=lambda asked: [EVENTS_HEAD, first, gate, *rest])
    async with routing(worker) as running:
        response, seen = HttpResponse(), []
        async for piece in running.client.stream("POST", "/v1/completions", b'{"stream": true}', response):
            seen.append(piece)
            gate.set()  # not before the first event has come
    assert b"".join(seen) == b"data: one\n\ndata: two\n\ndata: three\n\ndata: [DONE]\n\n"
    assert seen[0] == b"data: one\n\n"


async def test_requests_are_spread_and_models_merged():
    workers = [Worker("a"), Worker("b", models=("m", "n"))]
    async with routing(*workers) as running:
        answers = [(await running.post(model="m"))[1]["from"] for _ in range(6)]
        only_b = [(await running.post(model="n"))[1]["from"] for _ in range(3)]
        unknown = await running.post(model="other")  # a worker says what it knows
        models = await running.client.send("GET", "/v1/models")
    assert sorted(answers) == ["a", "a", "a", "b", "b", "b"] and only_b == ["b"] * 3
    assert unknown[0] == 200
    assert [m["id"] for m in json.loads(models.body)["data"]] == ["m", "n"]


async def test_adapters_are_models_of_the_workers_that_list_them():
    adapter = {"parent": "m:1b", "root": "/data/sql"}
    workers = [Worker("a", models=("m:1b",)), Worker("b", models=("m:1b", "sql"), cards={"sql": adapter})]
    async with routing(*workers) as running:
        for name in ("sql", "m:1b:sql"):
            assert [(await running.post(model=name))[1]["from"] for _ in range(4)] == ["b"] * 4, name
        assert {(await running.post(model="m:1b"))[1]["from"] for _ in range(4)} == {"a", "b"}
        models = await running.client.send("GET", "/v1/models")
    assert [m.get("parent") for m in json.loads(models.body)["data"]] == [None, "m:1b"]


FAILURES = [None, reply(503, {}), reply(502, {}), reply(429, {}), [b"HTTP/1.1 200 OK\r\nconte"], [EVENTS_HEAD]]


@pytest.mark.parametrize("failure", FAILURES)
async def test_another_worker_is_asked_while_nothing_was_sent(failure):
    bad = Worker("bad", answer=lambda asked: failure)
    async with routing(bad, Worker("good")) as running:
        answers = [await running.post(prompt="x") for _ in range(4)]
    assert answers == [(200, {"from": "good"})] * 4
    assert bad.asked and bad.asked[0].body == b'{"prompt": "x"}'
    # a kept connection that breaks before a response may be the worker's idle timeout: the request is sent once more
    assert 0 < running.router.metrics.retries._value.get() <= len(bad.asked)


async def test_the_last_refusal_is_passed_on():
    full = reply(429, {"error": {"message": "queue full"}}, "retry-after: 7")
    workers = [Worker(answer=lambda asked: full) for _ in range(2)]
    async with routing(*workers) as running:
        status, content = await running.post()
    assert status == 429 and content == {"error": {"message": "queue full"}}
    assert [len(worker.asked) for worker in workers] == [1, 1]


async def test_without_a_worker_the_refusal_can_be_retried():
    worker = Worker()
    async with routing(worker) as running:
        await worker.stop()
        response = HttpResponse()
        headers = []
        response.begin = lambda status, given: (headers.extend(given), setattr(response, "status", status))
        await running.client.send("POST", "/v1/completions", b"{}", response=response)
        assert response.status == 503 and json.loads(response.body)["error"]["code"] == "engine_unavailable"
        assert (b"retry-after", b"5") in headers
        assert (await running.client.send("GET", "/ready")).status == 503
        assert (await running.client.send("GET", "/health")).status == 200
        await worker.start(worker.port)
        await running.until_ready(1)
        assert (await running.post())[0] == 200


@pytest.mark.parametrize("path, expected", [
    ("/v1/completions", b'data: {"error":'), ("/v1/messages", b"event: error\ndata: {"),
])
async def test_a_stream_whose_worker_is_lost_ends_with_an_error_event(path, expected):
    worker = Worker(answer=lambda asked: [EVENTS_HEAD, chunk(b"data: one\n\n")])
    async with routing(worker) as running:
        response, found = await stream_of(running, path)
    assert response.status == 200 and found[0] == b"one"
    assert expected in response.body and b"the worker was lost" in response.body
    assert len(worker.asked) == 1, "what was begun is not asked again"


async def test_a_head_alone_is_no_response():
    worker = Worker(answer=lambda asked: [EVENTS_HEAD])
    async with routing(worker) as running:
        status, content = await running.post(stream=True)
    assert status == 503 and content["error"]["code"] == "engine_unavailable"


async def test_another_body_that_breaks_off_is_left_incomplete():
    worker = Worker(answer=lambda asked: [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"])
    async with routing(worker) as running:
        with pytest.raises(BrokenExchange):
            await running.client.send("POST", "/v1/completions", b"{}")


async def test_a_client_that_leaves_takes_its_request_along():
    never = asyncio.Event()
    answers = {"waiting": [never], "streaming": [EVENTS_HEAD, *[chunk(b"data: one\n\n")] * 100_000]}
    worker = Worker(answer=lambda asked: answers[json.loads(asked.body)["prompt"]])
    async with routing(worker) as running:
        for count, prompt in enumerate(answers, 1):
            task = asyncio.create_task(running.post(prompt=prompt))
            await running.until(lambda count=count: len(worker.asked) == count)
            task.cancel()
            await running.until(lambda count=count: worker.num_lost_clients == count)
        assert not next(iter(running.fleet)).relays and next(iter(running.fleet)).load == 0
        worker.answer = None
        assert (await running.post())[0] == 200, "the worker is not blamed for it"


async def test_a_worker_that_hangs_is_given_up():
    never = asyncio.Event()
    hung = Worker("hung", answer=lambda asked: [never])
    async with routing(hung, Worker("good"), health_failures=2, health_timeout_s=0.1) as running:
        waiting = [asyncio.create_task(running.post()) for _ in range(2)]
        await running.until(lambda: len(hung.asked) == 1)
        hung.is_stopped = True
        assert [await task for task in waiting] == [(200, {"from": "good"})] * 2
        hung.is_stopped, hung.answer = False, None
        await running.until_ready(2)


async def test_a_worker_that_shuts_down_ends_its_streams_itself():
    gate = asyncio.Event()
    leaving = Worker(answer=lambda asked: [EVENTS_HEAD, chunk(b"data: one\n\n"), gate, *events("two")[1:]])
    async with routing(leaving, health_failures=1) as running:
        streaming = asyncio.create_task(stream_of(running))
        await running.until(lambda: bool(leaving.asked))
        leaving.status, seen = 503, leaving.num_checks
        await running.until(lambda: leaving.num_checks >= seen + 3)
        gate.set()
        _, found = await streaming
    assert found == [b"one", b"two", b"[DONE]"]


async def test_a_listing_that_cannot_be_read_is_none_and_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet, "MODELS_EVERY", 10**9)
    worker = Worker(listing=b'{"data": [{"x": ' + b"[" * 100_000)
    async with routing(worker) as running:
        assert (await running.post(model="m"))[0] == 200
        worker.listing = None
        await running.until(lambda: all(each.lists("m") for each in running.fleet))


async def test_the_breaker_keeps_requests_away_for_a_while():
    bad = Worker("bad", answer=lambda asked: reply(500, {"from": "bad"}))
    async with routing(bad, Worker("good"), breaker_failures=2) as running:
        found = [(await running.post())[1]["from"] for _ in range(10)]
        assert found.count("bad") == 2
        worker = next(worker for worker in running.fleet if worker.url == bad.url)
        worker.breaker.open_until, bad.answer = 0.0, None
        found = [(await running.post())[1]["from"] for _ in range(4)]
    assert found.count("bad") == 2, "one request finds out, and then it is used again"


async def test_clients_cannot_keep_a_worker_from_others():
    """A request that may take a millisecond fails by its own wish, and who reads what a worker knows may give it as
    little time."""
    slow = Worker(answer=lambda asked: reply(504 if b"deadline_s" in asked.body else 503, {}))
    async with routing(slow, breaker_failures=2) as running:
        for _ in range(4):
            assert (await running.post(deadline_s=0.001))[0] == 504
            assert (await running.client.send("GET", "/health_generate?timeout=0.05")).status == 503
        assert await worker_states(running) == ["ready"]
        for _ in range(2):
            assert (await running.post(deadline_s=None))[0] == 504
        assert await worker_states(running) == ["resting"]
        slow.answer = None
        assert (await running.client.send("GET", "/v1/loads")).status == 503, "one passes only after the break"


async def worker_states(running) -> list[str]:
    listed = json.loads((await running.client.send("GET", "/workers")).body)
    return [worker["state"] for worker in listed["workers"]]


async def test_a_drained_worker_finishes_what_it_has():
    gate = asyncio.Event()
    busy = Worker("busy", answer=lambda asked: [EVENTS_HEAD, chunk(b"data: one\n\n"), gate, *events("two")[1:]])
    async with routing(busy) as running:
        streaming = asyncio.create_task(stream_of(running))
        await running.until(lambda: bool(busy.asked))
        other = Worker("other")
        await other.start()
        body = json.dumps({"url": other.url}).encode()
        assert (await running.client.send("POST", "/workers", body)).status == 200
        await running.until_ready(2)
        listed = await running.client.send("DELETE", f"/workers?url={busy.url}")
        assert {w["url"]: w["state"] for w in json.loads(listed.body)["workers"]}[busy.url] == "draining"
        assert [(await running.post())[1]["from"] for _ in range(3)] == ["other"] * 3
        gate.set()
        _, found = await streaming
        assert found == [b"one", b"two", b"[DONE]"]
        await running.until(lambda: [worker.url for worker in running.fleet] == [other.url])
        await other.stop()


async def test_requests_about_a_stored_response_go_to_its_worker():
    def storing(name: str) -> Worker:
        return Worker(name, answer=lambda asked: reply(200, {"id": f"resp_{name}", "from": name}))

    workers = [storing(name) for name in "abc"]
    async with routing(*workers) as running:
        made = [(await running.post("/v1/responses", input="x"))[1] for _ in range(3)]
        for response in made:
            for _ in range(3):
                again = await running.post("/v1/responses", input="y", previous_response_id=response["id"])
                read = await running.client.send("GET", f"/v1/responses/{response['id']}")
                assert again[1]["from"] == json.loads(read.body)["from"] == response["from"]


async def test_an_abort_goes_to_all():
    workers = [Worker("a"), Worker("b")]
    async with routing(*workers) as running:
        assert (await running.post("/abort_request", rid="1"))[0] == 200
    assert [[asked.target for asked in worker.asked] for worker in workers] == [["/abort_request"]] * 2


async def test_an_abort_does_not_wait_for_a_worker_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forwarding, "BROADCAST_S", 0.2)
    never = asyncio.Event()
    workers = [Worker("hung", answer=lambda asked: [never]), Worker("good")]
    async with routing(*workers) as running:
        assert await running.post("/abort_request", rid="1") == (200, {"from": "good"})


async def test_admin_routes_and_unknown_paths_are_not_passed_on():
    worker = Worker()
    async with routing(worker) as running:
        for path in ("/sleep", "/update_weights_from_disk", "/flush_cache", "/nowhere"):
            status, content = await running.post(path)
            assert status == 404 and path in content["error"]["message"]
    assert not worker.asked


async def test_keys_are_checked_here_and_replaced():
    worker = Worker()
    options = RouterOptions(port=0, api_key="outside")
    async with routing(worker, options=options, worker_api_key="inside") as running:
        assert (await running.post())[0] == 401
        assert (await running.post(headers={"Authorization": "Bearer outside"}))[0] == 200
        assert (await running.post(headers={"x-api-key": "outside"}))[0] == 200
    assert [asked.headers["authorization"] for asked in worker.asked] == ["Bearer inside"] * 2
    assert all("x-api-key" not in asked.headers for asked in worker.asked)


async def test_a_page_of_another_site_cannot_reach_it():
    worker = Worker()
    async with routing(worker) as running:
        assert (await running.post(headers={"Host": "evil.example"}))[0] == 403
        body = json.dumps({"url": worker.url}).encode()
        refused = await running.client.send("POST", "/workers", body, headers={"Origin": "http://evil.example"})
        assert refused.status == 403
    assert not worker.asked


async def test_rates_are_limited_by_client():
    options = RouterOptions(port=0, rate_limit=0.01, rate_burst=2)
    async with routing(Worker(), options=options) as running:
        statuses = [(await running.post())[0] for _ in range(4)]
        _, content = await running.post()
    assert statuses == [200, 200, 429, 429] and content["error"]["code"] == "rate_limit_exceeded"


async def test_concurrent_requests_are_limited_by_client():
    gate = asyncio.Event()
    worker = Worker(answer=lambda asked: reply(200, {}) if gate.is_set() else [gate, reply(200, {})])
    async with routing(worker, options=RouterOptions(port=0, max_concurrent_per_client=1)) as running:
        first = asyncio.create_task(running.post())
        await running.until(lambda: bool(worker.asked))
        assert (await running.post())[0] == 429
        gate.set()
        await first
        assert (await running.post())[0] == 200


async def test_bodies_have_a_limit():
    worker = Worker()
    async with routing(worker, options=RouterOptions(port=0, max_body_bytes=1024)) as running:
        status, content = await running.post(prompt="x" * 2000)
        assert status == 413 and content["error"]["code"] == "body_too_large"
    assert not worker.asked


async def test_a_client_that_reads_slowly_makes_the_worker_wait():
    piece, num_written = b"x" * 65536, 0

    def count(asked: Asked) -> list[bytes]:
        return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(piece) * 512), *[piece] * 512]

    worker = Worker(answer=count)
    async with routing(worker) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
        target = next(iter(running.fleet))
        await running.until(lambda: any(relay._is_paused for relay in target.relays))
        [relay] = target.relays
        assert relay._client.wire.transport.get_write_buffer_size() <= 2 * MAX_UNSENT_BYTES
        await reader.readuntil(b"\r\n\r\n")
        while num_written < len(piece) * 512:
            got = await reader.read(1 << 20)
            assert got and set(got) == {ord("x")}
            num_written += len(got)
        writer.close()
    assert num_written == len(piece) * 512


async def test_metrics_name_workers_and_statuses():
    worker = Worker()
    async with routing(worker, options=RouterOptions(port=0)) as running:
        for _ in range(3):
            await running.post(prompt="a prompt that is long enough to be known again, " * 10)
        text = (await running.client.send("GET", "/metrics")).body.decode()
    assert f'headrace_router_requests_total{{status="200",worker="{worker.url}"}} 3.0' in text
    assert f'headrace_router_worker_up{{worker="{worker.url}"}} 1.0' in text
    cached = next(line for line in text.splitlines() if line.startswith("headrace_router_cached_tokens_total"))
    assert float(cached.split()[1]) >= 2 * 96
