"""Ollama's dialect: lines of a stream and whole answers, options, tools, thinking, what is told of the model,
refusals."""

from __future__ import annotations

import json

import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace import __version__
from headrace.base.pooling import PoolingFacts

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}
    }
}
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


async def ask(server, path: str, *, stream: bool, **fields) -> tuple[str, str, list, dict]:
    """``(content, thinking, calls, last line)``, put together from the lines."""
    answer = await server.post(
        f"/api/{path}", json={"model": "fake-model:latest", **fields, **({} if stream else {"stream": False})}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ("application/x-ndjson" if stream else "application/json")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True] and (stream or len(lines) == 1)
    if path == "generate":
        return (
            "".join(line["response"] for line in lines), "".join(line.get("thinking", "") for line in lines), [],
            lines[-1]
        )
    messages = [line["message"] for line in lines]
    calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
    return "".join(m["content"] for m in messages), "".join(m.get("thinking", "") for m in messages), calls, lines[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(server, client, stream):
    client.script = (THOUGHT + "So.\n" + CALL).encode()
    content, thinking, calls, last = await ask(
        server, "chat", stream=stream, messages=[USER], tools=[TOOL], keep_alive="5m"
    )
    assert (content, thinking, calls) == (
        "So.", "Hm.", [{"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}]
    )
    assert (last["done_reason"], last["model"], last["eval_count"]) == ("stop", "fake-model:latest", len(client.script))
    assert (
        last["prompt_eval_count"] == len(client.prompts[-1])
        and 0 < last["prompt_eval_duration"] <= last["total_duration"]
    )
    assert last["prompt_eval_duration"] + last["eval_duration"] == last["total_duration"]


@pytest.mark.parametrize("stream", [False, True])
async def test_generate(server, client, stream):
    client.script = b"Yes, it rains."
    content, _, _, last = await ask(
        server, "generate", stream=stream, prompt="Rain?", system="Brief.", options={"num_predict": 5}
    )
    assert (client.prompts, content, last["done_reason"]) == (
        ["system: Brief.\nuser: Rain?\nassistant:"], "Yes, ", "length"
    )
    client.script = (THOUGHT + "Yes.").encode()
    assert (await ask(server, "generate", stream=stream, prompt="Rain?", think=True))[:2] == ("Yes.", "Hm.")
    assert client.tokenizer.options["enable_thinking"] is True


async def test_options_reach_the_engine(server, client):
    sampling = {
        "stop": ["x"], "seed": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": 1.5
    }
    await ask(
        server, "chat", stream=False, messages=[USER],
        options={**sampling, "num_predict": 3, "repeat_penalty": 1.2, "num_ctx": 2048, "num_gpu": 99}, think="low"
    )
    params = client.submitted[-1][1]
    assert (
        {name: getattr(params, name) for name in sampling} == sampling
        and (params.repetition_penalty, params.max_tokens) == (1.2, 3)
    )
    assert client.tokenizer.options["reasoning_effort"] == "low"
    client.script = b"{}"
    for unlimited in (-1, 0):
        await ask(server, "chat", stream=False, messages=[USER], options={"num_predict": unlimited}, format="json")
        assert client.submitted[-1][1].max_tokens is None and client.submitted[-1][1].grammar is not None
    await ask(
        server, "chat", stream=False, messages=[USER],
        format={
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False
        }
    )
    assert '"integer"' in client.submitted[-1][1].grammar.text


async def test_history_reaches_the_template(server, client):
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    history = [
        USER,
        {
            "role": "assistant", "content": "", "thinking": "Hm.",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]
        },
        {"role": "tool", "tool_name": "get_weather", "content": "Rain"}
    ]
    await ask(server, "chat", stream=False, messages=history, tools=[TOOL], options={"num_predict": 1})
    _, assistant, tool = client.tokenizer.messages
    assert (
        assistant["reasoning_content"] == "Hm."
        and assistant["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    )
    assert (tool["role"], tool["name"], tool["content"]) == ("tool", "get_weather", "Rain")


async def test_what_is_told_of_the_model(server, client):
    (card,) = (await server.get("/api/tags")).json()["models"]
    assert (
        card["name"], card["size"], card["details"]["family"], len(card["digest"])
    ) == ("fake-model", 2**20, "fake", 64)
    shown = (await server.post("/api/show", json={"model": "fake-model"})).json()
    assert (
        shown["capabilities"] == ["completion", "tools", "thinking"]
        and shown["model_info"]["fake.context_length"] == client.max_len
    )
    assert (await server.get("/api/version")).json() == {"version": __version__}
    for path in ("chat", "generate"):
        assert (await server.post(f"/api/{path}", json={"model": "fake-model"})).json()["done_reason"] == "load"
    assert not client.submitted


@pytest.mark.parametrize("path, fields, told", [
    ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
    ("generate", {"prompt": "a", "images": ["aGk="]}, "images"),
    ("generate", {"prompt": "a", "raw": True}, "raw"), ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("chat", {"messages": [USER], "options": {"mirostat": 1}}, "options.mirostat"),
    ("chat", {"messages": [USER], "options": {"num_ctx": 10**6}}, "options.num_ctx"),
    ("chat", {"messages": [USER], "format": "xml"}, "format"), ("show", {"model": None}, "model"),
], ids=lambda v: str(v)[:50])
async def test_what_is_refused(server, client, path, fields, told):
    answer = await server.post(f"/api/{path}", json={"model": "fake-model", **fields})
    assert answer.status_code == 400 and told in answer.json()["error"], answer.text
    assert not client.submitted


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_fits_is_what_fits(server, client, stream):
    client.shrink(len(b"user: Weather?\nassistant:") + 4)
    content, _, _, last = await ask(server, "chat", stream=stream, messages=[USER], options={"num_predict": 100})
    assert (len(content), last["done_reason"], last["eval_count"]) == (4, "length", 4)


async def test_bodies_need_no_type_but_from_browsers(server, client):
    body = json.dumps({"model": "fake-model", "prompt": "x", "stream": False, "options": {"num_predict": 1}})
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert (await server.post("/api/generate", content=body, headers=headers)).status_code == 200
    assert (await server.post("/api/generate", content=body, headers={"Origin": "http://elsewhere"})).status_code == 415
    assert (await server.post("/v1/completions", content=body)).status_code == 415


async def test_running_models(server):
    (running,) = (await server.get("/api/ps")).json()["models"]
    assert running["name"] == "fake-model" and running["size"] >= 2**20 and running["context_length"] == 4096


async def test_embeddings():
    client = FakeClient(pooling=PoolingFacts("embed", 6, needs_all_tokens=True), max_len=64)
    async with http_for(client) as http:
        one = (await http.post("/api/embed", json={"model": "fake-model", "input": "one", "dimensions": 2})).json()
        two = (await http.post("/api/embed", json={"model": "fake-model:latest", "input": ["one", "two"]})).json()
        old = (await http.post("/api/embeddings", json={"model": "fake-model", "prompt": "one"})).json()
        reference = (await http.post("/v1/embeddings", json={"input": ["one", "two"]})).json()
        assert (
            two["embeddings"] == [e["embedding"] for e in reference["data"]]
            and two["prompt_eval_count"] == reference["usage"]["prompt_tokens"]
        )
        assert old == {"embedding": two["embeddings"][0]} and len(one["embeddings"][0]) == 2
        long = {"model": "fake-model", "input": "x" * 10_000}
        assert (await http.post("/api/embed", json=long)).status_code == 200
        assert (await http.post("/api/embed", json={**long, "truncate": False})).status_code == 400


async def test_errors(server, client):
    answer = await server.post("/api/chat", json={"model": "other", "messages": [USER]})
    assert (answer.status_code, list(answer.json())) == (404, ["error"])
    answer = await server.post("/api/generate", json={"model": "fake-model", "prompt": "BREAK3"})
    assert json.loads(answer.text.splitlines()[-1]) == {"error": "the step failed"}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(server, client, stream):
    client.script = b"It rains."
    for path, asked in (("chat", {"messages": [USER]}), ("generate", {"prompt": "Rain?"})):
        answer = await server.post(
            f"/api/{path}", json={"model": "fake-model", "stream": stream, "logprobs": True, "top_logprobs": 2, **asked}
        )
        told = [entry for line in answer.text.splitlines() for entry in json.loads(line).get("logprobs", ())]
        assert (
            "".join(entry["token"] for entry in told) == "It rains."
            and {len(entry["top_logprobs"]) for entry in told} == {2}
        )
    answer = await server.post("/api/generate", json={"model": "fake-model", "prompt": "Rain?", "stream": stream})
    assert answer.status_code == 200 and "logprobs" not in answer.text
