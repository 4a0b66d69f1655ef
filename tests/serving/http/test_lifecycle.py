"""Requests come and go: disconnects, aborts, slow readers, draining, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys

import pytest
from fake_apps import events_of, httpx, live_server

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app


@pytest.fixture
async def app(client):
    return create_app(client, ServerConfig())


@pytest.fixture
async def live(app):
    async with live_server(app) as address, httpx.AsyncClient(base_url=address, timeout=120) as http:
        yield http


async def until(condition, seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


ROUTES = [
    ("/v1/completions", {"prompt": "go", "max_tokens": 3000}),
    ("/v1/completions", {"prompt": ["go", "on"], "max_tokens": 3000, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}),
    ("/generate", {"text": "go", "sampling_params": {"max_new_tokens": 3000}}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path, body", ROUTES)
async def test_a_client_that_leaves_ends_its_requests(live, app, client, path, body, stream):
    client.delay_s = 0.01
    asking = asyncio.create_task(live.post(path, json={**body, "stream": stream}))
    await until(lambda: client.num_tokens > 8)
    assert client.children
    asking.cancel()
    await until(lambda: not client.children)
    assert client.aborted and client.num_tokens < 1000
    await until(lambda: not app.state.context.running)


async def test_leaving_before_the_first_token(live, client):
    for stream in (True, False):
        asking = asyncio.create_task(live.post("/v1/completions", json={"prompt": "HOLD", "stream": stream}))
        await until(lambda: client.children)
        asking.cancel()
        await until(lambda: not client.children)


async def test_abort_by_id_and_all(live, client):
    client.delay_s = 0.01
    asking = [
        asyncio.create_task(
            live.post("/generate", json={"text": "go", "rid": f"r{i}", "sampling_params": {"max_new_tokens": 3000}})
        )
        for i in range(3)
    ]
    streaming = asyncio.create_task(
        live.post("/v1/completions", json={"prompt": "go", "max_tokens": 3000, "stream": True})
    )
    await until(lambda: len(client.children) == 4)
    so_far = client.num_tokens
    await until(lambda: client.num_tokens > so_far + 20)  # then each has some
    assert (await live.post("/abort_request", json={"rid": "unknown"})).json() == {"aborted": 0}
    assert (await live.post("/abort_request", json={"rid": "r1"})).json() == {"aborted": 1}
    result = (await asking[1]).json()
    assert result["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"} and result["text"]
    assert len(client.children) == 3
    assert (await live.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 3}
    assert [(await asking[i]).json()["meta_info"]["finish_reason"]["type"] for i in (0, 2)] == ["abort", "abort"]
    frames = events_of((await streaming).text)
    assert json.loads(frames[-2])["choices"][0]["finish_reason"] == "abort"


async def test_one_bad_prompt_of_a_batch_stops_the_others(live, client):
    client.delay_s = 0.002
    answer = await live.post("/v1/completions", json={"prompt": ["go", "BREAK2"], "max_tokens": 3000})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "step_failed"
    await until(lambda: not client.children)
    answer = await live.post("/v1/completions", json={"prompt": ["go", [999]], "max_tokens": 3000})
    assert answer.status_code == 400
    await until(lambda: not client.children)


async def test_an_id_in_use_is_refused(live, client):
    first = asyncio.create_task(live.post("/generate", json={"text": "HOLD", "rid": "same"}))
    await until(lambda: client.children)
    assert "in use" in (await live.post("/generate", json={"text": "x", "rid": "same"})).json()["error"]["message"]
    await live.post("/abort_request", json={"rid": "same"})
    assert (await first).status_code == 200
    assert (
        await live.post("/generate", json={"text": "x", "rid": "same", "sampling_params": {"max_new_tokens": 1}})
    ).status_code == 200


async def test_slow_reader_gets_everything_in_fewer_chunks(app, client):
    """The reader's side of the connection is blocked; meanwhile deltas merge instead of piling up."""
    sent: list[bytes] = []
    gate = asyncio.Event()

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            await gate.wait()

    body = json.dumps({"prompt": "go", "max_tokens": 500, "stream": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        for message in messages:
            return message
        await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("x", 1), "client": ("y", 1),
        "asgi": {"version": "3.0"}
    }
    serving = asyncio.create_task(app(scope, receive, send))
    await until(lambda: client.num_tokens == 500)
    assert len(sent) == 1
    gate.set()
    await serving
    assert len(sent) <= 4
    frames = events_of(b"".join(sent).decode())
    text = "".join(json.loads(f)["choices"][0]["text"] for f in frames[:-1])
    assert len(text) == 500


async def test_draining_lets_running_requests_finish(live, app, client):
    client.delay_s = 0.005
    running = asyncio.create_task(live.post("/v1/completions", json={"prompt": "go", "max_tokens": 60, "stream": True}))
    await until(lambda: client.num_tokens > 2)
    app.state.context.is_draining = True
    refused = await live.post("/v1/completions", json={"prompt": "x"})
    assert (
        refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        and refused.headers["retry-after"]
    )
    assert (await live.get("/ready")).status_code == 503 and (await live.get("/health")).json()["engine"] == "draining"
    assert json.loads(events_of((await running).text)[-2])["choices"][0]["finish_reason"] == "length"


async def soak(address: str, num_requests: int) -> None:
    """Requests of all routes, streamed or not; every seventh client leaves in the middle, some send nonsense."""
    rng, gate = random.Random(0), asyncio.Semaphore(48)
    texts = {"prompt": "HOLD", "text": "HOLD", "messages": [{"role": "user", "content": "HOLD"}]}

    async def one(http: httpx.AsyncClient, i: int) -> None:
        path, body = ROUTES[i % 4]
        body = json.loads(json.dumps(body).replace("3000", str(rng.randint(1, 6)))) | {"stream": i % 3 == 0}
        body |= {"max_tokens": 5} if "messages" in body else {}
        async with gate:
            if i % 7 == 0:
                body |= {name: text for name, text in texts.items() if name in body}
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.002):
                        await http.post(path, json=body)
            elif i % 11 == 0:
                assert (await http.post(path, json={"bad": 1})).status_code == 400
            else:
                assert (await http.post(path, json=body)).status_code == 200

    async with httpx.AsyncClient(base_url=address, timeout=120) as http:
        await asyncio.gather(*(one(http, i) for i in range(num_requests)))


async def test_two_thousand_requests_leave_nothing_behind(app, client):
    def held() -> tuple[int, int]:
        gc.collect()
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    async with live_server(app) as address:
        before = held()
        for num_requests in (100, 2000):
            await soak(address, num_requests)
            await until(lambda: not client.children and not app.state.context.running)
        async with asyncio.timeout(120):
            while any(now > then for now, then in zip(held(), before, strict=True)):  # connections are being closed
                await asyncio.sleep(0.1)
    assert not client.tasks and client.aborted
    assert app.state.context.metrics.http.num_active == 0


def test_the_application_imports_nothing_heavy():
    code = (
        "import sys, headrace.serving.http.app, headrace.serving.http.server; print({'torch', 'transformers', 'numpy', "
        "'pydantic'} & set(sys.modules))"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], timeout=200, capture_output=True, text=True, check=True
    ).stdout == "set()\n"
