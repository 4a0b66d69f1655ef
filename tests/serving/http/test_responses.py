"""``/v1/responses`` with OpenAI's client: answers whole and streamed, tools, reasoning, history, what is refused."""

from __future__ import annotations

import json

import openai
import pytest
from fake_client import expected_text

TOOL = {
    "type": "function", "name": "get_weather", "description": "The weather", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}
NOOP = {"type": "function", "name": "noop", "parameters": None, "strict": None}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris 日", "days": 3}}\n</tool_call>'
ARGUMENTS = '{"city": "Pa\\"ris 日", "days": 3}'
THOUGHT = "<think>\nHm, <b>.\n</think>\n\n"


async def ask(api, *, stream: bool, **options):
    """The answer, or what the client makes of the streamed one."""
    body = {"model": "fake-model", "input": "Weather?", **options}
    if not stream:
        return await api.responses.create(**body)
    async with api.responses.stream(**body) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == list(range(len(numbers)))
        return await events.get_final_response()


def told(response) -> list[tuple]:
    shown = {
        "message": lambda i: i.content[0].text, "reasoning": lambda i: i.content[0].text,
        "function_call": lambda i: (i.name, i.arguments)
    }
    return [(i.type, i.status, shown[i.type](i)) for i in response.output]


@pytest.mark.parametrize("stream", [False, True])
async def test_text(api, client, stream):
    client.script = b"It rains."
    response = await ask(api, stream=stream, instructions="Be brief.", temperature=0.5, top_p=0.5, metadata={"a": "b"})
    prompt = "system: Be brief.\nuser: Weather?\nassistant:"
    assert client.prompts == [prompt] and (
        client.submitted[-1][1].temperature, client.submitted[-1][1].top_p
    ) == (0.5, 0.5)
    assert (
        (told(response), response.status, response.output_text)
        == ([("message", "completed", "It rains.")], "completed", "It rains.")
    )
    assert (
        response.instructions, response.temperature, response.metadata, response.store
    ) == ("Be brief.", 0.5, {"a": "b"}, False)
    usage = response.usage
    assert (
        usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens
    ) == (len(prompt), 9, len(prompt) // 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_cut_short(api, stream):
    if stream:
        events = [
            e async for e in await api.responses.create(
                model="fake-model", input="Weather?", max_output_tokens=4, stream=True
            )
        ]
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    else:
        response = await ask(api, stream=False, max_output_tokens=4)
    assert told(response) == [("message", "incomplete", expected_text("user: Weather?\nassistant:", 4, bos=False))]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items_in_order(api, client, stream):
    client.script = (
        f'{THOUGHT}Let me see.\n{CALL}\n<tool_call>\n{{"name": "noop", "arguments": {{}}}}\n</tool_call>'.encode()
    )
    response = await ask(api, stream=stream, tools=[TOOL, NOOP])
    assert told(response) == [
        ("reasoning", "completed", "Hm, <b>."), ("message", "completed", "Let me see."),
        ("function_call", "completed", ("get_weather", ARGUMENTS)), ("function_call", "completed", ("noop", "{}")),
    ]
    assert len({i.id for i in response.output}) == 4 and len({i.call_id for i in response.output[2:]}) == 2
    assert [t.name for t in response.tools] == ["get_weather", "noop"]


async def test_events_of_a_stream(server, client):
    client.script = (THOUGHT + "Yes.\n" + CALL).encode()
    answer = await server.post("/v1/responses", json={"input": "?", "tools": [TOOL], "stream": True})
    frames = [frame.split("\n") for frame in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [e["type"] for e in events]
    kinds = [e["type"].removeprefix("response.") for e in events]
    opened = ["output_item.added", "content_part.added"]
    assert [k for k in kinds if not k.endswith(".delta")] == [
        "created", "in_progress", *opened, "reasoning_text.done", "content_part.done", "output_item.done",
        *opened, "output_text.done", "content_part.done", "output_item.done", "output_item.added",
        "function_call_arguments.done", "output_item.done", "completed",
    ]
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [(i["type"], i["status"], i.get("content"), i.get("arguments")) for i in added] == [
        ("reasoning", "in_progress", [], None), ("message", "in_progress", [], None), (
            "function_call", "in_progress", None, ""
        )]
    parts = [e["part"]["text"] for e in events if e["type"] == "response.content_part.added"]
    assert parts == ["", ""] and "".join(
        e["delta"] for e in events if e["type"].endswith("arguments.delta")
    ) == ARGUMENTS


async def test_history_reaches_the_template(api, client):
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    client.script = (THOUGHT + "So:\n" + CALL).encode()
    first = await ask(api, stream=False, tools=[TOOL], store=False, include=["reasoning.encrypted_content"])
    call = first.output[-1]
    history = [
        {"role": "developer", "content": "Brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"},
    ]
    await ask(api, stream=False, input=history, tools=[TOOL])
    system, user, assistant, tool = client.tokenizer.messages
    assert (system["role"], user["content"]) == ("system", "Weather?")
    assert (assistant["content"], assistant["reasoning_content"]) == ("So:", "Hm, <b>.")
    assert [(c["id"], str(c["function"]["arguments"])) for c in assistant["tool_calls"]] == [(call.call_id, ARGUMENTS)]
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", call.call_id, "Rain")


async def test_forced_and_structured_answers(api, client):
    async def grammar(**options):
        await ask(api, stream=False, max_output_tokens=1, **options)
        return client.submitted[-1][1].grammar.text

    assert "noop" in await grammar(tools=[TOOL, NOOP], tool_choice="required")
    tag = await grammar(tools=[TOOL, NOOP], tool_choice={"type": "function", "name": "noop"})
    assert "noop" in tag and "get_weather" not in tag
    tag = await grammar(
        tools=[TOOL, NOOP],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "noop"}]}
    )
    assert "noop" in tag and "get_weather" not in tag
    schema = {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False
    }
    assert '"integer"' in await grammar(
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "low"}
    )
    assert client.tokenizer.options["reasoning_effort"] == "low"


