"""Tools and reasoning with the OpenAI client: a scripted model, whole and streamed answers, forced calls, history."""

from __future__ import annotations

import json

import pytest
from fake_apps import http_for
from fake_client import ByteTokenizer

from headrace.base.sampling import ThinkingBudget

TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather",
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]
    },
}}
NOOP = {"type": "function", "function": {"name": "noop"}}
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris 日", "days": 3}}\n</tool_call>'
ARGUMENTS = '{"city": "Pa\\"ris 日", "days": 3}'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "noop", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nHm, <b>.\n</think>\n\n"
CHAT = "/v1/chat/completions"


async def ask(api, *, stream: bool, **options):
    """``(message as a dict, finish reason)``, from one answer or put together from a stream as clients do."""
    body = {"model": "fake-model", "messages": [USER], **options}
    if not stream:
        (choice,) = (await api.chat.completions.create(**body)).choices
        message = choice.message.model_dump(exclude_unset=True)
        return message, choice.finish_reason
    message, reason = {"role": "assistant", "content": None, "refusal": None}, None
    async for event in await api.chat.completions.create(**body, stream=True):
        (choice,) = event.choices
        reason = choice.finish_reason or reason
        delta = choice.delta.model_dump(exclude_unset=True)
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append(
                    {
                        "id": piece["id"], "type": piece["type"],
                        "function": {"name": piece["function"]["name"], "arguments": ""}
                    }
                )
            else:
                assert piece["index"] == len(calls) - 1 and "id" not in piece and "name" not in piece["function"]
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message, reason


