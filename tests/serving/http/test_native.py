"""SGLang's native routes."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_apps import events_of, http_for
from fake_client import FakeClient, expected_text

from headrace.serving.http.routes.tokens import PIECE_IDS


async def generate(http, **body):
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_one_prompt(http, client):
    result = await generate(http, text="once", sampling_params={"max_new_tokens": 6, "temperature": 0}, rid="mine")
    assert result["text"] == expected_text("once", 6) and bytes(result["output_ids"]).decode() == result["text"]
    info = result["meta_info"]
    assert (info["id"], info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == ("mine", 5, 6, 2)
    assert info["finish_reason"] == {"type": "length", "length": 6} and info["e2e_latency"] > 0
    assert client.submitted[0][1].temperature == 0


async def test_defaults(http, client):
    await generate(
        http, text="once", sampling_params={"stop": "a", "no_stop_trim": True, "sampling_seed": 4, "min_new_tokens": 2}
    )
    params = client.submitted[0][1]
    assert (
        params.max_tokens, params.min_tokens, params.seed, params.include_stop_str_in_output, params.temperature
    ) == (128, 2, 4, True, 1.0)


async def test_batch_with_parameters_for_each(http):
    results = await generate(
        http, text=["one", "two"], sampling_params=[{"max_new_tokens": 3}, {"max_new_tokens": 4, "n": 2}],
        rid=["a", "b"]
    )
    assert [r["text"] for r in results] == [
        expected_text("one", 3), expected_text("two", 4), expected_text("two", 4, seed=1)
    ]
    assert [r["meta_info"]["id"] for r in results] == ["a", "b/0", "b/1"]


async def test_ids_and_a_batch_of_one(http):
    ids = [256, *b"once"]
    assert (
        await generate(http, input_ids=ids, sampling_params={"max_new_tokens": 4})
    )["text"] == expected_text("once", 4)
    (result,) = await generate(http, input_ids=[ids], sampling_params={"max_new_tokens": 4})
    assert result["text"] == expected_text("once", 4)


async def test_matched_stop(http):
    full = expected_text("once", 30)
    result = await generate(http, text="once", sampling_params={"max_new_tokens": 30, "stop": full[5]})
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": full[5]}


@pytest.mark.parametrize("text, n", [("once", 1), (["one", "two"], 1), ("once", 3)])
async def test_stream_frames_hold_all_so_far(http, text, n):
    body = {"text": text, "sampling_params": {"max_new_tokens": 12, "n": n}}
    whole = await generate(http, **body)
    frames = events_of((await http.post("/generate", json={**body, "stream": True})).text)
    assert frames[-1] == "[DONE]"
    latest: dict[int, dict] = {}
    for frame in map(json.loads, frames[:-1]):
        index = frame.get("index", 0)
        assert frame["text"].startswith(latest.get(index, {"text": ""})["text"])
        latest[index] = frame
    final = whole if isinstance(whole, list) else [whole]
    assert [latest[i]["text"] for i in range(len(final))] == [r["text"] for r in final]
    assert [latest[i]["output_ids"] for i in range(len(final))] == [r["output_ids"] for r in final]
    assert all(f["meta_info"]["finish_reason"]["type"] == "length" for f in latest.values())


async def test_logprobs(http):
    result = await generate(
        http, text="ab", sampling_params={"max_new_tokens": 2}, return_logprob=True, top_logprobs_num=2,
        logprob_start_len=0, return_text_in_logprobs=True
    )
    info, (first, second) = result["meta_info"], result["output_ids"]
    assert info["output_token_logprobs"] == [[-0.5, first, chr(first)], [-0.5, second, chr(second)]]
    assert info["output_top_logprobs"][0] == [[-0.5, first, chr(first)], [-9999.0, 256, "<256>"]]
    assert info["input_token_logprobs"] == [[None, 256, "<256>"], [-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert info["input_top_logprobs"][0] is None
    late = (
        await generate(http, text="ab", sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=2)
    )["meta_info"]
    assert late["input_token_logprobs"] == [[-0.5, 98, None]] and "output_top_logprobs" not in late
    output_only = (
        await generate(http, text="ab", sampling_params={"max_new_tokens": 1}, return_logprob=True)
    )["meta_info"]
    assert output_only["input_token_logprobs"] == []


async def test_a_prompt_is_scored_without_output(http):
    body = {"text": "once", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    result = (await http.post("/generate", json=body)).json()
    assert (result["text"], result["output_ids"], result["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert (
        result["meta_info"]["output_token_logprobs"] == []
        and [t for _, t, _ in result["meta_info"]["input_token_logprobs"]] == [256, *b"once"]
    )
    mixed = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 1}]}
    assert (await http.post("/generate", json=mixed)).status_code == 400


async def test_error_in_mid_stream(http):
    frames = events_of((await http.post("/generate", json={"text": "BREAK2", "stream": True})).text)
    assert (
        json.loads(frames[-2])["error"]["message"] == "the step failed" and frames[-1] == "[DONE]" and len(frames) == 4
    )


async def test_model_defaults_fill_what_is_left_open():
    client = FakeClient(default_sampling={"temperature": 0.6, "top_k": 20.0, "max_new_tokens": 5})
    async with http_for(client) as http:
        await generate(http, text="x", sampling_params={"max_new_tokens": 1, "temperature": 0.1})
        await http.post("/v1/completions", json={"prompt": "x"})
    assert [(p.temperature, p.top_k, p.top_p) for _, p, _, _ in client.submitted] == [(0.1, 20, 1.0), (0.6, 20, 1.0)]


async def test_deadlines_reach_the_engine(http, client):
    await generate(http, text="x", deadline_s=2.5)
    await http.post("/v1/completions", json={"prompt": "x", "deadline_s": 3})
    await http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "deadline_s": 4}
    )
    await generate(http, text="x")
    assert client.deadlines == [2.5, 3, 4, None]


@pytest.mark.parametrize("path, prefix, body", [
    ("/generate", "", {"text": "once", "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/completions", "cmpl-", {"prompt": "once", "max_tokens": 2}),
    ("/v1/chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
])
async def test_request_ids_come_back_with_the_prefix_of_the_api(http, client, path, prefix, body):
    for stream in (False, True):
        answer = await http.post(path, json={**body, "stream": stream}, headers={"X-Request-Id": "trace-1:2.3"})
        assert answer.headers.get_list("x-request-id") == ["trace-1:2.3"] and answer.status_code == 200
        assert client.submitted[-1][0] == f"{prefix}trace-1:2.3" and f'"{prefix}trace-1:2.3"' in answer.text
        own = (await http.post(path, json={**body, "stream": stream})).headers["x-request-id"]
        assert own == client.submitted[-1][0] and own.startswith(prefix or "gen-")
    for given in ("mine", prefix + "mine"):
        named = await http.post(path, json={**body, "rid": given})
        assert named.headers["x-request-id"] == given and client.submitted[-1][0] == prefix + "mine"
    refused = await http.post(path, json={**body, "zzz": 1}, headers={"X-Request-Id": "r"})
    assert refused.status_code == 400 and refused.headers["x-request-id"] == "r"
    assert (await http.post(path, json={**body, "rid": "a\n"})).status_code == 400, "a line break would end the header"
    # what cannot be part of a path or a name still comes back, as tracing proxies expect
    for traced in ("Root=1-67891233-abcdef", "a b/c#{d}", "x" * 256):
        answer = await http.post(path, json=body, headers={"X-Request-Id": traced})
        assert answer.status_code == 200 and answer.headers["x-request-id"] == traced
        assert client.submitted[-1][0].startswith(prefix or "gen-") and traced not in answer.text
    for wrong in ("a\tb", "x" * 257, "\u00e9"):
        answer = await http.post(path, json=body, headers=[(b"x-request-id", wrong.encode("latin-1"))])
        assert (
            answer.status_code == 400 and answer.json()["error"]["param"] == "X-Request-Id"
            and answer.headers["x-request-id"].startswith("req_")
        )


async def test_a_repeated_header_is_no_reason_to_refuse(http, client):
    """Proxies try again with the same header while the first attempt may still run."""
    body, headers = {"prompt": "HOLD"}, {"X-Request-Id": "again"}
    first = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
    while not client.submitted:
        await asyncio.sleep(0.01)
    second = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert second.status_code == 200 and second.headers["x-request-id"] == "again"
    assert second.json()["id"].startswith("cmpl-") and second.json()["id"] != "cmpl-again"
    assert (await http.post("/abort_request", json={"rid": "again"})).json() == {"aborted": 1}
    assert (await first).json()["choices"][0]["finish_reason"] == "abort"


async def test_flush(http, client):
    assert (await http.post("/flush_cache")).json()["success"] and (await http.get("/flush_cache")).status_code == 200
    client.is_flushable = False
    answer = await http.post("/flush_cache")
    assert answer.status_code == 400 and not answer.json()["success"]


async def test_information(http):
    info = (await http.get("/get_server_info")).json()
    assert info["model"]["default_sampling"] == {} == info["model"]["sampling_sources"]
    assert info["model"]["architecture"] == "FakeForCausalLM" and info["max_total_num_tokens"] == 8192
    assert (
        info["memory"][1] == {"name": "KV cache", "num_bytes": 2**21, "note": "8192 tokens"}
        and info["options"]["page_size"] is None
    )
    assert info["stats"]["num_pages"] == 100
    model = (await http.get("/get_model_info")).json()
    assert (
        model == (await http.get("/model_info")).json() and model["is_generation"]
        and model["architectures"] == ["FakeForCausalLM"]
    )


async def test_tokens_there_and_back(http):
    ids = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert ids == {
        "count": 4, "max_model_len": 4096, "tokens": [256, *"hé".encode()],
        "token_strs": ["<256>", "h", "\ufffd", "\ufffd"]
    }
    bare = (await http.post("/tokenize", json={"text": "hé", "add_special_tokens": False})).json()["tokens"]
    assert (await http.post("/detokenize", json={"tokens": bare})).json() == {"prompt": "hé", "text": "hé"}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": "", "text": ""}
    many, text = [*bare, 34, 10] * PIECE_IDS, 'hé"\n' * PIECE_IDS
    assert (await http.post("/detokenize", json={"tokens": many})).json() == {"prompt": text, "text": text}
    chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()["tokens"]
    assert bytes(chat).decode() == "user: x\nassistant:"


async def test_real_token_on_demand(http, client):
    assert (await http.get("/health_generate")).status_code == 200
    assert client.num_tokens == 1
    client.delay_s = 5
    answer = await http.get("/health_generate?timeout=0.05")
    assert answer.status_code == 503 and "no token within" in answer.json()["error"]["message"]
    assert client.aborted, "the probe is not left running"
    for wrong in ("x", "0", "-1", "nan", "1e9"):
        assert (await http.get(f"/health_generate?timeout={wrong}")).status_code == 400


async def test_without_a_tokenizer_ids_are_served(client):
    client.tokenizer = None
    async with http_for(client) as http:
        answer = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2, "logprobs": 1})
        assert answer.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}), ("/tokenize", {"prompt": "x"})
        ):
            assert "token ids only" in (await http.post(path, json=body)).json()["error"]["message"]


async def test_what_the_tokenizer_is(http, client):
    client.tokenizer.chat_templates = ["{{ messages }}"]
    info = (await http.get("/tokenizer_info")).json()
    assert info == {
        "vocab_size": 300, "model_max_length": 4096, "bos_token": "<256>", "eos_token": "<257>",
        "chat_template": "{{ messages }}", "tokenizer_class": "remote",
    }
