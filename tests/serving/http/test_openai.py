"""The OpenAI client against a live server over the fake engine: it must get what it would get from OpenAI."""

from __future__ import annotations

import asyncio
import re

import openai
import pytest
from fake_apps import live_server
from fake_client import BOS, FakeClient, expected_text

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app
from headrace.serving.http.generation import run

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}
]
RENDERED = "system: Be brief.\nuser: Hello\nthere\nassistant:"


@pytest.fixture
async def api(client: FakeClient):
    async with live_server(create_app(client, ServerConfig())) as address, openai.AsyncOpenAI(
        base_url=address + "/v1", api_key="x", max_retries=0, timeout=30
    ) as api:
        yield api


async def test_completion_and_its_usage(api):
    answer = await api.completions.create(model="fake-model", prompt="once", max_tokens=12)
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == expected_text("once", 12)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 2}
    }


async def test_default_lengths(api, client):
    await api.completions.create(model="fake-model", prompt="once")
    await api.chat.completions.create(model="fake-model", messages=MESSAGES, stop="a")
    assert [p.max_tokens for _, p, _, _ in client.submitted] == [16, None]
    limit = client.facts.max_model_len
    near = await api.completions.create(model="fake-model", prompt=[7] * (limit - 3))
    assert (near.choices[0].finish_reason, near.usage.completion_tokens) == ("length", 3), "nobody asked for 16"
    with pytest.raises(openai.BadRequestError, match="max_tokens is 16"):
        await api.completions.create(model="fake-model", prompt=[7] * (limit - 3), max_tokens=16)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"n": 3}, {"stop": ["k", "xy"]}, {"n": 2, "logprobs": 2}, {"seed": 5, "echo": True},
        {"n": 3, "logprobs": 1, "echo": True}
    ],
    ids=str
)
async def test_streamed_completions_equal_whole_ones(api, options):
    body = {"model": "fake-model", "prompt": ["one", "two", "three"], "max_tokens": 20, **options}
    whole = await api.completions.create(**body)
    text, reasons, tokens, values, offsets, usage = {}, {}, {}, {}, {}, None
    async for event in await api.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
                values.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert text == {c.index: c.text for c in whole.choices}
    assert {i: r[-1] for i, r in reasons.items()} == {c.index: c.finish_reason for c in whole.choices}
    assert all(not any(r[:-1]) for r in reasons.values())
    assert len(whole.choices) == 3 * options.get("n", 1)
    assert usage == whole.usage
    if "logprobs" in options:
        assert tokens == {c.index: c.logprobs.tokens for c in whole.choices}
        assert values == {c.index: c.logprobs.token_logprobs for c in whole.choices}
        assert offsets == {c.index: c.logprobs.text_offset for c in whole.choices}


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": "e"}, {"logprobs": True, "top_logprobs": 2}], ids=str)
async def test_streamed_chat_equals_whole_one(api, options):
    body = {"model": "fake-model", "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0.7, **options}
    whole = await api.chat.completions.create(**body)
    text, roles, reasons, logprobs = {}, {}, {}, {}
    async for event in await api.chat.completions.create(**body, stream=True):
        assert event.object == "chat.completion.chunk" and event.usage is None
        (choice,) = event.choices
        text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
        roles.setdefault(choice.index, []).append(choice.delta.role)
        reasons[choice.index] = choice.finish_reason
        if choice.logprobs:
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
    assert text == {c.index: c.message.content for c in whole.choices}
    assert text[0] == expected_text(RENDERED, 20, bos=False)[: len(text[0])]
    assert all(r[0] == "assistant" and not any(r[1:]) for r in roles.values())
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    if "logprobs" in options:
        assert logprobs[0] == whole.choices[0].logprobs.content
        assert [p.token for p in logprobs[0]] == list(text[0]) and bytes(logprobs[0][0].bytes).decode() == text[0][0]
        assert [t.logprob for t in logprobs[0][0].top_logprobs] == [-0.5, -9999.0], "minus infinity must be a number"


async def test_stop_string_is_cut_or_kept(api):
    full = expected_text("once", 40)
    stop = full[7:9]
    begin = full.index(stop)
    cut = await api.completions.create(model="fake-model", prompt="once", max_tokens=40, stop=stop)
    kept = await api.completions.create(
        model="fake-model", prompt="once", max_tokens=40, stop=[stop], extra_body={"include_stop_str_in_output": True}
    )
    assert (cut.choices[0].text, kept.choices[0].text) == (full[:begin], full[: begin + 2])
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].stop_reason == stop


async def test_prompt_forms_give_the_same(api):
    ids = [256, *b"once"]
    answers = [
        await api.completions.create(model="fake-model", prompt=p, max_tokens=8) for p in ("once", ["once"], ids, [ids])
    ]
    assert {a.choices[0].text for a in answers} == {expected_text("once", 8)}


