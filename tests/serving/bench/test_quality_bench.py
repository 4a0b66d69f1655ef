"""The quality report's figures against definitions, and its run through a fake `LLM`."""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.base.messages import MemoryLine
from headrace.base.step import TokenLogprobs
from headrace.serving.bench import quality
from headrace.serving.bench.options import QualityOptions
from headrace.serving.bench.quality import count_same, divergence, read_text, run_quality_bench


def place(probabilities: dict[int, float]) -> TokenLogprobs:
    ordered = sorted(probabilities.items(), key=lambda item: -item[1])
    return TokenLogprobs(
        ordered[0][0], math.log(ordered[0][1]), 1, [t for t, _ in ordered], [math.log(p) for _, p in ordered]
    )


def test_divergence_of_whole_distributions_is_the_textbooks():
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.2, 2: 0.7, 3: 0.1}
    assert divergence(place(p), place(q)) == pytest.approx(sum(p[t] * math.log(p[t] / q[t]) for t in p), abs=1e-6)
    assert divergence(place(p), place(p)) == pytest.approx(0, abs=1e-9)


def test_divergence_of_a_part_is_a_lower_bound():
    p, q = {1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}, {1: 0.3, 2: 0.4, 3: 0.1, 4: 0.2}
    whole = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    part = divergence(place({1: 0.5, 2: 0.3}), place({1: 0.3, 2: 0.4, 4: 0.2}))
    assert 0 < part < whole


def test_outputs_are_alike_until_they_differ():
    assert [count_same([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [1, 2], [])] == [3, 1, 2, 0]


def test_the_text_is_long_enough_and_another_can_be_read(tmp_path):
    assert len(read_text(None).split()) > 1500
    (tmp_path / "own.txt").write_text("my own words")
    assert read_text(str(tmp_path / "own.txt")) == "my own words"
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_text(str(tmp_path / "absent.txt"))


class FakeLlm:
    """One token per word; the form of weights says how sure it is."""

    made: ClassVar[list[dict]] = []

    def __init__(self, model, **options):
        self.made.append({"model": model, **options})
        self.sure = {"none": 0.5, "int8": 0.4, "stored": 0.25}[options["quantization"]]
        self.tokenizer = SimpleNamespace(encode=lambda text, **_: list(range(len(text.split()))))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def memory_plan(self):
        return [MemoryLine("weights", int(1000 * self.sure))]

    def generate(self, *, prompt_token_ids, sampling_params):
        entry = TokenLogprobs(7, math.log(self.sure), 1, [7], [math.log(self.sure)])
        tokens = [1] * int(self.sure * 40) + [2] * sampling_params.max_tokens
        return [
            SimpleNamespace(
                prompt_logprobs=[None] + [entry] * (len(ids) - 1),
                outputs=[SimpleNamespace(token_ids=tokens[: sampling_params.max_tokens])]
            )
            for ids in prompt_token_ids
        ]


def test_each_form_is_read_beside_the_plain_one(monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "LLM", FakeLlm)
    FakeLlm.made.clear()
    console, path = Console(file=io.StringIO(), width=160), tmp_path / "quality.json"
    options = QualityOptions(compare="int8, stored", window=100, max_tokens=250, output_file=str(path))
    rows = run_quality_bench(options, console, model="m", threads=1)
    assert (
        [(m["model"], m["quantization"], m["threads"]) for m in FakeLlm.made]
        == [("m", "none", 1), ("m", "int8", 1), ("m", "stored", 1)]
    )
    assert [m.get("dtype") for m in FakeLlm.made] == ["float32", None, None]
    assert rows[1].kl_p99 == pytest.approx(rows[1].kl, abs=1e-6)
    assert [round(row.perplexity, 6) for row in rows] == [2.0, 2.5, 4.0]
    assert [row.num_bytes for row in rows] == [500, 400, 250]
    assert rows[1].kl == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6), abs=1e-6)
    assert [row.same_len for row in rows] == [32, 16, 10]
    assert "int8" in console.file.getvalue() and json.loads(path.read_text())["num_tokens"] == 99 + 99 + 49
    run_quality_bench(QualityOptions(compare="int8/int8", window=100, max_tokens=250), None, model="m")
    assert (
        (FakeLlm.made[-1]["quantization"], FakeLlm.made[-1]["kv_dtype"]) == ("int8", "int8")
        and "kv_dtype" not in FakeLlm.made[-2]
    )
    run_quality_bench(QualityOptions(compare="stored/auto/bfloat16", window=100, max_tokens=250), None, model="m")
    assert FakeLlm.made[-1].items() >= {"quantization": "stored", "kv_dtype": "auto", "dtype": "bfloat16"}.items()
    for wrong in ({"compare": " ,"}, {"text": str(tmp_path / "short.txt")}):
        (tmp_path / "short.txt").write_text("too short")
        with pytest.raises(ConfigError):
            run_quality_bench(QualityOptions(**wrong), None, model="m")
