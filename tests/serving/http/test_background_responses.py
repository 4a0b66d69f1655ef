"""Background responses with OpenAI's client: polled, cancelled, followed and resumed; failures and bounds."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.serving.http.generation import background

MODEL = {"model": "fake-model"}
OWN = {"Authorization": "Bearer none"}


def api_of(http, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key=key, http_client=http, max_retries=0)


async def wait_for(api, response_id: str, *statuses: str):
    for _ in range(500):
        response = await api.responses.retrieve(response_id)
        if response.status in statuses:
            return response
        await asyncio.sleep(0.01)
    raise AssertionError(response.status)


@pytest.mark.parametrize("store", [0, 1])
async def test_a_response_is_made_without_its_client(client, store):
    client.delay_s = 0.02
    client.script = b"It rains."
    async with http_for(client, responses_store=store) as http:
        api = api_of(http)
        first = await api.responses.create(**MODEL, input="Weather?", background=True)
        assert (first.status, first.background, first.output) == ("queued", True, [])
        running = await wait_for(api, first.id, "in_progress")
        assert running.id == first.id and running.output == []
        done = await wait_for(api, first.id, "completed")
        assert done.output_text == "It rains." and done.background and done.usage.output_tokens == 9
        again = await api.responses.create(**MODEL, input="And?", previous_response_id=first.id)
        assert client.prompts[-1].startswith("user: Weather?\nassistant: It rains.\nuser: And?") and again.output_text
        with pytest.raises(openai.NotFoundError):
            await api_of(http, "another").responses.retrieve(first.id)
        # others are stored only where the server was told to
        plain = await api.responses.create(**MODEL, input="Weather?")
        if store:
            assert (await api.responses.retrieve(plain.id)).output_text == "It rains."
        else:
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(plain.id)


async def test_cancelling(http, client):
    api = api_of(http)
    first = await api.responses.create(**MODEL, input="HOLD", background=True)
    assert (await api.responses.retrieve(first.id)).status == "queued"
    assert (await api.responses.cancel(first.id)).status == "cancelled"
    assert (await wait_for(api, first.id, "cancelled")).error is None
    assert client.aborted and (await api.responses.cancel(first.id)).status == "cancelled"
    client.script = b"a"
    done = await api.responses.create(**MODEL, input="x", background=True)
    await wait_for(api, done.id, "completed")
    with pytest.raises(openai.BadRequestError, match="already ended"):
        await api.responses.cancel(done.id)


async def test_failures_are_told_when_asked(http, client):
    api = api_of(http)
    for prompt, words in (("FULL", "queue is full"), ("BREAK3", "step failed")):
        first = await api.responses.create(**MODEL, input=prompt, background=True, max_output_tokens=20)
        failed = await wait_for(api, first.id, "failed")
        assert words in failed.error.message
    cut = await api.responses.create(**MODEL, input="x", background=True, max_output_tokens=16)
    assert (await wait_for(api, cut.id, "incomplete")).incomplete_details.reason == "max_output_tokens"
    # what is wrong with the request itself is an error at once
    for wrong in ({"temperature": 3}, {"store": False}):
        with pytest.raises(openai.BadRequestError):
            await api.responses.create(**MODEL, input="x", background=True, **wrong)


def numbers(events: list[dict]) -> list[int]:
    return [event["sequence_number"] for event in events]


def parse(text: str) -> list[dict]:
    return [json.loads(frame.split("data: ", 1)[1]) for frame in text.split("\n\n") if frame]


async def test_a_stream_goes_on_without_its_client_and_is_resumed(http, client):
    client.delay_s, client.script = 0.02, b"It rains cats."
    api = api_of(http)
    seen = []
    stream = await api.responses.create(**MODEL, input="x", background=True, stream=True)
    async for event in stream:
        seen.append(event.model_dump())
        if len(seen) == 6:
            break
    await stream.close()
    assert [event["type"] for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in seen[:3]] == ["queued", "queued", "in_progress"]
    response_id = seen[0]["response"]["id"]
    resumed = await api.responses.retrieve(response_id, stream=True, starting_after=5)
    rest = [event.model_dump() async for event in resumed]
    assert numbers(seen + rest) == list(range(len(seen + rest))) and rest[-1]["type"] == "response.completed"
    text = "".join(e["delta"] for e in seen + rest if e["type"] == "response.output_text.delta")
    assert text == "It rains cats." and (await api.responses.retrieve(response_id)).output_text == text
    # after the end, too, and from the start
    whole = parse((await http.get(f"/v1/responses/{response_id}?stream=true", headers=OWN)).text)
    assert whole[-1]["type"] == "response.completed" and numbers(whole) == numbers(seen + rest)
    beyond = await http.get(f"/v1/responses/{response_id}?stream=true&starting_after=999", headers=OWN)
    assert (beyond.status_code, beyond.text) == (200, "")
    for query in ("stream=true&starting_after=x", "starting_after=1"):
        assert (await http.get(f"/v1/responses/{response_id}?{query}", headers=OWN)).status_code == 400
    other = {"Authorization": "Bearer other"}
    assert (await http.get(f"/v1/responses/{response_id}?stream=true", headers=other)).status_code in (400, 404)


async def test_only_streamed_background_responses_are_streamed_again(http, client):
    client.script = b"a"
    api = api_of(http)
    first = await api.responses.create(**MODEL, input="x", background=True)
    await wait_for(api, first.id, "completed")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        await api.responses.retrieve(first.id, stream=True)


async def test_runs_and_their_events_are_bounded(http, client, monkeypatch):
    monkeypatch.setattr(background, "MOST_RUNNING", 3)
    api = api_of(http)
    held = [await api.responses.create(**MODEL, input="HOLD", background=True) for _ in range(3)]
    with pytest.raises(openai.RateLimitError):
        await api.responses.create(**MODEL, input="x", background=True)
    for response in held:
        await api.responses.cancel(response.id)
        await wait_for(api, response.id, "cancelled")
    monkeypatch.setattr(background, "MOST_EVENT_BYTES", 20_000)
    client.script, names = b"a" * 20, []
    for _ in range(6):
        stream = await api.responses.create(**MODEL, input="x", background=True, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        names.append(events[0].response.id)
    runs = http.app.state.context.background
    assert sum(run.num_bytes for run in runs._runs.values()) <= 20_000 and len(runs._tasks) == 0
    with pytest.raises(openai.BadRequestError):
        await api.responses.retrieve(names[0], stream=True)
    assert (await api.responses.retrieve(names[0])).output_text == "a" * 20
    assert not http.app.state.context.running


async def test_a_run_outlives_a_connection_that_was_cut(client: FakeClient):
    client.delay_s, client.script = 0.01, b"abcdefghij"
    async with http_for(client) as http:
        body = {"input": "x", "background": True, "stream": True}
        task = asyncio.create_task(http.post("/v1/responses", json=body, headers=OWN))
        while not client.submitted:
            await asyncio.sleep(0.005)
        response_id = client.submitted[0][0]
        task.cancel()
        assert (await wait_for(api_of(http), response_id, "completed")).output_text == "abcdefghij"
        assert not client.aborted