def called(message: dict) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_told_apart_from_text(api, client, stream):
    client.script = TWO.encode()
    message, reason = await ask(api, stream=stream, tools=[TOOL, NOOP])
    assert (message["content"], called(message), reason) == (
        "Let me see.", [("get_weather", ARGUMENTS), ("noop", "{}")], "tool_calls"
    )
    assert (
        len({c["id"] for c in message["tool_calls"]}) == 2
        and all(c["type"] == "function" for c in message["tool_calls"])
    )
    assert client.submitted[-1][1].keep_special_tokens == ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    client.script = CALL.encode()
    message, reason = await ask(api, stream=stream, tools=[TOOL, NOOP], tool_choice="auto", parallel_tool_calls=False)
    assert (message["content"], called(message), reason) == (None, [("get_weather", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_only_one_call_unless_parallel(api, client, stream):
    client.script = TWO.encode()
    message, reason = await ask(api, stream=stream, tools=[TOOL, NOOP], parallel_tool_calls=False)
    assert (called(message), reason) == ([("get_weather", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, {"tool_choice": "none", "tools": [TOOL]}, {"tools": []}], ids=str)
async def test_without_tools_nothing_is_a_call(api, client, stream, options):
    client.script = CALL.encode()
    message, reason = await ask(api, stream=stream, **options)
    assert (message["content"], called(message), reason) == (CALL, [], "stop")
    assert "get_weather" not in client.prompts[-1] and not client.submitted[-1][1].grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_cut_short_and_broken_calls(api, client, stream):
    client.script = CALL.encode()
    message, reason = await ask(api, stream=stream, tools=[TOOL], max_tokens=len(CALL.encode()) - 30)
    assert reason == "length" and called(message)[0][0] == "get_weather" and ARGUMENTS.startswith(called(message)[0][1])
    client.script = b'<tool_call>{"name": "get_weather", "arguments": nonsense}</tool_call>'
    message, reason = await ask(api, stream=stream, tools=[TOOL])
    assert (message["content"], called(message), reason) == (client.script.decode(), [], "stop")


async def test_stream_has_openai_shape(server, client):
    client.script = CALL.encode()
    answer = await server.post(CHAT, json={"messages": [USER], "tools": [TOOL], "stream": True})
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    assert deltas[0] == {"role": "assistant", "content": ""}
    pieces = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert set(pieces[0]) == {"index", "id", "type", "function"} and pieces[0]["function"]["name"] == "get_weather"
    assert all(
        set(p) == {"index", "function"} and set(p["function"]) == {"arguments"} for p in pieces[1:]
    ) and len(pieces) > 10
    assert not any(d.get("content") for d in deltas)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart(api, client, stream):
    client.script = (THOUGHT + CALL).encode()
    message, reason = await ask(api, stream=stream, tools=[TOOL])
    assert (message["reasoning_content"], message["reasoning"], message["content"], called(message), reason) == (
        "Hm, <b>.", "Hm, <b>.", None, [("get_weather", ARGUMENTS)], "tool_calls")
    client.script = (THOUGHT + "Yes.").encode()
    message, reason = await ask(api, stream=stream)
    assert (message["reasoning_content"], message["content"], reason) == ("Hm, <b>.", "Yes.", "stop")
    message, _ = await ask(api, stream=stream, extra_body={"separate_reasoning": False})
    assert message["content"] == THOUGHT + "Yes." and "reasoning_content" not in message
    message, _ = await ask(api, stream=stream, extra_body={"include_reasoning": False})
    assert message["content"] == "Yes." and "reasoning_content" not in message
    message, reason = await ask(api, stream=stream, max_tokens=12)
    assert (message["reasoning_content"], message["content"], reason) == ("Hm, ", "", "length")


async def test_reasoning_in_one_piece(server, client):
    client.script = (THOUGHT + "Yes.").encode()
    answer = await server.post(
        CHAT, json={"messages": [USER], "stream": True, "stream_reasoning": False, "n": 2, "temperature": 1}
    )
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["Hm, <b>."] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_may_have_begun_the_reasoning(api, client, stream):
    client.tokenizer.ending = "<think>\n"
    client.script = b"Hm.\n</think>\n\nYes."
    message, _ = await ask(api, stream=stream)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    client.tokenizer.ending = "<think>\n\n</think>\n\n"
    client.script = b"Yes.</think>"
    message, _ = await ask(api, stream=stream)
    assert message["content"] == "Yes.</think>"


@pytest.mark.parametrize("options, switches", [
    ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
    ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
    ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
    (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": 5}},
        {"enable_thinking": True, "thinking": 5}
    ),
    ({}, {}),
], ids=str)
async def test_reasoning_switches_reach_the_template(server, client, options, switches):
    await server.post(CHAT, json={"messages": [USER], "max_tokens": 1, **options})
    assert client.tokenizer.options == switches


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 5}, {"max_thinking_tokens": 5}, {"thinking_token_budget": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}}
    ],
    ids=str
)
async def test_thinking_budgets_reach_the_engine(server, client, fields):
    async def budget():
        answer = await server.post(CHAT, json={"messages": [USER], "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        return client.submitted[-1][1].thinking_budget

    assert await budget() == ThinkingBudget(max_tokens=5, end="</think>", start="<think>")
    client.tokenizer.ending = "<think>\n"
    assert await budget() == ThinkingBudget(max_tokens=5, end="</think>")
    client.tokenizer.ending = "<think>\n\n</think>\n\n"
    assert await budget() is None


async def test_thinking_budgets_of_models_that_do_not_reason(client):
    async with http_for(client) as http:
        for fields in ({}, {"tools": [TOOL]}):
            error = (
                await http.post(CHAT, json={"messages": [USER], "max_thinking_tokens": 5, **fields})
            ).json()["error"]
            assert (error["param"], error["code"]) == ("thinking_budget", "unsupported_feature")


async def test_forced_calls_are_a_grammar(server, client):
    async def grammar(**options):
        answer = await server.post(CHAT, json={"messages": [USER], "max_tokens": 1, "tools": [TOOL, NOOP], **options})
        assert answer.status_code == 200, answer.text
        found = client.submitted[-1][1].grammar
        return None if found is None else (found.kind, json.dumps(json.loads(found.text), ensure_ascii=False))

    assert await grammar() is None and await grammar(tool_choice="auto") is None
    kind, tag = await grammar(tool_choice="required")
    assert kind == "structural_tag" and "get_weather" in tag and "noop" in tag and '"star"' in tag and "</think>" in tag
    _, tag = await grammar(tool_choice="required", parallel_tool_calls=False)
    assert '"star"' not in tag
    _, tag = await grammar(tool_choice={"type": "function", "function": {"name": "noop"}})
    assert "get_weather" not in tag and "noop" in tag and '"star"' not in tag
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "noop"}}]}
    }
    _, tag = await grammar(tool_choice=allowed)
    assert "get_weather" not in tag and "noop" in tag and '"star"' in tag
    assert "get_weather" in client.tokenizer.messages[0]["content"]
    allowed["allowed_tools"]["mode"] = "auto"
    _, tag = await grammar(tool_choice=allowed)
    assert "get_weather" not in tag and "noop" in tag and '"triggers": ["<tool_call>' in tag
    assert await grammar(tools=[NOOP], tool_choice=allowed) is None
    strict = {"type": "function", "function": {**NOOP["function"], "strict": True}}
    _, tag = await grammar(tools=[TOOL, strict])
    assert '"triggers": ["<tool_call>' in tag
    kind, tag = await grammar(response_format={"type": "json_object"})
    assert kind == "structural_tag" and "</think>" in tag and "get_weather" in tag and '{"type": "object"}' in tag
    assert await grammar(
        tool_choice="required", response_format={"type": "json_object"}
    ) == await grammar(tool_choice="required")
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "regex": "a"}
    assert (await server.post(CHAT, json=body)).json()["error"]["param"] == "tool_choice"
    client.tokenizer.ending = "<think>\n\n</think>\n\n"
    _, tag = await grammar(tool_choice="required")
    assert "</think>" not in tag


