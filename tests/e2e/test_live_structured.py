"""Structured outputs over a live server of a random model, with OpenAI's client and with the other dialects."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import jsonschema
import openai
import pytest
from live import LiveServer

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fish", "bird"]}, "legs": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
    },
    "required": ["kind", "legs"], "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "An animal, as JSON."}]


@pytest.fixture(scope="module")
def ai(tiny_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_response_format(ai: openai.OpenAI):
    chosen = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    answer = ai.chat.completions.create(
        model="", messages=MESSAGES, response_format=chosen, max_tokens=200, n=3, temperature=1.0, seed=1
    )
    ended = [c.message.content for c in answer.choices if c.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)
    # Alone: whether forced text is skipped, and so what a seed samples after it, depends on the batch.
    asked = {"model": "", "messages": MESSAGES, "response_format": chosen, "max_tokens": 200, "temperature": 1.0}
    asked["seed"] = 1
    answer, stream = ai.chat.completions.create(**asked), ai.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == answer.choices[0].message.content


def test_other_dialects(ai: openai.OpenAI, tiny_server: LiveServer):
    regex = ai.completions.create(model="", prompt="x", max_tokens=60, extra_body={"guided_regex": "[a-f]{2}-[0-9]{2}"})
    assert re.fullmatch("[a-f]{2}-[0-9]{2}", regex.choices[0].text)
    choice = ai.completions.create(
        model="", prompt="x", max_tokens=9, extra_body={"structured_outputs": {"choice": ["red", "blue"]}}
    )
    assert choice.choices[0].text in ("red", "blue")
    native = tiny_server.post(
        "/generate", {"text": "x", "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 300}}
    ).json()
    if native["meta_info"]["finish_reason"]["type"] == "stop":
        jsonschema.validate(json.loads(native["text"]), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_plain_400(ai: openai.OpenAI, stream: bool):
    for fields, word in (
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_regex": "a{1,99999999}"}, "99999999")
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            ai.completions.create(model="", prompt="x", max_tokens=5, stream=stream, extra_body=fields)


def test_what_is_too_wide_further_on_is_a_400_before_the_stream(tiny_server: LiveServer):
    free = [{"type": "object", "properties": {f"name{i}": {"type": "integer"}}} for i in range(1500)]
    schema = {"type": "object", "properties": {"a": {"const": "x"}, "b": {"anyOf": free}}, "required": ["a", "b"]}
    chat = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 100}
    form = {"type": "json_schema", "schema": schema}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 100, "guided_json": schema}),
        ("/v1/chat/completions", {
            **chat, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        }),
        ("/v1/messages", {**chat, "output_config": {"format": form}}),
        ("/v1/responses", {
            "model": "tiny", "input": "x", "stream": True, "text": {"format": {**form, "name": "x"}}
        }),
        ("/api/chat", {"model": "tiny", "messages": MESSAGES, "format": schema}),
        ("/generate", {"text": "x", "stream": True, "sampling_params": {"json_schema": json.dumps(schema)}}),
    ):
        answer = tiny_server.post(path, body)
        assert answer.status_code == 400 and "fewer alternatives" in answer.text, (path, answer.text[:300])


def test_thousands_of_choices(tiny_server: LiveServer):
    choices = [f"choice {i}" for i in range(4096)]
    answer = tiny_server.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 30, "temperature": 1, "seed": 3, "guided_choice": choices}
    )
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in choices


async def test_all_kinds_at_once(tiny_server: LiveServer):
    async with httpx.AsyncClient(base_url=tiny_server.url, timeout=120) as http:
        def ask(i: int, **fields: object):
            return http.post(
                "/v1/completions", json={"prompt": f"{i}", "max_tokens": 24, "temperature": 1.0, "seed": i, **fields}
            )

        kinds = [
            {"regex": f"[a-c]{{{i % 5 + 1}}}"} if i % 3 == 0 else {"choice": [f"choice {i}", "b"]} if i % 3 == 1
            else {"ignore_eos": True} for i in range(24)
        ]
        answers = await asyncio.gather(*(ask(i, **kind) for i, kind in enumerate(kinds)))
        for i, (kind, answer) in enumerate(zip(kinds, answers, strict=True)):
            choice = answer.json()["choices"][0]
            if "regex" in kind:
                assert re.fullmatch(kind["regex"], choice["text"])
            elif "choice" in kind:
                assert choice["text"] in kind["choice"]
            else:
                assert answer.json()["usage"]["completion_tokens"] == 24, i
