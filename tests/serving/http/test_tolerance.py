"""What clients send beyond what has an effect: neutral values, keys of their own in messages, fields of other servers;
and the small facts that they read in answers."""

from __future__ import annotations

import json

import pytest
from fake_apps import events_of, http_for

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}
BODIES = {
    CHAT: {"messages": [USER], "max_tokens": 2}, TEXT: {"prompt": "hi", "max_tokens": 2},
    MESSAGES: {"messages": [USER], "max_tokens": 2}, RESPONSES: {"input": "hi", "max_output_tokens": 16},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}
NEUTRAL = {
    "best_of": 1, "echo": False, "suffix": "", "n": 1, "use_beam_search": False, "length_penalty": 1.0, "typical_p": 1,
    "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0, "top_k": -1,
    "logit_bias": {}, "documents": [], "lora_path": None, "return_hidden_states": False, "chat_template": None,
    "parallel_tool_calls": True, "mirostat": 0, "background": False, "stop": [],
    "separate_reasoning": True, "top_logprobs": 0, "min_tokens": 0, "guided_decoding_backend": "auto",
    "never_heard_of": None, "embed_dtype": "float32", "endianness": "native",
    "function_call": "none", "cache_prompt": True, "id_slot": -1,
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", NEUTRAL)
async def test_neutral_values_of_known_fields_are_taken_on_every_route(http, path, name):
    answer = await http.post(path, json={**BODIES[path], name: NEUTRAL[name]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path, name, value", [
    (CHAT, "echo", True), (CHAT, "best_of", 2), (CHAT, "best_of", True), (MESSAGES, "presence_penalty", 0.5),
    (MESSAGES, "enable_thinking", False), (MESSAGES, "n", 2), (TEXT, "parallel_tool_calls", False),
    (TEXT, "typical_p", 0.5), (TEXT, "cache_prompt", False), (CHAT, "function_call", "f"),
    (RESPONSES, "echo", True), (TEXT, "never_heard_of", 0),
])
async def test_other_values_are_refused_by_name(http, client, path, name, value):
    answer = await http.post(path, json={**BODIES[path], name: value})
    assert answer.status_code == 400 and name in answer.text and not client.submitted


WHOLE = {
    CHAT: ('"max_tokens": 3.0, "n": 2e0, "seed": 1e3, "logit_bias": {"97": 1.5}', (3, 2, 1000)),
    TEXT: ('"max_tokens": 3.0, "n": 2.0, "seed": -0.0, "zzz": null, "stop_token_ids": [5.0]', (3, 2, 0)),
    MESSAGES: ('"max_tokens": 30e-1, "top_k": 4.0', (3, 1, None)),
    RESPONSES: ('"max_output_tokens": 3.0, "seed": 4.0, "text": {"verbosity": null, "zzz": null}', (3, 1, 4)),
    "/generate": ('"sampling_params": {"max_new_tokens": 3.0, "n": 2.0, "sampling_seed": 1.0}', (3, 2, 1)),
}


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("num_chars", [2, 600_000])
async def test_integers_may_be_written_with_a_point(http, client, path, num_chars):
    """Programs with one kind of number write them so; in large bodies, too, which are decoded in pieces."""
    client.shrink(1 << 20)
    fields, expected = WHOLE[path]
    prompt = json.dumps(BODIES[path]).replace('"hi"', json.dumps("h" * num_chars))
    answer = await http.post(path, content=f"{prompt[:-1]}, {fields}}}".encode(), headers=JSON)
    assert answer.status_code == 200, answer.text
    params = client.submitted[-1][1]
    assert (params.max_tokens, params.n, params.seed) == expected


@pytest.mark.parametrize("value", ["1.5", "1e400", "1e30", '"4"', "true", "9007199254740993.5e300"])
async def test_what_is_no_integer_is_refused(http, client, value):
    for rest in ("", ', "n": 1.0', ', "zzz": null, "n": 1.0'):
        body = f'{{"prompt": "hi", "max_tokens": {value}{rest}}}'.encode()
        answer = await http.post(TEXT, content=body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert not client.submitted


async def test_verbosity_is_taken(http):
    for value in ("low", "medium", "high"):
        assert (await http.post(CHAT, json={**BODIES[CHAT], "verbosity": value})).status_code == 200
        body = {**BODIES[RESPONSES], "text": {"verbosity": value}}
        assert (await http.post(RESPONSES, json=body)).status_code == 200
    assert (await http.post(CHAT, json={**BODIES[CHAT], "verbosity": "loud"})).status_code == 400


@pytest.mark.parametrize("path, body", [
    (CHAT, {"messages": [{**USER, "id": "m1", "timestamp": 5}], "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "lang": "en"}]}]}),
    (CHAT, {"messages": [
        USER,
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "x": 1, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed": {}}, "extra": {}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "1", "is_error": False},
    ], "max_tokens": 2}),
    (MESSAGES, {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "x": 1}], "id": "m"}
    ], "max_tokens": 2}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "x": 1}], "y": 2}]}),
    ("/api/chat", {"model": "fake-model", "messages": [{**USER, "x": 1}], "stream": False}),
    ("/tokenize", {"messages": [{**USER, "x": 1}]}),
], ids=lambda v: v if isinstance(v, str) else None)
async def test_unknown_keys_inside_messages_are_taken(http, path, body):
    answer = await http.post(path, json={**body, **({} if path == "/tokenize" else {"model": "fake-model"})})
    assert answer.status_code == 200, answer.text