async def test_the_end_of_long_prompts_is_read_where_that_was_asked_for(api, client):
    client.shrink(16)
    for prompt, truncate, num_out, read in [
        ("abcdefgh", 4, 2, [BOS, *b"fgh"]), ("abcdefgh", 1, 2, [*b"h"]), ("abc", 9, 2, [BOS, *b"abc"]),
        ([1, 2, 3, 4], 2, 2, [3, 4]),
        ("a" * 20, -1, 2, [BOS, *b"a" * 13]), ("b" * 30_000, -1, 6, [BOS, *b"b" * 9]),
    ]:
        answer = await api.completions.create(
            model="fake-model", prompt=prompt, max_tokens=num_out, extra_body={"truncate_prompt_tokens": truncate}
        )
        assert answer.usage.prompt_tokens == len(read) and answer.choices[0].text == expected_text(read, num_out)
    messages = [{"role": "user", "content": "x" * 40}]
    answer = await api.chat.completions.create(
        model="fake-model", messages=messages, max_tokens=3, extra_body={"truncate_prompt_tokens": -1}
    )
    assert (
        answer.usage.prompt_tokens == 13 and answer.choices[0].message.content == expected_text([*b"xx\nassistant:"], 3)
    )
    for truncate in (0, 17, -2):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            await api.completions.create(
                model="fake-model", prompt="a", extra_body={"truncate_prompt_tokens": truncate}
            )
    with pytest.raises(openai.BadRequestError, match="at most"):
        await api.completions.create(model="fake-model", prompt="a" * 20, max_tokens=2)


