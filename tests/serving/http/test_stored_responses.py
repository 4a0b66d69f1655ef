"""Stored answers of ``/v1/responses`` with OpenAI's client: going on from one, reading, deleting, cancelling; owners
and bounds."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.serving.http.generation.response_store import OVERHEAD_BYTES, ResponseStore, Turn

TOOL = {
    "type": "function", "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MODEL = {"model": "fake-model"}


@pytest.fixture
async def server(client: FakeClient):
    async with http_for(client, responses_store=1, reasoning_parser="qwen3") as http:
        yield http


@pytest.fixture
async def closed(client: FakeClient):
    async with http_for(client) as http:
        yield http


def api_of(http, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key=key, http_client=http, max_retries=0)


async def final(api, *, stream: bool, **options):
    if not stream:
        return await api.responses.create(**MODEL, **options)
    async with api.responses.stream(**MODEL, **options) as events:
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_items_by_reference(server, closed, client, stream):
    """Vercel's @ai-sdk/openai refers to stored items by their ids."""
    api = api_of(server)
    client.script = b"It rains."
    first = await final(api, stream=stream, input="Weather?")
    asked = [
        {"role": "user", "content": "Weather?"}, {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "Tomorrow?"}
    ]
    second = await final(api, stream=stream, input=asked)
    assert client.prompts[-1] == "user: Weather?\nassistant: It rains.\nuser: Tomorrow?\nassistant:"
    third = await final(api, stream=stream, input="So?", previous_response_id=second.id)
    assert third.status == "completed" and client.prompts[-1].count("It rains.") == 2
    for other in (api_of(server, "another"), api_of(closed)):
        with pytest.raises(openai.BadRequestError, match="not stored") as told:
            await final(other, stream=stream, input=asked)
        assert told.value.param == "input[1]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_by_ids(server, client, stream):
    api = api_of(server)
    client.script = b"It rains."
    first = await final(api, stream=stream, input="Weather?", instructions="Be brief.")
    assert first.store is True
    client.script = b"Snow."
    second = await final(
        api, stream=stream, input=[{"role": "user", "content": "Tomorrow?"}], previous_response_id=first.id
    )
    assert client.prompts[-1] == "user: Weather?\nassistant: It rains.\nuser: Tomorrow?\nassistant:", (
        "instructions are not carried over"
    )
    assert second.previous_response_id == first.id
    await final(api, stream=stream, input="And then?", previous_response_id=second.id)
    assert (
        client.prompts[-1]
        == "user: Weather?\nassistant: It rains.\nuser: Tomorrow?\nassistant: Snow.\nuser: And then?\nassistant:"
    )
    await final(api, stream=stream, input="Really?", previous_response_id=first.id)
    assert client.prompts[-1] == "user: Weather?\nassistant: It rains.\nuser: Really?\nassistant:", "a second branch"
    again = await api.responses.retrieve(first.id)
    assert (
        (again.model_dump(mode="json")["usage"], again.output_text, again.id)
        == (first.model_dump(mode="json")["usage"], "It rains.", first.id)
    )


async def test_tools_by_ids(server, client):
    api = api_of(server)
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    client.script = ("<think>\nHm.\n</think>\n\n" + CALL).encode()
    first = await final(api, stream=True, input="Weather?", tools=[TOOL])
    call = first.output[-1]
    client.script = b"Rain."
    await final(
        api, stream=False, tools=[TOOL], previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "wet"}]
    )
    user, assistant, tool = client.tokenizer.messages
    assert (
        user["content"], assistant["reasoning_content"], tool["tool_call_id"], tool["content"]
    ) == ("Weather?", "Hm.", call.call_id, "wet")
    assert [c["id"] for c in assistant["tool_calls"]] == [call.call_id]


async def test_a_call_that_broke_off_is_not_gone_on_from(server, client):
    api = api_of(server)
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    client.script = ("So.\n" + CALL).encode()
    first = await final(api, stream=False, input="Weather?", tools=[TOOL], max_output_tokens=70)
    assert (first.status, first.output[-1].status) == ("incomplete", "incomplete")
    await final(api, stream=False, input="Go on.", previous_response_id=first.id, max_output_tokens=1)
    assert [m["role"] for m in client.tokenizer.messages] == ["user", "assistant", "user"]
    assert "tool_calls" not in client.tokenizer.messages[1]


async def test_input_items(server, client):
    api = api_of(server)
    client.script = b"Yes."
    first = await final(api, stream=False, input="One?")
    parts = [{"type": "input_text", "text": "Two?"}]
    second = await final(
        api, stream=False, input=[{"role": "user", "content": parts}, {"role": "user", "content": "Three?"}],
        previous_response_id=first.id
    )
    items = [item async for item in api.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [(i.role, i.content[0].text) for i in items] == [
        ("user", "One?"), ("assistant", "Yes."), ("user", "Two?"), ("user", "Three?")
    ]
    assert len({i.id for i in items}) == 4
    newest = await api.responses.input_items.list(second.id, limit=2)
    assert [i.content[0].text for i in newest.data] == ["Three?", "Two?"] and newest.has_more
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "x"}):
        with pytest.raises(openai.BadRequestError):
            await api.responses.input_items.list(second.id, **wrong)