async def test_lenient_takes_unknown_fields_and_says_so(client):
    async with http_for(client, lenient=True) as http:
        for path, body in BODIES.items():
            answer = await http.post(path, json={**body, "max_tokns": 5, "zzz": {"a": [1]}})
            assert answer.status_code == 200, answer.text
            assert answer.headers["warning"] == '299 headrace "ignored unknown fields: max_tokns, zzz"'
        answer = await http.post(TEXT, json={**BODIES[TEXT], "stream": True, 'x"\r\ny: z': 1})
        assert answer.headers["warning"].endswith(': x???y??z"') and answer.text.endswith("[DONE]\n\n")
        answer = await http.post(TEXT, json={**BODIES[TEXT], **{f"u{i}": 1 for i in range(20)}})
        assert answer.headers["warning"].endswith('u15 and 4 more"')
        nested = {"text": "hi", "sampling_params": {"max_new_tokens": 1, "max_tokens": 1}}
        answer = await http.post("/generate", json=nested)
        assert answer.headers["warning"].endswith(': sampling_params.max_tokens"')
        assert "warning" not in (await http.post(TEXT, json=BODIES[TEXT])).headers
        # a feature that would change the output is still refused, and so are wrong values
        for wrong in ({"lora_path": "x"}, {"use_beam_search": True}, {"temperature": -1}):
            assert (await http.post(TEXT, json={**BODIES[TEXT], **wrong, "zzz": 1})).status_code == 400
    async with http_for(client) as http:
        answer = await http.post(TEXT, json={**BODIES[TEXT], "max_tokns": 5})
        assert answer.status_code == 400 and "did you mean max_tokens" in answer.text


