"""Custom tools, whose input is text: with OpenAI's client at both of its APIs, whole and streamed."""

from __future__ import annotations

import json

import pytest
from fake_apps import http_for

TEXT = 'print("日 \\ 😀")\n\t*** End'
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
NUMBER = {
    "type": "custom", "name": "number", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}|x"}
}
LARK = {"type": "custom", "name": "lark", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}}}


def write_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SCRIPT = "So:\n" + "\n".join([
    write_call("patch", json.dumps({"input": TEXT})), write_call("f", '{"input": "a"}'),
    write_call("number", '{"text": "12"}'),
])


def nested(tool: dict) -> dict:
    """A tool in the form of chat completions."""
    kind, own = tool["type"], {name: value for name, value in tool.items() if name != "type"}
    if own.get("format", {}).get("type") == "grammar":
        grammar = {name: value for name, value in own["format"].items() if name != "type"}
        own["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: own}


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(api, client, stream):
    client.tokenizer.takes_tools, client.tokenizer.chat_templates = True, ["<tool_call>"]
    client.script = SCRIPT.encode()
    body = {"model": "fake-model", "input": "Hi", "tools": [PATCH, TOOL, NUMBER]}
    if stream:
        events = [event async for event in await api.responses.create(**body, stream=True)]
        response = events[-1].response
        pieces = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        done = [e.input for e in events if e.type == "response.custom_tool_call_input.done"]
        assert "".join(pieces) == TEXT + "12" and done == [TEXT, "12"] and len(pieces) > 9
        added = [e.item for e in events if e.type == "response.output_item.added"]
        assert [getattr(item, "input", None) for item in added] == [None, "", None, ""]
    else:
        response = await api.responses.create(**body)
    _, patch, function, number = response.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", TEXT)
    assert (function.type, function.arguments) == ("function_call", '{"input": "a"}')
    assert (number.name, number.input) == ("number", "12")
    assert [tool.type for tool in response.tools] == ["custom", "function", "custom"]
    await api.responses.create(**{**body, "input": [
        {"role": "user", "content": "Hi"}, patch.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
    ]})
    _, assistant, result = client.tokenizer.messages
    assert json.loads(json.dumps(assistant["tool_calls"][0]["function"]["arguments"])) == {"input": TEXT}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", patch.call_id, "done")


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(api, client, stream):
    client.script = SCRIPT.encode()
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}
    body["tools"] = [nested(tool) for tool in (PATCH, TOOL, NUMBER)]
    if stream:
        calls: list[dict] = []
        async for chunk in await api.chat.completions.create(**body, stream=True):
            for piece in chunk.choices[0].delta.to_dict().get("tool_calls", ()):
                if piece["index"] == len(calls):
                    calls.append(piece)
                    continue
                kind, name = calls[-1]["type"], "input" if calls[-1]["type"] == "custom" else "arguments"
                calls[-1][kind][name] += piece[kind][name]
    else:
        message = (await api.chat.completions.create(**body)).choices[0].message
        calls = [call.to_dict() for call in message.tool_calls]
    assert [(call["type"], call[call["type"]]) for call in calls] == [
        ("custom", {"name": "patch", "input": TEXT}), ("function", {"name": "f", "arguments": '{"input": "a"}'}),
        ("custom", {"name": "number", "input": "12"}),
    ]
    sent = [{name: call[name] for name in ("id", "type", call["type"])} for call in calls]
    body["messages"] += [
        {"role": "assistant", "tool_calls": sent},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"},
    ]
    client.script = b"Good."
    await api.chat.completions.create(**body)
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in client.prompts[-1]


async def test_grammars(api, client):
    """They bind the input whenever the tool is called, and are shown to the model."""
    async def grammar(*tools: dict, **options):
        await api.responses.create(model="fake-model", input="Hi", tools=list(tools), max_output_tokens=1, **options)
        found = client.submitted[-1][1].grammar
        return None if found is None else found.text

    assert await grammar(PATCH) is None
    assert '"type":"lark","definition":"start: \\"a\\""' in await grammar(LARK)
    assert 'grammar in Lark:\\nstart: \\"a\\"' in client.prompts[-1]
    assert '"^(?:[0-9]{2}|x)$"' in await grammar(NUMBER)
    assert "regular expression:\\n[0-9]{2}|x" in client.prompts[-1]
    forced = await grammar(PATCH, TOOL, tool_choice={"type": "custom", "name": "patch"})
    assert '"patch"' in forced.replace("\\", "") and '"f"' not in forced.replace("\\", "")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "number"}]}
    forced = await grammar(PATCH, NUMBER, tool_choice=allowed)
    assert '"number"' in forced.replace("\\", "") and '"patch"' not in forced.replace("\\", "")


@pytest.mark.parametrize("name, is_enforced", [("hermes", True), ("pythonic", True), ("qwen3_coder", False)])
async def test_grammars_that_are_not_enforced_are_told(client, name, is_enforced):
    async with http_for(client, tool_parser=name) as http:
        answer = await http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1, "tools": [LARK]})
    assert answer.status_code == 200, answer.text
    assert is_enforced is ("warning" not in answer.headers)
    assert is_enforced is ('"type":"lark"' in client.submitted[-1][1].grammar.text)


async def test_custom_tools_of_a_namespace(api, client):
    client.script = write_call("files__patch", '{"input": "x"}').encode()
    tools = [{"type": "namespace", "name": "files", "description": "Files.", "tools": [PATCH]}]
    (call,) = (await api.responses.create(model="fake-model", input="Hi", tools=tools)).output
    assert (call.type, call.name, call.namespace, call.input) == ("custom_tool_call", "patch", "files", "x")


@pytest.mark.parametrize("fields, param", [
    ({"tools": [PATCH, {**TOOL, "name": "patch"}]}, "tools[1].name"),
    ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**LARK, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]}, "tools[0].format"),
    ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "g"}}, "tool_choice"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "patch"}]}, "input[0].input"),
])
async def test_what_is_refused(server, client, fields, param):
    answer = await server.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text
    assert not client.submitted