async def test_echo_with_logprobs_and_no_new_tokens(api):
    answer = await api.completions.create(model="fake-model", prompt="once", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "once"
    assert choice.logprobs.tokens == ["<256>", *"once"] and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {"o": -0.5}
    assert choice.finish_reason == "length" and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    async for event in await api.completions.create(model="fake-model", prompt="once", max_tokens=0, stream=True):
        assert event.choices[0].text == "" and event.choices[0].finish_reason == "length"


async def test_logprobs_of_characters_in_several_tokens(api):
    answer = await api.completions.create(
        model="fake-model", prompt="é日x", echo=True, max_tokens=1, logprobs=1,
        extra_body={"add_special_tokens": False},
    )
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    assert found.tokens[:6] == [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5", "x"]
    assert found.text_offset == [0, 0, 1, 1, 1, 2, 3] and text[2:] == "".join(found.tokens[5:])


@pytest.mark.parametrize("skips", [True, False])
async def test_offsets_are_those_of_the_text(api, skips):
    """Whatever the tokens: special ones, and bytes that are no character."""
    ids = [0x96, 0x61, 0xe6, BOS, 0x62, 0xe6, 0x97, 0xa5, 0xe6, 0x63, 0xe0, 0x80, 0x64]
    answer = await api.completions.create(
        model="fake-model", prompt=ids, echo=True, max_tokens=2, logprobs=0, extra_body={"skip_special_tokens": skips}
    )
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    where = dict(zip(found.tokens, found.text_offset, strict=True))
    special = "" if skips else "<256>"
    assert text.startswith(f"\ufffda\ufffd{special}b日\ufffdc\ufffd\ufffdd")
    assert [text[where[letter]] for letter in "abcd"] == list("abcd") and text[where[r"bytes:\xa5"]] == "日"
    assert found.text_offset == sorted(found.text_offset) and len(found.text_offset) == len(ids) + 2
    text = "ab<256>"
    for prompt in (text, [text, text]):  # behind the token that begins it
        answer = await api.completions.create(model="fake-model", prompt=prompt, echo=True, max_tokens=1, logprobs=0)
        assert answer.choices[-1].logprobs.text_offset == [0, *range(len(text) + 1)]


async def test_answers_come_back_with_what_clients_note_about_them(api, client):
    call = {
        "id": "c1", "type": "function", "index": 0, "provider_specific_fields": None,
        "function": {"name": "f", "arguments": "{}"}
    }
    noted = {
        "role": "assistant", "content": "a", "tool_calls": [call], "provider_specific_fields": {"x": 1},
        "thinking_blocks": [], "reasoning_details": [{}], "function_call": None, "audio": None, "refusal": None,
        "annotations": []
    }
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": parts}, noted, {"role": "tool", "tool_call_id": "c1", "content": "b"}]
    await api.chat.completions.create(model="fake-model", messages=messages, max_tokens=1)
    assert (
        client.tokenizer.messages[0]["content"] == "hi"
        and client.tokenizer.messages[1]["content"].startswith("a\n<tool_call>")
    )
    assert not any(
        {"provider_specific_fields", "thinking_blocks", "reasoning_details"} & set(m) for m in client.tokenizer.messages
    )


async def test_greedy_choices_are_the_same(api):
    answer = await api.completions.create(model="fake-model", prompt="once", max_tokens=3, temperature=0, n=2)
    assert [c.index for c in answer.choices] == [0, 1]


async def test_extensions_arrive_at_the_engine(api, client):
    await api.completions.create(
        model="fake-model", prompt="once", max_tokens=4, temperature=0.5, logit_bias={"97": -5}, seed=3, user="u",
        extra_body={
            "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "bad_words": ["x"],
            "allowed_token_ids": [97, 98], "stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False,
            "priority": 3, "cache_salt": "me", "request_id": "mine"
        },
    )
    ((request_id, params, namespace, priority),) = client.submitted
    assert (request_id, namespace, priority) == ("cmpl-mine", "me", 3)
    assert (
        params.top_k, params.min_p, params.repetition_penalty, params.min_tokens, params.seed
    ) == (7, 0.1, 1.2, 2, 3)
    assert (
        params.logit_bias, params.allowed_token_ids, params.bad_words, params.stop_token_ids
    ) == ({97: -5.0}, [97, 98], ["x"], [5])
    assert params.ignore_eos and not params.skip_special_tokens


async def test_token_ids_and_prompt_logprobs_on_request(api):
    answer = await api.chat.completions.create(
        model="fake-model", messages=MESSAGES, max_tokens=3, extra_body={"return_token_ids": True, "prompt_logprobs": 1}
    )
    assert bytes(answer.prompt_token_ids).decode() == RENDERED
    assert bytes(answer.choices[0].token_ids).decode() == answer.choices[0].message.content
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(RENDERED)
    assert answer.prompt_logprobs[1][str(ord("y"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "y"}


async def test_continuous_usage(api):
    body = {"model": "fake-model", "messages": MESSAGES, "max_tokens": 5, "stream": True}
    stream = await api.chat.completions.create(
        **body, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [e.usage.completion_tokens async for e in stream]
    assert counts == sorted(counts) and counts[-1] == 5 and counts[:2] == [0, 1], "the first chunk shows only the role"


async def test_models(api):
    models = await api.models.list()
    assert [m.id for m in models.data] == ["fake-model"]
    assert (await api.models.retrieve("fake-model")).max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("other/model")


async def test_many_logprobs_and_many_prompts_are_told_as_few_are(http, monkeypatch):
    bodies = {
        "/v1/completions": {
            "prompt": [f"prompt {i}" for i in range(70)], "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2,
            "seed": 1
        },
        "/v1/chat/completions": {
            "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "max_tokens": 3
        },
        "/generate": {
            "text": ["a", "bc"], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
            "sampling_params": {"max_new_tokens": 3}
        },
    }

    async def ask() -> list[str]:
        answers = [
            await http.post(path, json={"rid": "mine", **body}) if path != "/generate"
            else await http.post(path, json=body) for path,
            body in bodies.items()
        ]
        assert {answer.status_code for answer in answers} == {200}
        return [re.sub(r'"(created|id|e2e_latency|call_id)":("[^"]*"|[\d.e-]+)', "", answer.text) for answer in answers]

    few = await ask()
    assert few[0].count('"text":"prompt ') == 140
    monkeypatch.setattr(run, "MANY_LOGPROBS", 0)
    assert await ask() == few


async def test_errors_have_their_classes(api, client):
    with pytest.raises(openai.NotFoundError) as caught:
        await api.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError) as caught:
        await api.completions.create(model="fake-model", prompt="FULL", stream=True)
    assert caught.value.response.headers["retry-after"] == "7" and caught.value.code == "queue_full"
    with pytest.raises(openai.BadRequestError) as caught:
        await api.completions.create(model="fake-model", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.InternalServerError):
        await api.completions.create(model="fake-model", prompt="BREAK3")
    assert not client.tasks and not client.children


async def test_error_in_mid_stream_is_an_event(api):
    text = ""
    with pytest.raises(openai.APIError, match="the step failed"):
        async for event in await api.completions.create(model="fake-model", prompt="BREAK3", stream=True):
            text += event.choices[0].text
    assert text == expected_text("BREAK3", 3)


async def test_concurrency_64(api):
    async def one(i: int) -> str:
        if i % 2:
            return (await api.completions.create(model="fake-model", prompt=f"p{i}", max_tokens=30)).choices[0].text
        return "".join(
            [
                e.choices[0].text async for e in await api.completions.create(
                    model="fake-model", prompt=f"p{i}", max_tokens=30, stream=True
                )
            ]
        )

    assert await asyncio.gather(*map(one, range(64))) == [expected_text(f"p{i}", 30) for i in range(64)]


@pytest.mark.parametrize("side, kept", [("left", "def"), ("right", "abc")])
async def test_the_echo_of_a_prompt_that_was_cut(api, side, kept):
    """It is what the model has read, as the tokens of the logprobs say."""
    extra = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    for prompt, expected in (("abcdef", kept), ("x", "x")):
        answer = await api.completions.create(
            model="fake-model", prompt=prompt, max_tokens=2, echo=True, logprobs=0, extra_body=extra
        )
        found = answer.choices[0]
        assert found.text == expected + "".join(found.logprobs.tokens[-2:])
        assert bytes(i for i in found.prompt_token_ids if i < 256).decode() == expected