THINK = {"type": "enabled", "budget_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_on_a_model_without_reasoning_is_taken(http, client, stream):
    answer = await http.post(MESSAGES, json={**BODIES[MESSAGES], "thinking": THINK, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert client.submitted[0][1].thinking_budget is None and "thinking" not in answer.text
    chat = await http.post(CHAT, json={**BODIES[CHAT], "thinking": THINK})
    assert chat.status_code == 200
    # a limit that the client asked for by name is not dropped silently
    refused = await http.post(CHAT, json={**BODIES[CHAT], "thinking_budget": 5})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "thinking_budget"


async def test_anthropics_client_thinks_on_a_model_without_reasoning(http):
    anthropic = pytest.importorskip("anthropic")
    try:
        api = anthropic.AsyncAnthropic(base_url="http://server", api_key="none", http_client=http, max_retries=0)
    except TypeError:
        pytest.skip("the client needs an httpx of its own")
    message = await api.messages.create(
        model="default", max_tokens=2048, messages=[USER], thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in message.content] == ["text"]


async def test_json_object_with_a_schema(http, client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for kind in ("json_object", "json_schema"):
        body = {**BODIES[CHAT], "response_format": {"type": kind, "schema": schema}}
        assert (await http.post(CHAT, json=body)).status_code == 200
        grammar = client.submitted[-1][1].grammar
        assert grammar.kind == "json_schema" and json.loads(grammar.text) == schema
    for wrong in ({"type": "text", "schema": {}}, {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}):
        answer = await http.post(CHAT, json={**BODIES[CHAT], "response_format": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format.schema"


async def test_fingerprint_model_and_id(http, client):
    prints = set()
    for path in (CHAT, TEXT):
        for stream in (False, True):
            answer = await http.post(path, json={**BODIES[path], "model": "default", "stream": stream})
            assert answer.status_code == 200
            parts = events_of(answer.text)[:-1] if stream else [answer.text]
            prints |= {json.loads(part)["system_fingerprint"] for part in parts}
    assert len(prints) == 1 and prints.pop().startswith("fp_")
    assert (await http.get("/v1/models/default")).json()["id"] == "fake-model"
    assert (await http.post(CHAT, json={**BODIES[CHAT], "model": "other"})).status_code == 404
    # every answer has an id for the log, also those of routes without a generation, and errors
    ids = [(await http.get(path)).headers["x-request-id"] for path in ("/health", "/v1/models", "/nope")]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("bias, words", [
    ({"97": 1, "5x": 2}, "logit_bias['5x']"), ({"97": 1, "98": 101}, "logit_bias['98']"),
    ({"97": "1"}, "logit_bias['97']"), ({"": 1}, "logit_bias['']"), ({"9" * 300: 1}, "logit_bias['999"),
    ({"97": None}, "logit_bias['97']"), ([97], "logit_bias: expected"),
])
async def test_errors_of_logit_bias_name_the_key(http, bias, words):
    for extra in ({}, {"lora_path": None}):  # in one pass, and with a field to drop
        answer = await http.post(TEXT, json={**BODIES[TEXT], "logit_bias": bias, **extra})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(words) and len(error["message"]) < 300
        assert error["param"].startswith("logit_bias")
    answer = await http.post("/generate", json={"text": "hi", "sampling_params": {"logit_bias": bias}})
    assert words in answer.json()["error"]["message"]


async def test_tokens_as_token_ids(http, api):
    extra = {"return_tokens_as_token_ids": True}
    chat = await api.chat.completions.create(
        model="default", messages=[USER], max_tokens=2, logprobs=True, top_logprobs=2, extra_body=extra
    )
    entry = chat.choices[0].logprobs.content[0]
    token = entry.bytes[0]
    assert entry.token == entry.top_logprobs[0].token == f"token_id:{token}"
    assert entry.top_logprobs[1].token == "token_id:256"
    plain = await api.completions.create(
        model="default", prompt="hé", max_tokens=2, logprobs=1, echo=True, seed=3
    )
    text = await api.completions.create(
        model="default", prompt="hé", max_tokens=2, logprobs=1, echo=True, seed=3, extra_body=extra
    )
    logprobs = text.choices[0].logprobs
    assert all(t.startswith("token_id:") for t in logprobs.tokens)
    assert [int(t[9:]) for t in logprobs.tokens[1:4]] == list("hé".encode())
    assert logprobs.text_offset == plain.choices[0].logprobs.text_offset
    assert text.choices[0].text == plain.choices[0].text
    assert set(logprobs.top_logprobs[-1]) == {logprobs.tokens[-1]}
    streamed = await http.post(CHAT, json={**BODIES[CHAT], "stream": True, "logprobs": True, **extra})
    assert '"token":"token_id:' in streamed.text


async def test_a_bias_that_no_number_type_holds_is_a_400(http):
    for bias in (b'{"1": 1e400}', b'{"1": 1, "2": -1e999}'):
        body = b'{"prompt": "x", "logit_bias": %s}' % bias
        answer = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("logit_bias"), answer.text


async def test_refusals_and_annotations_of_other_servers_come_back(http, client):
    """A history may have begun with another server, which refused, or cited a page."""
    cited = {"type": "url_citation", "url_citation": {"url": "https://a.example", "title": "a"}}
    messages = [
        USER, {"role": "assistant", "content": None, "refusal": "I will not."}, USER,
        {"role": "assistant", "content": "See a.", "refusal": "", "annotations": [cited]}, USER
    ]
    answer = await http.post(CHAT, json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert [m["content"] for m in client.tokenizer.messages] == ["hi", "I will not.", "hi", "See a.", "hi"]
    continued = {"messages": messages[:2], "max_tokens": 2, "continue_final_message": True}
    assert (await http.post(CHAT, json=continued)).status_code == 200
    refused = await http.post(CHAT, json={"messages": [{**USER, "content": None}]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[0].content"


async def test_texts_may_have_the_names_of_the_responses_api(http, client):
    """As vLLM takes them; so may the whole history of a client that uses both APIs."""
    messages = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}, USER
    ]
    answer = await http.post(CHAT, json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert [m["content"] for m in client.tokenizer.messages] == ["hi\nyou", "hello", "hi"]
    unknown = [{"role": "user", "content": [{"type": "words", "text": "hi"}]}]
    refused = await http.post(CHAT, json={"messages": unknown})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[0].content[0].type"


async def test_the_list_of_models_with_a_slash_is_no_model(http):
    answer = await http.get("/v1/models/")
    assert answer.status_code == 404 and "did you mean /v1/models?" in answer.json()["error"]["message"]


async def test_a_model_with_several_names(client):
    """Coding agents send two, of a large and of a small model."""
    async with http_for(client, served_model_name="large, small,org/third") as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [
            ("large", "fake-model"), ("small", "fake-model"), ("org/third", "fake-model")
        ]
        for name in ("large", "small", "org/third", "default", None):
            for path in (CHAT, TEXT, MESSAGES):
                answer = await http.post(path, json={**BODIES[path], "model": name})
                assert answer.status_code == 200 and answer.json()["model"] == "large", answer.text
        assert (await http.get("/v1/models/org/third")).json() == listed[2]
        assert (await http.get("/v1/models/default")).json() == listed[0]
        tags = (await http.get("/api/tags")).json()["models"]
        assert [card["name"] for card in tags] == ["large", "small", "org/third"]
        told = await http.post("/api/chat", json={"model": "small:latest", "messages": [USER], "stream": False})
        assert told.status_code == 200
        refused = await http.post(CHAT, json={**BODIES[CHAT], "model": "fake-model"})
        assert refused.status_code == 404
        assert "'large', 'small', 'org/third' is" in refused.json()["error"]["message"]


@pytest.mark.parametrize("fields", [
    {"truncation": "auto"}, {"include": ["web_search_call.action.sources", "reasoning.encrypted_content"]},
    {"reasoning": {"generate_summary": "auto", "context": "auto"}}, {"client_metadata": {"turn": "1"}},
    {"prompt_cache_options": {"mode": "implicit"}},
], ids=str)
async def test_responses_take_what_openais_clients_send(http, fields):
    answer = await http.post(RESPONSES, json={**BODIES[RESPONSES], **fields})
    assert answer.status_code == 200, answer.text
