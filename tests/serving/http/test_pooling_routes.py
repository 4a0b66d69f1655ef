"""Embeddings, scores, classes over the fake client: shapes, order, bounds, and models of the wrong kind."""

from __future__ import annotations

import base64
import math

import pytest
from fake_apps import http_for
from fake_client import BOS, EOS, FakeClient, fake_result

from headrace.base.pooling import PoolingFacts, PoolingSpec, unpack_floats

EMBED = PoolingFacts("embed", 6, needs_all_tokens=True)
CROSS = PoolingFacts("classify", 1, needs_all_tokens=True, labels=["LABEL_0"], activation="sigmoid", takes_pairs=True)
CLASSES = PoolingFacts("classify", 3, labels=["bad", "fair", "good"], activation="softmax")


def ids_of(text: str) -> list[int]:
    return [BOS, *text.encode()]


async def post(pooling: PoolingFacts | None, path: str, body: dict, **options) -> tuple[int, dict, FakeClient]:
    client = FakeClient(pooling=pooling, max_len=64)
    async with http_for(client, max_batch_prompts=4, **options) as http:
        response = await http.post(path, json=body)
        return response.status_code, response.json(), client


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("one", [ids_of("one")]), (["one", "two"], [ids_of("one"), ids_of("two")]), ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]])
    ],
)
async def test_inputs_in_all_their_shapes(given, expected: list[list[int]]):
    status, answer, client = await post(EMBED, "/v1/embeddings", {"input": given, "model": "fake-model", "user": "u"})
    assert (status, answer["object"], answer["model"]) == (200, "list", "fake-model")
    assert [d["index"] for d in answer["data"]] == list(range(len(expected)))
    for data, ids in zip(answer["data"], expected, strict=True):
        assert data["embedding"] == pytest.approx(fake_result(ids, 6))
    total = sum(map(len, expected))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert all(spec == PoolingSpec(needs_all_tokens=True) for _, spec, _, _ in client.submitted)


@pytest.mark.parametrize("path, pooling, body", [
    ("/v1/embeddings", EMBED, {"input": ["one", "ABORT"]}),
    ("/v1/score", CROSS, {"text_1": "ABORT", "text_2": "b"}), ("/v1/classify", CLASSES, {"input": "ABORT"}),
])
async def test_an_aborted_text_has_no_empty_result(path: str, pooling: PoolingFacts, body: dict):
    status, answer, _ = await post(pooling, path, body)
    assert status == 409 and "aborted" in answer["error"]["message"]


async def test_shorter_embeddings_in_both_encodings():
    full = fake_result(ids_of("x"), 6)
    length = math.hypot(*full[:2])
    _, answer, _ = await post(EMBED, "/v1/embeddings", {"input": "x", "dimensions": 2})
    assert answer["data"][0]["embedding"] == pytest.approx([x / length for x in full[:2]])
    _, answer, _ = await post(EMBED, "/v1/embeddings", {"input": "x", "dimensions": 2, "encoding_format": "base64"})
    assert (
        unpack_floats(base64.b64decode(answer["data"][0]["embedding"])) == pytest.approx([x / length for x in full[:2]])
    )
    _, answer, _ = await post(EMBED, "/v1/embeddings", {"input": "x", "encoding_format": "base64"})
    assert unpack_floats(base64.b64decode(answer["data"][0]["embedding"])) == pytest.approx(full)


async def test_truncation_identity_and_salt_reach_the_engine():
    body = {
        "input": "abcdef", "truncate_prompt_tokens": 3, "request_id": "mine", "cache_salt": "s", "priority": 4,
        "add_special_tokens": False
    }
    _, answer, client = await post(EMBED, "/v1/embeddings", body)
    assert answer["id"] == "mine" and answer["usage"]["total_tokens"] == 3
    assert [(name, salt, priority) for name, _, salt, priority in client.submitted] == [("mine", "s", 4)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 5}, "input"),
        ("/v1/embeddings", {"input": "a" * 64}, "input"),
        ("/v1/embeddings", {"input": [300]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 4}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruct": "i"}, "instruct"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/v1/score", {"query": "a", "items": ["b"]}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}, "label_token_ids"),
        ("/v1/classify", {"input": "a"}, "model"),
        ("/encode", {"text": "a", "input_ids": [1]}, "text"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict, param: str):
    status, answer, client = await post(EMBED, path, body)
    assert (status, answer["error"]["param"].split("[")[0]) == (400, param), answer
    assert "is not supported" not in answer["error"]["message"]
    assert not client.submitted


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_orders_documents(path: str):
    documents = ["one", {"text": "two"}, "three"]
    status, answer, client = await post(CROSS, path, {"query": "q", "documents": documents, "top_n": 2})
    texts = ["one", "two", "three"]
    logits = [fake_result([BOS, *b"q", EOS, *text.encode()], 1)[0] for text in texts]
    order = sorted(range(3), key=lambda i: -logits[i])[:2]
    assert status == 200 and [r["index"] for r in answer["results"]] == order
    assert (
        [r["relevance_score"] for r in answer["results"]]
        == pytest.approx([1 / (1 + math.exp(-logits[i])) for i in order])
    )
    assert [r.get("document") for r in answer["results"]] == [
        None if path == "/v2/rerank" else {"text": texts[i]} for i in order
    ]
    assert all(spec.second_start == 3 for _, spec, _, _ in client.submitted)
    _, answer, _ = await post(
        CROSS, path, {"query": "q", "documents": documents, "return_documents": path == "/v2/rerank"}
    )
    assert all(("document" in r) == (path == "/v2/rerank") for r in answer["results"])


