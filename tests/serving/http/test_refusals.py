"""What is refused, with which status and words; whatever comes in, the answer is an error in OpenAI's form."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.base.config import EngineConfig
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import ConfigError
from headrace.base.server_config import ServerConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
JSON = {"Content-Type": "application/json"}


async def refusal(http, path: str, body: dict) -> dict:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("mode", "is_told"), [("prefill", True), ("decode", False), (None, False)])
async def test_a_decode_server_hears_of_what_its_prefill_server_refuses(mode: str | None, is_told: bool):
    """It would wait for pages for seconds. Routes: those that routers with pairs give to both."""
    config = EngineConfig(disaggregation=DisaggregationConfig(disaggregation_mode=mode))
    client, declined = FakeClient(config=config), []
    client.replicas = (SimpleNamespace(decline=lambda rooms, reason: declined.append((rooms, reason))),)
    fields = {"bootstrap_room": 7, "bootstrap_host": "h"}
    bodies = {
        CHAT: {"messages": [USER], "max_tokens": 10_000}, TEXT: {"prompt": ["x", "y"], "model": "else"},
        "/generate": {"text": "x" * 10_000},
    }
    async with http_for(client) as http:
        for path, body in bodies.items():
            for given, rooms in ((fields, ["7"]), (fields | {"bootstrap_room": [8, 9]}, ["8", "9"])):
                declined.clear()
                answer = await http.post(path, json=body | given)
                assert 400 <= answer.status_code < 500, answer.text
                words = answer.json()["error"]["message"]
                assert declined == ([(rooms, words)] if is_told else [])
            await http.post(path, json=body | fields | {"bootstrap_room": [*range(5000)]})
            assert all(len(rooms) <= ServerConfig().max_batch_prompts for rooms, _ in declined), "a message for each"
            declined.clear()
            assert (await http.post(path, json=body)).status_code >= 400 and not declined


BAD_BODIES = {
    "empty": b"", "not json": b"hello", "half": b'{"prompt": "x"', "array": b"[]", "string": b'"x"', "null": b"null",
    "trailing": b'{"prompt":"x"} x',
    "mark": b'\xef\xbb\xbf{"prompt": "x"}', "utf-16": '{"prompt": "x"}'.encode("utf-16"),
    "utf-8": b'{"prompt": "\xff\xfe"}', "surrogate": b'{"prompt": "\\ud800"}',
    "nan": b'{"prompt":"x","temperature":NaN}',
    "infinite": b'{"prompt":"x","temperature":1e999}', "huge": b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
    "large": b'{"prompt":"x","max_tokens":' + b"9" * 30 + b"}",
    "deep": b'{"prompt":"x","metadata":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}}",
    "deep unknown": b'{"prompt":"x","z":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nul": b"\x00" * 10, "deep open": b"[" * 500_000, "bool for int": b'{"prompt":"x","max_tokens":true}',
    "text for number": b'{"prompt":"x","temperature":"1"}',
}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate", "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_malformed_bodies(http, path, name):
    answer = await http.post(path, content=BAD_BODIES[name], headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("field, value", [
    ("temperature", -1), ("temperature", 101), ("top_p", -0.1), ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("n", 0),
    ("n", 129), ("presence_penalty", 3),
    ("frequency_penalty", -3), ("repetition_penalty", 0), ("max_tokens", -1), ("min_tokens", -1), ("stop", ""),
    ("stop", ["x"] * 33), ("stop", "x" * 1025),
    ("stop_token_ids", [-1]), ("logit_bias", {"5": 101}), ("logit_bias", {"a": 1}), ("allowed_token_ids", []),
    ("bad_words", [""]), ("logprobs", 51),
    ("prompt_logprobs", -2), ("seed", 2**64), ("cache_salt", ""), ("request_id", "a/b"), ("request_id", "x" * 129),
    ("prompt", []), ("prompt", [1, "x"]),
    ("prompt", [[1], "x"]), ("prompt", [True]), ("prompt", [-1]), ("priority", 2**40), ("deadline_s", 0),
    ("deadline_s", -1), ("deadline_s", 1e6), ("deadline_s", "5"), ("best_of", 2), ("model", 5), ("stream", "yes"),
    ("user", 5),
])
async def test_bounds_name_the_field(http, field, value):
    error = await refusal(http, TEXT, {"prompt": "x", field: value})
    assert error["param"].startswith(field) and field in error["message"]


@pytest.mark.parametrize("field, value", [
    ("functions", [{}]),
    ("guided_whitespace_pattern", "a+"), ("audio", {"voice": "x"}),
    ("modalities", ["audio"]), ("extra_body", {"top_k": 5}),
    ("prediction", {"type": "content"}), ("require_reasoning", True), ("lora_path", "x"),
    ("chat_template", "{{ x }}"), ("documents", [{}]),
    ("use_beam_search", True), ("return_hidden_states", True), ("web_search_options", {"a": 1}),
    ("web_search_options", {}),
])
async def test_features_of_later_are_refused_by_name(http, field, value):
    answer = await http.post(CHAT, json={"messages": [USER], "max_tokens": 1, field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_feature", field)
    assert field in error["message"]


async def test_null_and_empty_ask_for_nothing(http):
    body = {"messages": [USER], "max_tokens": 1, "tools": None, "functions": [], "response_format": {"type": "text"},
            "tool_choice": "none", "stream": None,
            "temperature": None, "stop": None, "modalities": ["text"], "metadata": {
                "a": "b"
            }, "store": False, "service_tier": "auto", "lora_path": None}
    assert (await http.post(CHAT, json=body)).status_code == 200
    assert (await http.post(TEXT, json={"prompt": "x", "suffix": "", "max_tokens": 1})).status_code == 200
    assert (
        await http.post(
            "/generate", json={"text": "x", "image_data": None, "sampling_params": {"regex": None, "max_new_tokens": 1}}
        )
    ).status_code == 200


@pytest.mark.parametrize("path, body, words", [
    (TEXT, {"prompt": "x", "max_token": 5}, "did you mean max_tokens"),
    (TEXT, {"prompt": "x", "zzz": 5}, "unknown field 'zzz'"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "no fill-in-the-middle tokens"),
    (TEXT, {}, "prompt is required"),
    (
        CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}]},
        "messages[1].role: must be one of assistant, developer,"
    ),
    (
        CHAT, {"messages": [{"role": "user", "content": "x"}], "tool_choice": "all"},
        "tool_choice: must be one of auto, none, required; got 'all'"
    ),
    (
        CHAT, {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
        "response_format.type: must be one of json_object,"
    ),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options needs stream"),
    (TEXT, {"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "unknown field 'stream_options.usage'"),
    (TEXT, {"prompt": "", "add_special_tokens": False}, "must not be empty"),
    (TEXT, {"prompt": [299, 300]}, "vocabulary"),
    (TEXT, {"prompt": "x", "max_tokens": -1}, "max_tokens: expected"),
    (TEXT, {"prompt": "x", "min_tokens": 50}, "min_tokens must be"),
    (TEXT, {"prompt": ["x"] * 3000}, "at most 2048 prompts"),
    (TEXT, {"prompt": ["x"] * 100, "n": 100, "temperature": 1}, "prompts times n"),
    (TEXT, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "cannot be streamed"),
    (TEXT, {"prompt": "x", "rid": "a", "request_id": "b"}, "same field"),
    (
        TEXT, {"prompt": "x", "request_id": "a b"},
        "request_id: must have 1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'"
    ),
    (TEXT, {"prompt": "x" * 600_000, "rid": "é" * 600_000}, "rid: must have 1 to 128 characters of A-Z"),
    (
        CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f\n"}}]},
        "tools[0].function.name: must have 1 to 128 characters of A-Z"
    ),
    (CHAT, {}, "messages is required"),
    (CHAT, {"messages": []}, "messages: "),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is required"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role is required"),
    (CHAT, {"messages": [{"role": "function", "content": "x", "name": "f"}]}, "the role 'tool'"),
    (
        CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls"
    ),
    (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].image_url.url: fake-model takes text alone"
    ),
    (CHAT, {"messages": [USER], "top_logprobs": 3}, "top_logprobs needs logprobs"),
    (CHAT, {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}, "same limit"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens: expected int >= 1"),
    (CHAT, {"messages": [USER], "continue_final_message": True}, "the assistant's"),
    (
        CHAT, {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs cannot set 'messages'"
    ),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"fail": True}}, "template refused"),
    ("/generate", {}, "one of text and input_ids"),
    ("/generate", {"text": "x", "input_ids": [1]}, "one of text and input_ids"),
    (
        "/generate", {"text": "x", "sampling_params": {"max_tokens": 1}},
        "unknown field 'sampling_params.max_tokens'; did you mean max_new_tokens"
    ),
    ("/generate", {"text": "x", "sampling_params": {"lora_path": "x"}}, "sampling_params.lora_path is not supported"),
    ("/generate", {"text": ["x", "y"], "sampling_params": [{}]}, "one for each of the 2"),
    ("/generate", {"text": ["x", "y"], "rid": ["a"]}, "one for each of the 2"),
    ("/generate", {"text": "x", "top_logprobs_num": 1}, "needs return_logprob"),
    ("/generate", {"text": "x", "image_data": "x"}, "image_data: fake-model takes text alone"),
    ("/generate", {"input_ids": [[1], 2]}, "input_ids"),
    ("/abort_request", {}, "give rid"),
    ("/tokenize", {}, "give one of"),
    ("/tokenize", {"prompt": "x", "text": "x"}, "give one of"),
    ("/detokenize", {"tokens": [300]}, "below the vocabulary"),
    ("/detokenize", {}, "tokens is required"),
    ("/detokenize", {"tokens": None}, "tokens: expected array, got null"),
    ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]: expected int, got str"),
    ("/detokenize", {"tokens": [1, [2]]}, "tokens[1]: expected int, got array"),
    ("/detokenize", {"tokens": [*[1] * 100_000, -2]}, "tokens[100000]: expected int >= 0"),
    ("/detokenize", {"tokens": ["1, 2" * 100_000]}, "tokens[0]: expected int, got str"),
    ("/detokenize", {"tokens": "1, 2" * 100_000}, "tokens: expected array, got str"),
], ids=lambda v: str(v)[:60])
async def test_refusals_say_what_to_do(http, path, body, words):
    assert words in (await refusal(http, path, body))["message"]


async def test_media_types(http):
    for headers in (
        {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
        {**JSON, "Content-Encoding": "gzip"}
    ):
        answer = await http.post(TEXT, content=b'{"prompt":"x"}', headers=headers)
        assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
    answer = await http.post(
        TEXT, content=b'{"prompt":"x","max_tokens":1}', headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert answer.status_code == 200


async def test_bodies_that_are_too_large(client):
    async def chunks():
        for _ in range(100):
            yield b'{"prompt": "' + b"x" * 100

    async with http_for(client, max_body_bytes=1024) as http:
        for content in (b"x" * 2000, chunks()):
            answer = await http.post(TEXT, content=content, headers=JSON)
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
            assert answer.headers["connection"] == "close"


async def test_unknown_paths_and_methods(http):
    for method, path, status in (
        ("GET", "/nope", 404), ("GET", TEXT, 405), ("DELETE", "/health", 405), ("POST", "/health", 405),
        ("POST", TEXT + "/", 404)
    ):
        answer = await http.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["type"]
    assert "POST" in (await http.get(TEXT)).headers["allow"]


@pytest.mark.parametrize(("path", "meant"), [
    ("/chat/completions", CHAT), ("/v1/v1/chat/completions", CHAT), (TEXT + "/", TEXT), ("/completions/", TEXT),
    ("/v1/health", "/health"), ("/v1/", None), ("/nope", None), ("/v1", None),
])
async def test_paths_that_are_nearly_right_are_told_the_right_one(http, path, meant):
    answer = await http.post(path, json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404 and message.partition(";")[2] == (f" did you mean {meant}?" if meant else "")


async def test_a_model_that_loads_is_not_called_unknown():
    client = FakeClient(state="starting")
    client.facts = None
    chat = {"model": "fake-model", "messages": [USER]}
    bodies = {
        CHAT: chat, "/v1/messages": {**chat, "max_tokens": 1}, "/v1/messages/count_tokens": chat,
        "/tokenize": {"model": "fake-model", "prompt": "x"}, "/v1/responses/input_tokens": {**chat, "input": "x"},
    }
    del bodies["/v1/responses/input_tokens"]["messages"]
    async with http_for(client) as http:
        for path, body in bodies.items():
            answer = await http.post(path, json=body)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1, (path, answer.text)
        assert (await http.get("/v1/models/fake-model")).status_code == 503


async def test_a_fault_of_ours_is_a_500_without_details(http, client):
    client.tokenizer.render_chat = lambda *_, **__: 1 / 0
    answer = await http.post(CHAT, json={"messages": [USER]})
    assert (
        answer.status_code == 500 and "ZeroDivision" not in answer.text
        and answer.json()["error"]["type"] == "server_error"
    )


@pytest.mark.parametrize("state", ["starting", "restarting", "draining", "stopped"])
async def test_not_ready_is_503_with_retry_after(state):
    async with http_for(FakeClient(state=state)) as http:
        for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": [USER]}), ("/generate", {"text": "x"})):
            answer = await http.post(path, json=body)
            assert (
                answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                and answer.json()["error"]["code"] == "engine_unavailable"
            )
        answer = await http.get("/ready")
        assert answer.status_code == 503
        says_stage = "(loading weights)" in answer.json()["error"]["message"]
        assert says_stage == (state in ("starting", "restarting"))
        assert (await http.get("/health")).json()["engine"] == state
        assert (await http.get("/metrics")).status_code == 200


async def test_key_is_needed_but_for_what_tells_nothing(client):
    async with http_for(client, api_key="s3cret") as http:
        for path in ("/", "/docs", "/openapi.json", "/health", "/ready", "/ping", "/metrics"):
            assert (await http.get(path)).status_code == 200
        for path in (
            "/v1/models", "/server_info", "/docs/", "/openapi.json/", "/nope", "/health/", "/healthx", "/metrics/x",
            "http://server//health", "/health_generate", "/flush_cache"
        ):
            answer = await http.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", path
        for given in (
            "Bearer s3cre", "Bearer s3crett", "s3cret", "Basic s3cret", "Bearer",
            "Bearer \u00e9".encode("latin-1").decode("latin-1")
        ):
            assert (
                await http.get("/v1/models", headers=[(b"authorization", given.encode("latin-1"))])
            ).status_code == 401
        assert (await http.get("/v1/models", headers={"Authorization": "Bearer s3cret"})).status_code == 200
        assert (await http.post(TEXT, json={"prompt": "x"})).status_code == 401
        info = await http.get("/server_info", headers={"Authorization": "Bearer s3cret"})
        assert "s3cret" not in info.text and info.json()["options"]["api_key"] == "***"


async def test_keys_that_are_no_keys(client):
    for key in ("", "  "):
        with pytest.raises(ConfigError, match="api_key must not be empty"):
            async with http_for(client, api_key=key) as http:
                await http.get("/health")
    async with http_for(client, api_key="clé\n") as http:
        for sent, status in (("clé".encode(), 200), (b"cl", 401)):
            assert (await http.get("/v1/models", headers=[(b"authorization", b"Bearer " + sent)])).status_code == status


async def test_cors_and_root_path(client):
    async with http_for(
        client, cors_origins="https://a.example, https://b.example", root_path="/llm", api_key="k"
    ) as http:
        asked = {
            "Origin": "https://b.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"
        }
        answer = await http.options(TEXT, headers=asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://b.example"
        assert (await http.options(TEXT, headers={**asked, "Origin": "https://c.example"})).status_code == 400
        refused = await http.post(
            TEXT, json={"prompt": "x"}, headers={"Origin": "https://b.example", "X-Request-Id": "me"}
        )
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://b.example"
        assert (
            refused.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After, Warning"
            and refused.headers["x-request-id"] == "me"
        )
        for path in ("/health", "/llm/health"):
            assert (await http.get(path)).status_code == 200
        document = (await http.get("/openapi.json", headers={"Authorization": "Bearer k"})).json()
        assert document["servers"] == [{"url": "/llm"}]
