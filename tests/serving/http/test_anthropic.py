"""Anthropic's dialect with its own client: answers whole and streamed, tools, thinking, history, errors."""

from __future__ import annotations

import json

import anthropic
import pytest
from fake_apps import http_for
from fake_client import expected_text

from headrace.base.sampling import ThinkingBudget

TOOL = {
    "name": "get_weather", "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}
NOOP = {"name": "noop", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris 日", "days": 3}}\n</tool_call>'
INPUT = {"city": 'Pa"ris 日', "days": 3}
THOUGHT = "<think>\nHm, <b>.\n</think>\n\n"


@pytest.fixture
async def api(server):
    yield anthropic.AsyncAnthropic(base_url="http://server", api_key="none", http_client=server, max_retries=0)


async def ask(api, *, stream: bool, **options) -> anthropic.types.Message:
    """The answer, or what the client makes of the streamed one."""
    body = {"model": "fake-model", "max_tokens": 2000, "messages": [USER], **options}
    if not stream:
        return await api.messages.create(**body)
    async with api.messages.stream(**body) as events:
        return await events.get_final_message()


def blocks(message: anthropic.types.Message) -> list[tuple]:
    shown = {"text": lambda b: b.text, "thinking": lambda b: b.thinking, "tool_use": lambda b: (b.name, b.input)}
    return [(b.type, shown[b.type](b)) for b in message.content]


@pytest.mark.parametrize("stream", [False, True])
async def test_text(api, client, stream):
    message = await ask(
        api, stream=stream, max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.5}
    )
    prompt = "system: Be brief.\nuser: Weather?\nassistant:"
    assert client.prompts == [prompt]
    assert blocks(message) == [("text", expected_text(prompt, 9, bos=False))]
    assert (
        message.stop_reason, message.stop_sequence, message.role, message.model, message.id[:4]
    ) == ("max_tokens", None, "assistant", "fake-model", "msg_")
    usage, length = message.usage, len(prompt)
    assert (
        usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens
    ) == (length - length // 2, length // 2, 9)
    params = client.submitted[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 3, 0.5, 9)


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(api, client, stream):
    client.script = b"One, two, three."
    message = await ask(api, stream=stream)
    assert (blocks(message), message.stop_reason) == ([("text", "One, two, three.")], "end_turn")
    message = await ask(api, stream=stream, stop_sequences=["thr", "two"])
    assert (
        blocks(message), message.stop_reason, message.stop_sequence
    ) == ([("text", "One, ")], "stop_sequence", "two")


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_fits_is_what_fits(api, client, stream):
    prompt = (await api.messages.count_tokens(model="fake-model", messages=[USER])).input_tokens
    client.shrink(prompt + 4)
    message = await ask(api, stream=stream, max_tokens=9_000)
    assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", 4)
    assert (await ask(api, stream=stream, max_tokens=4)).stop_reason == "max_tokens"
    client.shrink(prompt)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens fit"):
        await ask(api, stream=stream, max_tokens=4)


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks_in_order(api, client, stream):
    client.script = (
        f'{THOUGHT}Let me see.\n{CALL}\n<tool_call>\n{{"name": "noop", "arguments": {{}}}}\n</tool_call>'.encode()
    )
    message = await ask(api, stream=stream, tools=[TOOL, NOOP])
    assert blocks(message) == [
        ("thinking", "Hm, <b>."), ("text", "Let me see."), ("tool_use", ("get_weather", INPUT)),
        ("tool_use", ("noop", {}))
    ]
    assert message.stop_reason == "tool_use" and len({b.id for b in message.content[2:]}) == 2
    message = await ask(
        api, stream=stream, tools=[TOOL, NOOP], tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive", "display": "omitted"}
    )
    assert blocks(message) == [("text", "Let me see."), ("tool_use", ("get_weather", INPUT))]
    message = await ask(api, stream=stream, tools=[TOOL], tool_choice={"type": "none"})
    assert message.content[-1].text.startswith("Let me see.\n<tool_call>") and message.stop_reason == "end_turn"


async def test_a_call_cut_short_has_no_input(api, client):
    client.script = CALL.encode()
    message = await ask(api, stream=False, tools=[TOOL], max_tokens=len(CALL.encode()) - 30)
    assert (message.content, message.stop_reason) == ([], "max_tokens")


async def test_stream_has_anthropics_events(server, client):
    client.script = (THOUGHT + "Yes.\n" + CALL).encode()
    answer = await server.post(
        "/v1/messages", json={"messages": [USER], "max_tokens": 500, "tools": [TOOL], "stream": True}
    )
    frames = [frame.split("\n") for frame in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [e["type"] for e in events]
    short = [e["type"] for e in events if e["type"] != "content_block_delta"]
    assert short == [
        "message_start", "ping", *["content_block_start", "content_block_stop"] * 3, "message_delta", "message_stop"
    ]
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1, 2]
    assert [e["content_block"] for e in starts][:2] == [
        {"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}
    ]
    assert starts[2]["content_block"]["input"] == {}
    pieces = [e["delta"]["partial_json"] for e in events if e.get("index") == 2 and "delta" in e]
    assert len(pieces) > 5 and json.loads("".join(pieces)) == INPUT
    assert (
        events[0]["message"]["usage"]["output_tokens"] == 0
        and events[-2]["usage"]["output_tokens"] == len(client.script)
    )


async def test_tool_choices(api, client):
    async def grammar(**options):
        await ask(api, stream=False, max_tokens=1, tools=[TOOL, NOOP], **options)
        found = client.submitted[-1][1].grammar
        return "" if found is None else found.text

    assert await grammar() == "" == await grammar(tool_choice={"type": "auto"})
    tag = await grammar(tool_choice={"type": "any"})
    assert "get_weather" in tag and "noop" in tag
    tag = await grammar(tool_choice={"type": "tool", "name": "noop"})
    assert "get_weather" not in tag and "noop" in tag
    schema = {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False
    }
    await ask(
        api, stream=False, max_tokens=1,
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    )
    assert (
        '"integer"' in client.submitted[-1][1].grammar.text and client.tokenizer.options["reasoning_effort"] == "high"
    )


async def test_thinking_is_switched_and_bounded(api, client):
    await ask(api, stream=False, max_tokens=8, thinking={"type": "enabled", "budget_tokens": 5})
    assert client.submitted[-1][1].thinking_budget == ThinkingBudget(max_tokens=5, end="</think>", start="<think>")
    assert client.tokenizer.options["enable_thinking"] is True
    await ask(api, stream=False, max_tokens=8, thinking={"type": "disabled"})
    assert client.tokenizer.options["enable_thinking"] is False and client.submitted[-1][1].thinking_budget is None


async def test_history_reaches_the_template(api, client):
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    history = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "Eo=="},
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": INPUT},
            {"type": "tool_use", "id": "c2", "name": "noop", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain"}]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "no such tool", "is_error": True},
            {"type": "text", "text": "And"}, {"type": "text", "text": "tomorrow?"},
        ]},
    ]
    await ask(api, stream=False, max_tokens=1, messages=history, tools=[TOOL])
    _, assistant, *results, user = client.tokenizer.messages
    assert (assistant["content"], assistant["reasoning_content"]) == ("So:", "Hm.")
    assert [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in assistant["tool_calls"]
    ] == [("c1", "get_weather", INPUT), ("c2", "noop", {})]
    assert (
        [(r["role"], r["tool_call_id"], r["content"]) for r in results]
        == [("tool", "c1", "Rain"), ("tool", "c2", "Error: no such tool")]
    )
    assert user == {"role": "user", "content": "And\ntomorrow?"}
    assert client.tokenizer.tools == [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "The weather", "parameters": TOOL["input_schema"]}
        }
    ]