async def test_history_with_calls_reaches_the_template(server, client):
    history = [
        USER,
        {
            "role": "assistant", "content": None, "reasoning": "Hm.",
            "tool_calls": [
                {
                    "id": "c1", "type": "function", "index": 0,
                    "function": {"name": "get_weather", "arguments": ARGUMENTS}
                }
            ]
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Rain"}]},
    ]
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    answer = await server.post(CHAT, json={"messages": history, "tools": [TOOL], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    _, assistant, tool = client.tokenizer.messages
    assert assistant["reasoning_content"] == "Hm." and assistant["tool_calls"][0]["id"] == "c1"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": 'Pa"ris 日', "days": 3}
    assert str(assistant["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "c1", "Rain")
    assert client.tokenizer.tools == [TOOL]


async def test_tools_in_words_for_templates_that_do_not_show_them(server, client):
    history = [
        {"role": "system", "content": "Be brief."}, USER,
        {
            "role": "assistant", "content": "So:",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "noop", "arguments": ""}}]
        },
        {"role": "tool", "tool_call_id": "c1", "content": "A"}, {"role": "tool", "tool_call_id": "c2", "content": "B"},
    ]
    await server.post(CHAT, json={"messages": history, "tools": [TOOL], "max_tokens": 1})
    system, user, assistant, result = client.tokenizer.messages
    assert (
        system["content"].startswith("Be brief.\n\n") and json.dumps(TOOL["function"]) in system["content"]
        and "<tool_call>" in system["content"]
    )
    assert user == USER and assistant == {
        "role": "assistant", "content": 'So:\n<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
    }
    assert result == {
        "role": "user", "content": "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"
    }
    assert client.tokenizer.tools is None
    await server.post(CHAT, json={"messages": [USER], "tools": [TOOL], "max_tokens": 1})
    assert [m["role"] for m in client.tokenizer.messages] == ["system", "user"]
    counted = await server.post("/tokenize", json={"messages": [USER], "tools": [TOOL]})
    assert counted.json()["count"] > 200


DEEP: dict = {"type": "object"}
for _ in range(100):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def function(**fields) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize("fields, param", [
    (function(name="a b"), "tools[0].function.name"), (function(name=""), "tools[0].function.name"),
    (function(name="f\n"), "tools[0].function.name"),
    (function(name="f" * 129), "tools[0].function.name"), (function(name="f\x00"), "tools[0].function.name"),
    (function(description="a\x07"), "tools[0].function.description"),
    (function(description="x" * 40_000), "tools[0].function.description"),
    (function(parameters=[]), "tools[0].function.parameters"),
    (function(parameters={"type": "array"}), "tools[0].function.parameters"),
    (function(parameters={"properties": []}), "tools[0].function.parameters"),
    (function(parameters={"properties": {"a\x1b": {}}}), "tools[0].function.parameters"),
    (function(parameters=DEEP), "tools[0].function.parameters"),
    (function(parameters={"description": "x" * 300_000}), "tools[0].function.parameters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"), ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOOP]}}},
        "tool_choice"
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools"
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [TOOL]}}},
        "tool_choice.allowed_tools.mode"
    ),
    ({"thinking_budget": -1}, "thinking_budget"), ({"thinking_budget": 5, "max_thinking_tokens": 6}, "thinking_budget"),
    ({"thinking_budget": 5, "ebnf": 'root ::= "a"'}, "thinking_budget"),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":'}}]}]},
        "messages[0].tool_calls[0].function.arguments"
    ),
], ids=lambda v: str(v)[:70])
async def test_what_is_refused(server, client, fields, param):
    answer = await server.post(CHAT, json={"messages": [USER], "max_tokens": 1, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not client.submitted


async def test_tools_of_a_model_whose_format_is_unknown(client):
    client.tokenizer.takes_tools = True
    async with http_for(client) as http:
        answer = await http.post(CHAT, json={"messages": [USER], "tools": [TOOL]})
    assert answer.status_code == 400 and "--tool-parser" in answer.json()["error"]["message"]
    async with http_for(client, tool_parser="none") as http:
        assert (await http.post(CHAT, json={"messages": [USER], "tools": [TOOL]})).status_code == 400


async def test_formats_come_from_the_template(client):
    for template, script in [
        ("{% if tools %}<tool_call>{% endif %}", CALL),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        )
    ]:
        client.tokenizer = ByteTokenizer()
        client.tokenizer.chat_templates, client.tokenizer.takes_tools, client.script = [template], True, script.encode()
        async with http_for(client) as http:
            answer = await http.post(CHAT, json={"messages": [USER], "tools": [TOOL]})
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
