"""Unknown fields of objects inside a body: refused by name, neutral in options, ignored by a lenient server."""

from __future__ import annotations

import json

import pytest
from fake_apps import http_for

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
PLAIN = {
    CHAT: {"messages": [USER], "max_tokens": 2}, MESSAGES: {"messages": [USER], "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 16},
    "/api/chat": {"model": "fake-model", "messages": [USER], "stream": False},
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"zzz": {"type": "string"}}}}
CASES = [
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "zzz": 1}}, "stream_options.zzz"),
    (CHAT, {"response_format": {"type": "json_object", "zzz": {}}}, "response_format.zzz"),
    (
        CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "zzz": 1}}},
        "response_format.json_schema.zzz"
    ),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION, "zzz": {"type": "x"}}]}, "tools.zzz"),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "zzz": 1}}]}, "tools.function.zzz"),
    (
        CHAT, {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f", "zzz": 1}}
        }, "tool_choice.function.zzz"
    ),
    (CHAT, {"thinking": {"type": "disabled", "zzz": 1}}, "thinking.zzz"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}, "zzz": True}]}, "tools.zzz"),
    (MESSAGES, {"tool_choice": {"type": "auto", "zzz": 1}}, "tool_choice.zzz"),
    (RESPONSES, {"text": {"format": {"type": "text", "zzz": 1}}}, "text.format.zzz"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "zzz": 1}]}, "tools.zzz"),
    ("/api/chat", {"options": {"num_predict": 2, "zzz": 1}}, "options.zzz"),
]


@pytest.mark.parametrize("path, fields, name", CASES)
async def test_a_lenient_server_ignores_them(client, path, fields, name):
    async with http_for(client, lenient=True) as http:
        answer = await http.post(path, json={**PLAIN[path], **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["warning"] == f'299 headrace "ignored unknown fields: {name}"'


@pytest.mark.parametrize("path, fields, name", CASES)
async def test_others_refuse_them(http, client, path, fields, name):
    answer = await http.post(path, json={**PLAIN[path], **fields})
    assert answer.status_code == 400 and "unknown field" in answer.text and "zzz" in answer.text
    assert not client.submitted


@pytest.mark.parametrize("path, fields, name", CASES)
@pytest.mark.parametrize("num_chars", [2, 600_000])
async def test_null_requests_nothing(client, path, fields, name, num_chars):
    """Serializers write fields that are not set; in large bodies, too, which are decoded in pieces."""
    def blank(fields: dict) -> dict:
        if fields == FUNCTION["parameters"]["properties"]:  # names in schemas are the client's own
            return fields
        return {name: None if name == "zzz" else value for name, value in fields.items()}

    client.shrink(1 << 20)
    text = json.dumps({**PLAIN[path], **fields}).replace('"hi"', json.dumps("h" * num_chars))
    body = json.loads(text, object_hook=blank)
    async with http_for(client) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200 and "warning" not in answer.headers, answer.text


async def test_the_defaults_of_vllms_structured_outputs(http, client):
    fields = {"disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None}
    outputs = {"json": {"type": "object"}, "regex": None, "disable_fallback": False, **fields}
    answer = await http.post(CHAT, json={**PLAIN[CHAT], "structured_outputs": outputs})
    assert answer.status_code == 200 and client.submitted[-1][1].grammar.kind == "json_schema", answer.text
    for name, value in (("disable_any_whitespace", True), ("whitespace_pattern", " ?")):
        answer = await http.post(CHAT, json={**PLAIN[CHAT], "structured_outputs": {**outputs, name: value}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"structured_outputs.{name}"


async def test_what_is_known_stays(client):
    """Names inside of schemas are the client's own, and wrong values are still refused."""
    tools = [{"type": "function", "function": {**FUNCTION, "name": f"f{i}", "a": 1}, "b": i} for i in range(3)]
    async with http_for(client, lenient=True) as http:
        answer = await http.post(CHAT, json={**PLAIN[CHAT], "c": 1, "tools": tools, "tool_choice": "required"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["warning"] == '299 headrace "ignored unknown fields: c, tools.b, tools.function.a"'
        assert "zzz" in client.submitted[-1][1].grammar.text
        for wrong in ({"type": "function", "function": {"name": "f", "strict": "yes", "a": 1}}, {"type": "x", "b": 1}):
            answer = await http.post(CHAT, json={**PLAIN[CHAT], "tools": [wrong]})
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools[0].")


async def test_large_bodies(client):
    """They are decoded in pieces; a list of tools may be large itself."""
    long = "x" * 600_000
    many = [{"type": "function", "function": {"name": f"f{i}", "description": "d" * 4000, "a": 1}} for i in range(200)]
    async with http_for(client, lenient=True, max_batch_prompts=4) as http:
        for tools, messages in ((many[:1], [{"role": "user", "content": long}]), (many, [USER])):
            body = {"messages": messages, "max_tokens": 2, "tools": tools, "stream_options": {"b": 1}, "stream": True}
            answer = await http.post(CHAT, json=body)
            names = 'ignored unknown fields: stream_options.b, tools.function.a"'
            # the first one is too long for the context; the fields are dropped before
            assert answer.headers["warning"].endswith(names) and "unknown field" not in answer.text
        answer = await http.post(CHAT, json={"messages": [{"role": "user", "content": long}], "": {"a": 1}})
        assert answer.status_code == 400 and answer.headers["warning"].endswith('fields: "')
    async with http_for(client) as http:
        answer = await http.post(CHAT, json={"messages": [{"role": "user", "content": long}], "tools": many[:1]})
        assert answer.status_code == 400 and "unknown field 'tools[0].function.a'" in answer.text


NEUTRAL = {
    "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1.0, "typical_p": 1.0, "repeat_last_n": -1,
    "low_vram": True
}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_neutral_options_of_ollama(http, client, path):
    body = {"model": "fake-model", "stream": False, "messages": [USER]}
    if path == "/api/generate":
        body = {"model": "fake-model", "stream": False, "prompt": "hi"}
    for name, value in NEUTRAL.items():
        answer = await http.post(path, json={**body, "options": {"num_predict": 2, name: value}})
        assert answer.status_code == 200, answer.text
    for name, value in {"mirostat": 2, "tfs_z": 0.5, "typical_p": 0.5, "repeat_last_n": 64, "zzz": 0}.items():
        answer = await http.post(path, json={**body, "options": {name: value}})
        assert answer.status_code == 400 and name in answer.json()["error"], answer.text
    assert len(client.submitted) == len(NEUTRAL)


@pytest.mark.parametrize("path, body, words", [
    (
        MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}], "max_tokens": 2},
        "'document' is not supported; it must be one of text, image, thinking, redacted_thinking, tool_use, tool_result"
    ),
    (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        "'file' is not supported; it must be one of text, input_text, output_text, refusal, image_url, input_audio"
    ),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_text, output_text"),
    (CHAT, {"messages": [USER], "tool_choice": {"type": "x"}}, "must be one of function, custom, allowed_tools; got"),
    (MESSAGES, {**PLAIN[MESSAGES], "tool_choice": {"type": "x"}}, "must be one of auto, any, tool, none; got"),
])
async def test_errors_name_the_parts_of_the_route(http, path, body, words):
    answer = await http.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