@pytest.mark.parametrize("stream", [False, True])
async def test_codex_offers_namespaces_and_web_search(server, api, client, stream):
    """Tools of Codex 0.171, in its form; a call in a namespace can be sent back."""
    weather = {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [TOOL]}
    tools = [NOOP, weather, {"type": "web_search", "external_web_access": False}]
    client.script = CALL.replace("get_weather", "sky__get_weather").encode()
    response = await ask(api, stream=stream, tools=tools)
    (call,) = response.output
    assert (call.name, call.namespace, call.arguments) == ("get_weather", "sky", ARGUMENTS)
    assert [tool.type for tool in response.tools] == ["function", "namespace"] and "web_search" not in client.prompts[0]
    assert "sky__get_weather" in client.prompts[0] and "The sky.\\nThe weather" in client.prompts[0]
    answer = await server.post("/v1/responses", json={
        "input": [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        "tools": tools, "max_output_tokens": 99, "stream": stream
    })
    assert answer.status_code == 200 and '"sky__get_weather"' in client.prompts[-1].rpartition("assistant")[0]
    assert answer.headers["warning"] == '299 headrace "ignored unknown fields: tools.web_search"'


@pytest.mark.parametrize("fields, param", [
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0].image_url"
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"), ({"input": []}, "input"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
    ({"tools": [TOOL, {"type": "namespace", "name": "n" * 120, "tools": [TOOL]}]}, "tools[1].name"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"previous_response_id": ""}, "previous_response_id"), ({"background": True, "store": False}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "some"}, "truncation"), ({"include": ["file_search_call.texts"]}, "include[0]"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
], ids=lambda v: str(v)[:60])
async def test_what_is_refused(server, client, fields, param):
    answer = await server.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text
    assert not client.submitted


async def test_errors(api):
    with pytest.raises(openai.NotFoundError):
        await ask(api, stream=False, model="other")
    with pytest.raises(openai.RateLimitError):
        await ask(api, stream=True, input="FULL")
    events = [e async for e in await api.responses.create(model="fake-model", input="BREAK3", stream=True)]
    assert (
        events[-1].type, events[-1].response.status, events[-1].response.error.message
    ) == ("response.failed", "failed", "the step failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_text(api, client, stream):
    client.script = (THOUGHT + "So.\n" + CALL).encode()
    response = await ask(api, stream=stream, tools=[TOOL], top_logprobs=2, include=["message.output_text.logprobs"])
    (_, message, _) = response.output
    shown = [(p.token, p.logprob, [t.logprob for t in p.top_logprobs]) for p in message.content[0].logprobs]
    assert shown == [(c, -0.5, [-0.5, -9999.0]) for c in "So."] and response.top_logprobs == 2
    assert client.submitted[-1][1].logprobs == 2
    client.script = b"It rains."
    response = await ask(api, stream=stream, include=["message.output_text.logprobs"])
    assert (
        "".join(p.token for p in response.output[0].content[0].logprobs) == "It rains."
        and client.submitted[-1][1].logprobs == 0
    )
    response = await ask(api, stream=stream, include=["reasoning.encrypted_content"], top_logprobs=0)
    assert response.output[0].content[0].logprobs == [] and client.submitted[-1][1].logprobs is None


async def test_logprobs_come_with_the_pieces_of_text(api, client):
    client.script = b"It rains."
    events = [e async for e in await api.responses.create(model="fake-model", input="?", top_logprobs=1, stream=True)]
    pieces = [(e.delta, "".join(p.token for p in e.logprobs)) for e in events if e.type == "response.output_text.delta"]
    assert "".join(text for text, _ in pieces) == "It rains." and all(text == told for text, told in pieces)


async def test_the_prompt_is_counted(api, client):
    count = await api.responses.input_tokens.count(
        model="fake-model", input="Weather?", instructions="Be brief.", tools=[TOOL]
    )
    response = await ask(api, stream=False, instructions="Be brief.", tools=[TOOL])
    assert count.input_tokens == response.usage.input_tokens > len("Weather?") and len(client.submitted) == 1
    with pytest.raises(openai.NotFoundError):
        await api.responses.input_tokens.count(model="another", input="Weather?")