async def test_deleting_and_what_is_not_there(server, client):
    api = api_of(server)
    client.script = b"Yes."
    first = await final(api, stream=False, input="One?")
    second = await final(api, stream=False, input="Two?", previous_response_id=first.id)
    await api.responses.delete(first.id)
    for missing in (
        api.responses.retrieve(first.id), api.responses.delete(first.id), api.responses.cancel(first.id),
        api.responses.input_items.list(first.id)
    ):
        with pytest.raises(openai.NotFoundError):
            await missing
    with pytest.raises(openai.BadRequestError) as caught:
        await final(api, stream=False, input="Hm?", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    await final(api, stream=False, input="Three?", previous_response_id=second.id)
    assert client.prompts[-1].startswith("user: One?"), "what later answers go on from stays"
    with pytest.raises(openai.BadRequestError):
        await api.responses.retrieve(second.id, stream=True)


async def test_not_stored(server, closed, client):
    client.script = b"Yes."
    unkept = await final(api_of(server), stream=False, input="Hi", store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        await api_of(server).responses.retrieve(unkept.id)
    api = api_of(closed)
    first = await final(api, stream=False, input="Hi", store=True)
    assert first.store is False and len(closed.app.state.context.responses) == 0
    with pytest.raises(openai.NotFoundError, match="--responses-store"):
        await api.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="--responses-store"):
        await final(api, stream=False, input="Hi", previous_response_id=first.id)


async def test_answers_belong_to_a_key(server, client):
    client.script = b"Mine."
    mine, other = api_of(server, "key-a"), api_of(server, "key-b")
    first = await final(mine, stream=False, input="Secret")
    for refused in (
        other.responses.retrieve(first.id), other.responses.delete(first.id), other.responses.cancel(first.id),
        other.responses.input_items.list(first.id)
    ):
        with pytest.raises(openai.NotFoundError):
            await refused
    with pytest.raises(openai.BadRequestError):
        await final(other, stream=False, input="Say it again", previous_response_id=first.id)
    assert (await server.get(f"/v1/responses/{first.id}")).status_code == 404, "no key is another key"
    assert (
        await server.get(f"/v1/responses/{first.id}", headers={"x-api-key": "key-a"})
    ).status_code == 200, "the same key in the other header"
    assert (await mine.responses.retrieve(first.id)).output_text == "Mine."


async def test_cancelling(server, client):
    client.delay_s = 0.01
    api, other = api_of(server, "key-a"), api_of(server, "key-b")
    running = asyncio.create_task(
        api.responses.create(**MODEL, input="Long", extra_headers={"X-Request-Id": "resp_mine"})
    )
    while not client.children:
        await asyncio.sleep(0.005)
    assert (await api.responses.retrieve("resp_mine")).status == "in_progress"
    with pytest.raises(openai.NotFoundError):
        await other.responses.cancel("resp_mine")
    assert (await api.responses.cancel("resp_mine")).status == "cancelled"
    assert (await running).status == "cancelled" and not client.children
    again = await api.responses.cancel("resp_mine")
    assert (again.status, again.id) == ("cancelled", "resp_mine")
    client.script = b"Done."
    done = await final(api, stream=False, input="Short")
    with pytest.raises(openai.BadRequestError, match="ended"):
        await api.responses.cancel(done.id)


async def test_what_failed(server, client):
    api = api_of(server)
    events = [e async for e in await api.responses.create(**MODEL, input="BREAK3", stream=True)]
    assert (await api.responses.retrieve(events[-1].response.id)).status == "failed"
    stored = len(server.app.state.context.responses)
    client.script = json.dumps({"a": 1}).encode()
    with pytest.raises(openai.BadRequestError):
        await final(api, stream=False, input="Hi", max_output_tokens=10**6)
    assert len(server.app.state.context.responses) == stored, "what was refused is not stored"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bounds_of_the_store():
    clock = Clock()
    store = ResponseStore(20 * 1024, 10, clock=clock)
    turn: Turn | None = None
    for place in range(6):
        turn = Turn(b"q" * 500, b"a" * 476, turn)  # 2000 bytes each, counted once
        store.put(b"me", f"r{place}", b"x" * 976, turn)  # and 2000 an answer
    assert (len(store), store.num_bytes) == (4, 4 * 2000 + 6 * 2000), (
        "the oldest made room; their turns are still needed"
    )
    assert store.find(b"me", "r1") is None
    assert store.find(b"you", "r5") is None and store.find(b"me", "r5") is not None
    store.put(b"me", "huge", b"x" * 30_000, Turn(b"", b"", None))
    assert store.find(b"me", "huge") is None and store.num_bytes <= 20 * 1024
    clock.now = 9
    store.put(b"me", "late", b"x", Turn(b"q", b"a", None))
    clock.now = 11
    assert store.find(b"me", "late") is not None and store.find(b"me", "r5") is None
    assert store.drop(b"me", "late") and not store.drop(b"me", "late")
    assert (len(store), store.num_bytes) == (0, 0)


def test_shared_turns_are_freed_with_their_last_answer():
    store = ResponseStore(2**20, 100)
    root = Turn(b"1", b"2", None)
    left, right = Turn(b"3", b"4", root), Turn(b"5", b"6", root)
    for name, turn in (("root", root), ("left", left), ("right", right)):
        store.put(b"", name, b"{}", turn)
    answer, one_turn = OVERHEAD_BYTES + 2, OVERHEAD_BYTES + 2
    assert store.num_bytes == 3 * answer + 3 * one_turn
    assert store.drop(b"", "root") and store.num_bytes == 2 * answer + 3 * one_turn
    assert store.drop(b"", "left") and store.num_bytes == answer + 2 * one_turn
    store.put(b"", "right", b"{}", right)
    assert store.num_bytes == answer + 2 * one_turn, "put again"
    assert store.drop(b"", "right") and store.num_bytes == 0
