"""Large bodies are decoded in pieces, to the same records and errors as in one call."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from array import array
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.base.errors import HeadraceError
from headrace.serving.http.protocol.messages import MessagesRequest
from headrace.serving.http.protocol.native import GenerateRequest, NativeSampling
from headrace.serving.http.protocol.openai import ChatRequest, CompletionRequest
from headrace.serving.http.transport import pieces, spans
from headrace.serving.http.transport.endpoint import LARGE_BYTES, JsonBody
from headrace.serving.http.transport.pieces import PieceReader

TEXTS = ("", "a", 'quote " and \\ and \n', "é😀\u2028", "\\u0041", "[{,:}]" * 30, "x" * 300, "\\" * 7)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    a: str | None = None
    b: Annotated[list[int | str], msgspec.Meta(max_length=40)] | None = None


class One(msgspec.Struct, tag_field="type", tag="one"):
    text: str


class Two(msgspec.Struct, tag_field="type", tag="two"):
    items: list[Any] | None = None


class Outer(msgspec.Struct):
    ids: list[int | str | list[int]]
    text: str | list[str] | None = None
    inner: Inner | None = None
    free: dict[str, Any] | None = None
    parts: list[One | Two] | None = None
    number: float | None = None


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    for module in (pieces, spans):
        monkeypatch.setattr(module, "PIECE_BYTES", 24)


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return rng.choice([None, True, 1.5e-7, -3, 10**12])
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return [rng.randrange(99999) for _ in range(rng.randrange(40))]
    if kind == 6:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {rng.choice(TEXTS) + str(i): _value(rng, depth + 1) for i in range(rng.randrange(5))}


def _document(rng: random.Random) -> dict[str, Any]:
    fields = {
        "ids": [rng.choice([5, 77777, "b" * 30, [1, 2, 3], []]) for _ in range(rng.randrange(30))],
        "text": rng.choice([None, *TEXTS, ["c" * 30, "d"] * 3]),
        "inner": {"a": rng.choice(TEXTS), "b": [1, "x"] * rng.randrange(24)},
        "free": {str(i): _value(rng) for i in range(3)},
        "parts": [rng.choice([{"type": "one", "text": "t" * 40}, {"items": [1, [2] * 20], "type": "two"}])] * 3,
        "number": rng.choice([1, 2.5, None]), "unknown": _value(rng),
    }
    return {name: fields[name] for name in rng.sample(sorted(fields), rng.randrange(2, 8))}


def _plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=list))


def _read(body: bytes, kind: type[msgspec.Struct]) -> Any:
    reader = PieceReader(body)
    return reader.decode(reader.document, kind) if reader.document.is_large else msgspec.json.decode(body, type=kind)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(400))
def test_pieces_decode_to_what_one_call_does(seed: int):
    rng = random.Random(seed)
    text = json.dumps(_document(rng), indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
    if seed % 2:  # most of these are no JSON any more, or of other types
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice([b"", b",", b'"', b"]", b"}", b"{", b"\\", b"1", b":", b" ", b"\xff"]) + text[
            place + rng.randrange(2) :]
    try:
        expected = msgspec.json.decode(text, type=Outer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            _read(text, Outer)
    else:
        assert _plain(_read(text, Outer)) == _plain(expected)


BIG = 300_000


@pytest.mark.parametrize(("record", "body"), [
    (CompletionRequest, {"prompt": [7] * BIG, "n": "x"}),
    (CompletionRequest, {"prompt": [*[7] * BIG, -1]}),
    (CompletionRequest, {"prompt": [[1, 2]] * 5 + [[7] * BIG + ["a"]]}),
    (CompletionRequest, {"prompt": "a" * 10, "regex": "a" * 2 * BIG}),
    (CompletionRequest, {"prompt": ["a" * 2 * BIG, {}]}),
    (CompletionRequest, {"prompt": {"a": "b" * 2 * BIG}}),
    (CompletionRequest, {"prompt": "b" * 2 * BIG, "promt": 1}),
    (CompletionRequest, {"suffix": "b" * 2 * BIG}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [1] * BIG}),
    (ChatRequest, {"messages": [{"role": "user", "content": 1}, {"role": "user", "content": "x" * 2 * BIG}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": "x" * 2 * BIG}, {"role": "boss", "content": ""}]}),
    (ChatRequest, {"messages": "a" * 2 * BIG}),
    (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "x" * 2 * BIG}, {"type": "text", "text": 3}]}]}),
])
def test_errors_are_those_of_one_call(record: type[msgspec.Struct], body: dict[str, Any]):
    decoder, text = JsonBody(record), json.dumps(body).encode()
    assert len(text) > LARGE_BYTES
    with pytest.raises(HeadraceError) as expected:
        decoder.decode(text)
    with pytest.raises(HeadraceError) as found:
        decoder._decode_parts([text], None, None)
    assert (found.value.param, type(found.value)) == (expected.value.param, type(expected.value))
    assert found.value.message == expected.value.message


def test_large_bodies_become_the_same_records():
    text = json.dumps({"prompt": [[1, 2, 3], [7] * BIG], "max_tokens": 3, "user": None, "n": 1}).encode()
    body = JsonBody(CompletionRequest)._decode_parts([text], None, None)
    assert list(map(list, body.prompt)) == [[1, 2, 3], [7] * BIG] and (body.max_tokens, body.n) == (3, 1)
    assert all(isinstance(ids, array) for ids in body.prompt)
    native = {"text": "é" * BIG, "sampling_params": {"max_new_tokens": 2, "no_such": None, "logit_bias": {"5": 1}}}
    decoder = JsonBody(GenerateRequest, nested=("sampling_params", NativeSampling))
    with pytest.raises(HeadraceError, match=r"sampling_params\.no_such"):
        decoder._decode_parts([json.dumps({**native, "sampling_params": {"no_such": 1}}).encode()], None, None)
    ignored: list[str] = []
    found = decoder._decode_parts([json.dumps({**native, "odd": 1}, ensure_ascii=False).encode()], ignored, None)
    assert found.text == native["text"] and found.sampling_params.logit_bias == {5: 1} and "odd" in ignored


async def test_prompts_of_too_many_ids_are_refused_undecoded(client: FakeClient, monkeypatch: pytest.MonkeyPatch):
    most = client.facts.max_model_len
    async with http_for(client) as http:
        kept = await http.post("/v1/completions", json={"prompt": [65] * BIG, "truncate_prompt_tokens": 4})
        assert kept.status_code == 200 and kept.json()["usage"]["prompt_tokens"] == 4
        monkeypatch.setattr(pieces, "array", lambda *_: pytest.fail("it was decoded"))
        for path, field in (("/v1/completions", "prompt"), ("/generate", "input_ids")):
            refused = await http.post(path, json={field: [65] * BIG})
            assert refused.status_code == 400
            assert f"{most} tokens (max_model_len); the prompt has {BIG}" in refused.text


async def test_others_are_answered_while_a_large_body_is_decoded(client: FakeClient):
    body = json.dumps({"prompt": [65] * 3_000_000, "truncate_prompt_tokens": 4}).encode()
    async with http_for(client) as http:
        giant = asyncio.create_task(
            http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        )
        num_answered = 0
        while not giant.done():
            assert (await http.get("/health")).status_code == 200
            num_answered += 1
            await asyncio.sleep(0.002)
        assert (await giant).json()["usage"]["prompt_tokens"] == 4
    assert num_answered > 3, "one call would let two through at most: before it and after it"


def test_collections_of_garbage_do_not_look_at_located_values():
    """Each would otherwise hold the GIL for as long as it takes to look at all values of all bodies being read."""
    values = ", ".join('"a": {"b": [1, "c"]}'.replace("a", f"a{i}") for i in range(20_000))
    document = spans.find_spans(f"{{{values}}}".encode())
    assert len(document.children) == 40_000
    assert not any(map(gc.is_tracked, [document, *document.children]))


def test_long_texts_without_escapes_are_skipped():
    """Base64 of an image of 8 MB is not read character by character: that would hold up all streams."""
    body = json.dumps({"url": "QUJD" * 2_500_000}).encode()

    def measure(work: Callable[[bytes], object]) -> float:
        times = []
        for _ in range(3):
            began = time.thread_time()
            work(body)
            times.append(time.thread_time() - began)
        return min(times)

    assert measure(spans.find_spans) + measure(spans.check_num_values) < measure(msgspec.json.decode)