async def test_an_assistants_message_at_the_end_is_continued(api, client):
    client.script = b"blue."
    message = await ask(api, stream=False, messages=[USER, {"role": "assistant", "content": "The sky is "}])
    assert client.prompts == ["user: Weather?\nassistant: The sky is "] and blocks(message) == [("text", "blue.")]


async def test_tokens_are_counted(api, client):
    count = await api.messages.count_tokens(model="fake-model", messages=[USER], system="Hi")
    assert count.input_tokens == len("system: Hi\nuser: Weather?\nassistant:") and not client.submitted
    assert (await api.messages.count_tokens(model="fake-model", messages=[USER], tools=[TOOL])).input_tokens > 200


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize("fields, told", [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].source.url: fake-model takes text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0].source.url: fake-model takes text alone"
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "messages[0].content[0]: tool_use"
    ),
    (
        {
            "messages": [
                USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
            ]
        },
        "tool_result"
    ),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"), ({"temperature": -1}, "temperature"),
    ({"max_token": 1}, "did you mean max_tokens"),
], ids=lambda v: str(v)[:60])
async def test_what_is_refused(server, client, fields, told):
    answer = await server.post("/v1/messages", json={"messages": [USER], "max_tokens": 5, **fields})
    assert answer.status_code == 400 and answer.json()["type"] == "error", answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error" and told in answer.json()["error"]["message"]
    assert not client.submitted


async def test_errors_are_anthropics(api, server, client):
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        await ask(api, stream=False, model="other")
    with pytest.raises(anthropic.RateLimitError) as caught:
        await ask(api, stream=False, messages=[{"role": "user", "content": "FULL"}])
    assert (
        caught.value.body["error"]["type"] == "rate_limit_error" and caught.value.response.headers["retry-after"] == "7"
    )
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        await ask(api, stream=True, messages=[{"role": "user", "content": "BREAK3"}])
    assert (await server.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"
    client.state = "restarting"
    answer = await server.post("/v1/messages", json={"messages": [USER], "max_tokens": 5})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


async def test_keys_come_in_either_header(client):
    async with http_for(client, api_key="secret") as http:
        api = anthropic.AsyncAnthropic(base_url="http://server", api_key="secret", http_client=http, max_retries=0)
        assert (await ask(api, stream=False, max_tokens=3)).usage.output_tokens == 3
        assert (await http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await ask(
                anthropic.AsyncAnthropic(base_url="http://server", api_key="wrong", http_client=http, max_retries=0),
                stream=False
            )
        assert caught.value.body["error"]["type"] == "authentication_error"


async def test_conversations_are_not_kept_and_clients_are_told_so(server, api):
    """As clients expect it: they leave out ``thread`` and go on."""
    body = {"model": "fake-model", "max_tokens": 5, "messages": [USER], "thread": {"type": "create"}}
    answer = await server.post("/v1/messages", json=body)
    error = answer.json()["error"]
    assert (
        (answer.status_code, error["type"], error["details"]["error_code"])
        == (400, "invalid_request_error", "thread_unsupported_request")
    )
    assert (await server.post("/v1/messages", json={**body, "thread": None})).status_code == 200
    assert "details" not in (
        await server.post("/v1/messages", json={**body, "thread": None, "max_tokens": 0})
    ).json()["error"]