async def test_scores_of_pairs():
    _, answer, _ = await post(CROSS, "/v1/score", {"text_1": "q", "text_2": ["a", "b"]})
    assert [(d["index"], d["object"]) for d in answer["data"]] == [(0, "score"), (1, "score")]
    _, paired, _ = await post(CROSS, "/score", {"queries": ["q", "q"], "documents": ["a", "b"]})
    assert [d["score"] for d in paired["data"]] == [d["score"] for d in answer["data"]]
    _, compared, client = await post(EMBED, "/v1/score", {"text_1": "a", "text_2": "a"})
    assert compared["data"][0]["score"] == pytest.approx(1.0) and len(client.submitted) == 1


async def test_label_probabilities():
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [7, 8]}
    _, answer, client = await post(None, "/v1/score", body)
    assert answer["object"] == "scoring" and [spec.label_ids for _, spec, _, _ in client.submitted] == [[7, 8]] * 2
    assert answer["scores"][0] == pytest.approx([math.exp(x) for x in fake_result(ids_of("qa"), 2)])
    _, answer, _ = await post(None, "/v1/score", {**body, "apply_softmax": True, "item_first": True})
    assert [sum(row) for row in answer["scores"]] == pytest.approx([1.0, 1.0])
    _, answer, client = await post(None, "/v1/score", {"query": [1], "items": [[2], [3]], "label_token_ids": [7]})
    assert answer["usage"]["total_tokens"] == 4


async def test_classes():
    _, answer, _ = await post(CLASSES, "/v1/classify", {"input": ["x"]})
    logits = fake_result(ids_of("x"), 3)
    powers = [math.exp(x) for x in logits]
    (found,) = answer["data"]
    assert found["probs"] == pytest.approx([p / sum(powers) for p in powers]) and found["num_classes"] == 3
    assert found["label"] == ["bad", "fair", "good"][logits.index(max(logits))]
    for raw in ({"use_activation": False}, {"activation": False}):
        _, answer, _ = await post(CLASSES, "/classify", {"input": ["x"], **raw})
        assert answer["data"][0]["probs"] == pytest.approx(logits)


async def test_native_form():
    _, answer, _ = await post(EMBED, "/encode", {"text": "x", "rid": "me"})
    assert answer["embedding"] == pytest.approx(fake_result(ids_of("x"), 6))
    assert (answer["meta_info"]["id"], answer["meta_info"]["prompt_tokens"]) == ("me", 2)
    _, answer, _ = await post(EMBED, "/encode", {"input_ids": [[1, 2], [3]]})
    assert [a["meta_info"]["prompt_tokens"] for a in answer] == [2, 1]


@pytest.mark.parametrize(
    ("pooling", "path", "body"),
    [
        (None, "/v1/embeddings", {"input": "a"}),
        (None, "/encode", {"text": "a"}),
        (None, "/v1/classify", {"input": "a"}),
        (CROSS, "/v1/embeddings", {"input": "a"}),
        (CLASSES, "/v1/rerank", {"query": "q", "documents": ["d"]}),
        (EMBED, "/v1/completions", {"prompt": "a"}),
        (EMBED, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (EMBED, "/generate", {"text": "a"}),
        (CROSS, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_model_of_another_kind_says_what_it_is(pooling: PoolingFacts | None, path: str, body: dict):
    status, answer, client = await post(pooling, path, body)
    assert (
        (status, answer["error"]["param"]) == (400, "model")
        and "fake-model" in answer["error"]["message"] + "fake-model" * (pooling is CLASSES)
    )
    assert not client.submitted


async def test_facts_tell_the_task():
    for pooling, task in ((None, "generate"), (EMBED, "embed"), (CROSS, "classify")):
        async with http_for(FakeClient(pooling=pooling)) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["task"] == task
            assert (await http.get("/model_info")).json()["is_generation"] == (pooling is None)
            assert (await http.get("/health_generate")).status_code == 200


async def test_the_begin_of_single_texts_is_cut_on_request():
    for side, expected in (("left", [BOS, *b"ef"]), ("right", [BOS, *b"ab"]), (None, [BOS, *b"ab"])):
        body = {"input": "abcdef", "truncate_prompt_tokens": 3, "truncation_side": side}
        status, answer, _ = await post(EMBED, "/v1/embeddings", body)
        assert status == 200 and answer["data"][0]["embedding"] == pytest.approx(fake_result(expected, 6))
    pair = {"text_1": "a", "text_2": "b", "truncation_side": "left"}
    status, answer, _ = await post(CROSS, "/v1/score", pair)
    assert status == 400 and answer["error"]["param"] == "truncation_side"
