"""Fields that clients of vLLM, SGLang and llama.cpp use: repetition samplers, named and all logprobs, matched stops,
timings, templates, lists of texts; and the routes that their tools call."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_apps import events_of, http_for
from fake_client import EOS, QUEUED_S, VOCAB

from headrace.base.sampling import SamplingParams
from headrace.service.tokenization.tokenizer import GapMarks

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
DRY = {
    "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n"], "xtc_probability": 0.5, "xtc_threshold": 0.2,
}


@pytest.mark.parametrize("path, body", [
    (CHAT, {"messages": [USER], **DRY}), (TEXT, {"prompt": "x", **DRY}), (RESPONSES, {"input": "x", **DRY}),
    ("/generate", {"text": "x", "sampling_params": DRY}),
])
async def test_dry_and_xtc_arrive_at_the_engine(http, client, path, body):
    answer = await http.post(path, json={**body, **({} if path == "/generate" else {"max_output_tokens": 16}
                                                    if path == RESPONSES else {"max_tokens": 1})})
    assert answer.status_code == 200, answer.text
    params: SamplingParams = client.submitted[0][1]
    assert {name: getattr(params, name) for name in DRY} == DRY
    assert client.tokenizer.marked == ("\n",), "found before the request is submitted, on a thread"


async def test_dry_range_is_the_window_and_0_the_whole_context(http, client):
    for given, expected in ((0, -1), (100, 100)):
        await http.post(TEXT, json={"prompt": "x", "max_tokens": 1, "dry_multiplier": 1, "dry_range": given})
        assert client.submitted[-1][1].dry_penalty_last_n == expected
    wrong = await http.post(TEXT, json={"prompt": "x", "dry_range": 1, "dry_penalty_last_n": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "dry_range"


async def test_logprobs_of_named_tokens(http, api):
    chat = await api.chat.completions.create(
        model="default", messages=[USER], max_tokens=2, logprobs=True, top_logprobs=1,
        extra_body={"logprob_token_ids": [65, 66, 65], "prompt_logprobs": 0}
    )
    entry = chat.choices[0].logprobs.content[0]
    assert [(t.token, t.logprob) for t in entry.top_logprobs[1:]] == [("A", -65.0), ("B", -66.0)]
    assert chat.model_extra["prompt_logprobs"][1]["66"] == {"logprob": -66.0, "rank": None, "decoded_token": "B"}
    text = await api.completions.create(
        model="default", prompt="x", max_tokens=2, extra_body={"logprob_token_ids": [65]}
    )
    assert all(top["A"] == -65.0 and len(top) == 2 for top in text.choices[0].logprobs.top_logprobs)
    streamed = await http.post(TEXT, json={"prompt": "x", "max_tokens": 2, "logprob_token_ids": [65], "stream": True})
    assert all('"A":-65.0' in event for event in events_of(streamed.text)[:2])
    native = await http.post("/generate", json={
        "text": "xy", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "logprob_start_len": 0,
        "token_ids_logprob": [66, 65], "return_text_in_logprobs": True
    })
    info = native.json()["meta_info"]
    assert info["output_token_ids_logprobs"] == [[[-66.0, 66, "B"], [-65.0, 65, "A"]]] * 2
    assert info["input_token_ids_logprobs"] == [None, *[[[-66.0, 66, "B"], [-65.0, 65, "A"]]] * 2]
    for path, body in (
        ("/generate", {"text": "x", "token_ids_logprob": [1]}), (TEXT, {"prompt": "x", "logprob_token_ids": [-1]}),
        (TEXT, {"prompt": "x", "logprob_token_ids": [1] * 129}),
    ):
        assert (await http.post(path, json=body)).status_code == 400


async def test_logprobs_of_all_tokens(http, client, api):
    chat = await api.chat.completions.create(
        model="default", messages=[USER], max_tokens=2, logprobs=True, top_logprobs=-1
    )
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [VOCAB, VOCAB]
    text = await http.post(TEXT, json={"prompt": "x", "max_tokens": 1, "prompt_logprobs": -1})
    assert len(text.json()["choices"][0]["prompt_logprobs"][1]) == VOCAB
    native = await http.post("/generate", json={
        "text": "x", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "top_logprobs_num": -1
    })
    assert len(native.json()["meta_info"]["output_top_logprobs"][0]) == VOCAB
    for path, body in (
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": -1, "stream": True}),
        (TEXT, {"prompt": "x", "logprobs": -1, "stream": True}), (TEXT, {"prompt": ["x", "y"], "logprobs": -1}),
        ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": -1, "stream": True}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400 and "logprobs" in answer.json()["error"]["param"], answer.text


async def test_few_requests_for_all_logprobs_run_at_once(http, client):
    body = {"prompt": "HOLD", "logprobs": -1, "max_tokens": 2}
    held = [asyncio.create_task(http.post(TEXT, json={**body, "rid": f"r{i}"})) for i in range(4)]
    while len(client.submitted) < 4:
        await asyncio.sleep(0.01)
    refused = await http.post(TEXT, json={**body, "prompt": "x"})
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert (await http.post(TEXT, json={"prompt": "x", "max_tokens": 1, "logprobs": 5})).status_code == 200
    await http.post("/abort_request", json={"abort_all": True})
    await asyncio.gather(*held)
    assert (await http.post(TEXT, json={**body, "prompt": "x"})).status_code == 200


async def test_matched_stop_tells_what_ended_the_output(http, client):
    client.script = b"abc."
    for stream in (False, True):
        body = {"messages": [USER], "stream": stream}
        for stop, expected in (("b", "b"), (None, None)):
            answer = await http.post(CHAT, json={**body, "stop": stop})
            last = json.loads(events_of(answer.text)[-2]) if stream else answer.json()
            choice = last["choices"][0]
            assert (choice["finish_reason"], choice.get("matched_stop")) == ("stop", expected)
    text = await http.post(TEXT, json={"prompt": "x", "stop": ["c"], "max_tokens": 9})
    assert text.json()["choices"][0]["matched_stop"] == text.json()["choices"][0]["stop_reason"] == "c"
    native = await http.post("/generate", json={"text": "x", "sampling_params": {"stop": "b", "max_new_tokens": 9}})
    assert native.json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    assert EOS  # the id of end of text: see the assembler's own test


async def test_patterns_arrive_at_the_engine(http, client):
    for path, body in (
        (TEXT, {"prompt": "x", "stop_regex": r"a+\n"}), (CHAT, {"messages": [USER], "stop_regex": [r"a+\n"]}),
        ("/generate", {"text": "x", "sampling_params": {"stop_regex": r"a+\n", "max_new_tokens": 1}}),
        (RESPONSES, {"input": "x", "stop_regex": r"a+\n"}),
    ):
        limit = {"max_output_tokens": 16} if path == RESPONSES else {} if path == "/generate" else {"max_tokens": 1}
        answer = await http.post(path, json={**body, **limit})
        assert answer.status_code == 200 and client.submitted[-1][1].stop_patterns() == [r"a+\n"], answer.text
    for wrong in ("", [""], ["a"] * 33, "a" * 257):
        answer = await http.post(TEXT, json={"prompt": "x", "stop_regex": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("stop_regex")


async def test_the_gap_before_a_suffix_is_filled(http, client):
    client.tokenizer.gap_marks = GapMarks(280, 281, 282)
    answer = await http.post(TEXT, json={"prompt": ["ab", "c"], "suffix": "de", "max_tokens": 2})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
    assert client.prompts == [[256, 280, 97, 98, 281, 100, 101, 282], [256, 280, 99, 281, 100, 101, 282]]
    client.tokenizer.gap_marks = GapMarks(280, 281)  # the suffix first
    await http.post(TEXT, json={"prompt": "ab", "suffix": "de", "max_tokens": 2, "add_special_tokens": False})
    assert client.prompts[-1] == [281, 100, 101, 280, 97, 98]
    for wrong in ({"prompt": [1, 2]}, {"echo": True}, {"truncate_prompt_tokens": 5}):
        answer = await http.post(TEXT, json={"prompt": "ab", "suffix": "de", **wrong})
        assert answer.status_code == 400, answer.text
    chat = await http.post(CHAT, json={"messages": [USER], "suffix": "de"})
    assert chat.status_code == 400 and "/v1/completions" in chat.text


async def test_either_side_of_a_prompt_is_cut(http, client):
    long = {"prompt": "abcdef", "max_tokens": 1, "truncate_prompt_tokens": 3}
    for side, expected in ((None, [256, 101, 102]), ("left", [256, 101, 102]), ("right", [256, 97, 98])):
        assert (await http.post(TEXT, json={**long, "truncation_side": side})).status_code == 200
        assert client.prompts[-1] == expected
        await http.post(TEXT, json={**long, "prompt": [1, 2, 3, 4, 5], "truncation_side": side})
        assert client.prompts[-1] == ([1, 2, 3] if side == "right" else [3, 4, 5])
    chat = {"messages": [USER], "max_tokens": 1, "truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert (await http.post(CHAT, json=chat)).status_code == 200 and client.prompts[-1] == list(b"user")
    assert (await http.post(TEXT, json={**long, "truncation_side": "middle"})).status_code == 400


async def test_timings_are_told_on_request(http):
    for path, body in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "hello"})):
        for stream in (False, True):
            plain = await http.post(path, json={**body, "max_tokens": 3, "stream": stream})
            assert "timings" not in plain.text
            answer = await http.post(path, json={**body, "max_tokens": 3, "stream": stream, "return_timings": True})
            told = [json.loads(e) for e in events_of(answer.text)[:-1]] if stream else [answer.json()]
            timings = [one["timings"] for one in told if "timings" in one]
            assert len(timings) == 1 and timings[0] == told[-1]["timings"]
            assert timings[0]["queue_s"] == QUEUED_S and timings[0]["cached_tokens"] > 0
            assert timings[0]["prefill_s"] >= 0 and timings[0]["decode_s"] >= 0
    native = await http.post("/generate", json={"text": ["a", "b"], "return_timings": True})
    assert all(one["meta_info"]["timings"]["queue_s"] == QUEUED_S for one in native.json())


async def test_timings_count_accepted_drafts(http, client):
    client.drafts = 2
    asked = {"max_tokens": 8, "return_timings": True}
    for path, body in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "hello"})):
        for stream in (False, True):
            answer = await http.post(path, json={**body, **asked, "n": 2, "stream": stream})
            told = json.loads(events_of(answer.text)[-2]) if stream else answer.json()
            # of each choice: the first token, two steps of three tokens, and the last
            assert (told["timings"]["draft_tokens"], told["timings"]["accepted_tokens"]) == (2 * 9, 2 * 4)
    sampling = {"max_new_tokens": 8}
    native = await http.post("/generate", json={"text": "a", "return_timings": True, "sampling_params": sampling})
    assert native.json()["meta_info"]["timings"]["accepted_tokens"] == 4
    client.drafts = 0
    plain = await http.post(TEXT, json={"prompt": "hello", **asked})
    assert plain.json()["timings"]["draft_tokens"] == plain.json()["timings"]["accepted_tokens"] == 0


async def test_templates_of_requests_need_a_flag(http, client):
    bodies = {
        CHAT: {"messages": [USER], "max_tokens": 1}, "/tokenize": {"messages": [USER]},
        "/apply-template": {"messages": [USER]}, RESPONSES: {"input": "hi", "max_output_tokens": 16},
    }
    for path, body in bodies.items():
        answer = await http.post(path, json={**body, "chat_template": "{{ x }}"})
        assert answer.status_code == 400 and "--trust-request-chat-template" in answer.text
        assert (await http.post(path, json={**body, "chat_template": ""})).status_code == 200
    async with http_for(client, trust_request_chat_template=True) as trusting:
        for path, body in bodies.items():
            answer = await trusting.post(path, json={**body, "chat_template": "{{ x }}"})
            assert answer.status_code == 200, answer.text
        shown = await trusting.post("/apply-template", json={"messages": [USER], "chat_template": "{{ x }}"})
        assert shown.json() == {"prompt": "{{ x }}:1"} and client.prompts[-1].startswith("{{ x }}")


async def test_apply_template(http):
    body = {"messages": [USER], "temperature": 0.5, "chat_template_kwargs": {"a": 1}}
    assert (await http.post("/apply-template", json=body)).json() == {"prompt": "user: hi\nassistant:"}
    whole = {**body, "messages": [USER, {"role": "assistant", "content": "so"}], "add_generation_prompt": False}
    assert (await http.post("/apply-template", json=whole)).json() == {"prompt": "user: hi\nassistant: so\n"}
    assert (await http.post("/apply-template", json={"messages": []})).status_code == 400


async def test_load_and_ping(http, client):
    assert (await http.get("/load")).json() == {"server_load": 0}
    held = asyncio.create_task(http.post(TEXT, json={"prompt": "HOLD", "rid": "r"}))
    while not client.submitted:
        await asyncio.sleep(0.01)
    assert (await http.get("/load")).json() == {"server_load": 1}
    await http.post("/abort_request", json={"rid": "r"})
    await held
    for method in ("GET", "POST"):
        assert (await http.request(method, "/ping")).status_code == 200
    client.state = "starting"
    assert (await http.get("/ping")).status_code == 503 and (await http.get("/load")).status_code == 200


async def test_lists_of_texts_are_tokenized(http):
    for name in ("prompt", "text"):
        answer = (await http.post("/tokenize", json={name: ["ab", "", "é"], "return_token_strs": True})).json()
        assert answer["tokens"] == [[256, 97, 98], [256], [256, 195, 169]] and answer["count"] == [3, 1, 3]
        assert [len(strings) for strings in answer["token_strs"]] == [3, 1, 3]
    plain = (await http.post("/tokenize", json={"prompt": ["ab"], "add_special_tokens": False})).json()
    assert plain["tokens"] == [[97, 98]] and "token_strs" not in plain
    for wrong in ([], ["a", 1], ["x"] * 2049):
        assert (await http.post("/tokenize", json={"prompt": wrong})).status_code == 400


async def test_responses_take_what_chats_take(api, client):
    await api.responses.create(
        model="default", input="hi", max_output_tokens=16, extra_body={
            "top_k": 5, "seed": 7, "stop": ["zz"], "presence_penalty": 0.5, "frequency_penalty": 0.25,
            "repetition_penalty": 1.1, "min_p": 0.1, "logit_bias": {"97": 1}, "ignore_eos": True, "min_tokens": 2,
            "chat_template_kwargs": {"mood": "good"}, "priority": 3, "cache_salt": "me",
        }
    )
    ((_, params, namespace, priority),) = client.submitted
    assert (params.top_k, params.seed, params.stop, params.min_p, params.min_tokens) == (5, 7, ["zz"], 0.1, 2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, 0.25, 1.1)
    assert params.logit_bias == {97: 1.0} and params.ignore_eos and (namespace, priority) == ("me", 3)
    assert client.tokenizer.options == {"mood": "good"}


@pytest.mark.parametrize("path, body", [
    (CHAT, {"messages": [USER], "seed": -1}), (TEXT, {"prompt": "x", "seed": -1}),
    (RESPONSES, {"input": "x", "seed": -1}),
    ("/generate", {"text": "x", "sampling_params": {"sampling_seed": -1}}),
    ("/api/chat", {"model": "default", "messages": [USER], "stream": False, "options": {"seed": -1}}),
])
async def test_a_seed_of_minus_one_is_none(http, client, path, body):
    """As vLLM, llama.cpp and Ollama have it; as a seed, it would make all such requests sample the same tokens."""
    assert (await http.post(path, json=body)).status_code == 200
    assert client.submitted[-1][1].seed is None
