"""What output must look like, in every dialect: one grammar, or a refusal that names the field."""

from __future__ import annotations

import pytest

from headrace.base.grammar import Grammar

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLD_TAG = {
    "type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]
}


async def post(http, route: str, fields: dict) -> tuple[int, dict]:
    start = {
        CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x"}, NATIVE: {"text": "x"}
    }[route]
    body = {**start, "sampling_params": fields} if route == NATIVE else {**start, "max_tokens": 2, **fields}
    answer = await http.post(route, json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "grammar"), [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "regex": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Grammar.json_schema(SCHEMA)
    ),
    ({"response_format": TAG}, Grammar.structural_tag(TAG)),
    ({"response_format": OLD_TAG}, Grammar.structural_tag(OLD_TAG)),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, Grammar.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": "root ::= \"a\""}}, Grammar.ebnf('root ::= "a"')),
    ({"structured_outputs": {"structural_tag": TAG}}, Grammar.structural_tag(TAG)),
    ({"guided_json": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
    ({"guided_regex": "a"}, Grammar.regex("a")), ({"guided_choice": ["x"]}, Grammar.choice(["x"])),
    ({"guided_grammar": "start: /a/"}, Grammar.ebnf("start: /a/")), ({"regex": "b"}, Grammar.regex("b")),
    ({"ebnf": "root ::= \"b\""}, Grammar.ebnf('root ::= "b"')),
    ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)), ({"structural_tag": TAG}, Grammar.structural_tag(TAG)),
])  # fmt: skip
async def test_openai_routes(http, client, route, fields, grammar):
    status, answer = await post(http, route, fields)
    assert status == 200, answer
    assert client.submitted[0][1].grammar == grammar


@pytest.mark.parametrize(("fields", "grammar"), [
    ({"json_schema": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
    ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)), ({"regex": "b"}, Grammar.regex("b")),
    ({"ebnf": "root ::= \"b\""}, Grammar.ebnf('root ::= "b"')), ({"structural_tag": TAG}, Grammar.structural_tag(TAG)),
    ({}, None), ({"regex": None}, None),
])  # fmt: skip
async def test_native_route(http, client, fields, grammar):
    status, answer = await post(http, NATIVE, {"max_new_tokens": 2, **fields})
    assert status == 200, answer
    assert client.submitted[0][1].grammar == grammar


@pytest.mark.parametrize(("route", "fields", "param"), [
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
    (
        CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema"
    ),
    (
        CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}},
        "response_format.json_schema.schema"
    ),
    (CHAT, {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (CHAT, {"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    (CHAT, {"guided_choice": [""]}, "guided_choice"),
    (COMPLETIONS, {"regex": ""}, "regex"), (COMPLETIONS, {"ebnf": "a" * 300_000}, "ebnf"),
    (COMPLETIONS, {"structural_tag": "["}, "structural_tag"),
    (NATIVE, {"json_schema": "{"}, "sampling_params.json_schema"),
    (NATIVE, {"regex": "a", "ebnf": "b"}, "sampling_params.ebnf"),
])  # fmt: skip
async def test_what_is_wrong_is_named(http, client, route, fields, param):
    status, answer = await post(http, route, fields)
    assert status == 400 and answer["error"]["param"] == param, answer
    assert not client.submitted


LIST = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(("route", "fields", "param"), [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": LIST}}}, "response_format"),
    (CHAT, {"structured_outputs": {"json": LIST}}, "structured_outputs.json"),
    (COMPLETIONS, {"guided_json": LIST}, "guided_json"), (COMPLETIONS, {"json_schema": LIST}, "json_schema"),
    (NATIVE, {"json_schema": LIST}, "sampling_params.json_schema"),
    (
        CHAT,
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": LIST}}
                    }
                }
            ],
            "tool_choice": "required"
        },
        "tools"
    ),
], ids=lambda v: str(v)[:40])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_told_of_the_clients_field(server, stream, route, fields, param):
    if stream and route == NATIVE:
        answer = await server.post(
            NATIVE, json={"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 2, **fields}}
        )
        status, told = answer.status_code, answer.json()
    else:
        status, told = await post(server, route, {**fields, "stream": stream} if route != NATIVE else fields)
    assert status == 400 and told["error"]["param"] == param
    assert told["error"]["message"] == f"{param}: the keyword 'uniqueItems' cannot be enforced"


@pytest.mark.parametrize(("route", "fields", "param"), [
    (CHAT, {"guided_grammar": "root ::= broken"}, "guided_grammar"),
    (NATIVE, {"ebnf": "broken"}, "sampling_params.ebnf"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "root ::= broken"}}, "structured_outputs.grammar"),
    (CHAT, {"guided_regex": "broken("}, "guided_regex"),
])  # fmt: skip
async def test_a_grammar_that_does_not_compile_is_told_of_the_clients_field(http, route, fields, param):
    status, told = await post(http, route, fields)
    assert status == 400 and told["error"]["param"] == param
    assert told["error"]["message"] == "the grammar cannot be compiled: no rule 'broken'"
