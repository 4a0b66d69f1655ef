"""The fixed workloads, and their run through a fake `LLM`."""

from __future__ import annotations

import hashlib
import io
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.serving.bench import offline
from headrace.serving.bench.offline import ALL, run_offline_bench
from headrace.serving.bench.options import OfflineBenchOptions

FINGERPRINTS = {
    "latency1": "07862a4765a0b197", "offline256": "81c3ca5ff92604a3", "prefill16x8k": "7b2f83963c35d5d0",
    "sharedprefix": "066c27c3b5776934",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_the_workloads_never_change(name):
    """Figures measured with them elsewhere stay comparable only while every id is the same."""
    assert hashlib.sha256(json.dumps(ALL[name](49152)).encode()).hexdigest()[:16] == FINGERPRINTS[name]


def test_the_workloads_are_what_they_say():
    (prompt,), outputs = ALL["latency1"](32000)
    assert len(prompt) == 512 and outputs == [256]
    prompts, outputs = ALL["offline256"](32000)
    assert len(prompts) == len(outputs) == 256 and min(map(len, prompts)) >= 100 and max(map(len, prompts)) <= 1024
    prompts, outputs = ALL["sharedprefix"](32000)
    assert (
        len({tuple(p[:2048]) for p in prompts}) == 1 and len({tuple(p) for p in prompts}) == 512
        and set(map(len, prompts)) == {2112}
    )
    assert all(1000 <= i < 31000 for p in prompts[:2] for i in p)


class FakeLlm:
    made: ClassVar[list[FakeLlm]] = []

    def __init__(self, model, **options):
        self.model, self.options, self.calls, self.resets, self.closed = model, options, [], 0, False
        self.facts = SimpleNamespace(vocab_size=32000, max_model_len=4096, device="cpu", dtype="float32")
        FakeLlm.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def reset_prefix_cache(self):
        self.resets += 1
        return True

    def generate(self, *, prompt_token_ids, sampling_params):
        self.calls.append((prompt_token_ids, sampling_params))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)], num_cached_tokens=3)
            for p in sampling_params
        ]


def test_runs_the_workloads_and_writes_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "LLM", FakeLlm, raising=False)
    out, text = tmp_path / "rows.json", io.StringIO()
    options = OfflineBenchOptions(
        workloads="latency1, prefill16x8k,sharedprefix", repeats=2, max_prompts=5, output_file=str(out)
    )
    rows = run_offline_bench(options, Console(file=text, width=200), model="some/model", load_format="dummy")
    llm = FakeLlm.made[-1]
    assert llm.closed and llm.model == "some/model" and llm.options == {"load_format": "dummy", "skip_tokenizer": True}
    assert llm.resets == 4 and len(llm.calls) == 6
    latency, prefill, shared = rows
    assert (latency.prompt_tokens, latency.output_tokens, latency.cached_tokens) == (512, 256, 3)
    assert (
        (shared.prompt_tokens, shared.output_tokens) == (5 * 2112, 5 * 16)
        and shared.note == "only the first 5 of 512 prompts" and not latency.note
    )
    assert prefill.note == "not run: needs 8193 tokens of context, the model has 4096" and prefill.total_throughput == 0
    assert all(p.ignore_eos and p.temperature == 0 and not p.detokenize for _, params in llm.calls for p in params)
    written = json.loads(out.read_text())["rows"]
    assert written[0]["output_throughput"] == pytest.approx(256 / latency.seconds)
    assert "sharedprefix" in text.getvalue() and "some/model" in text.getvalue()


@pytest.mark.parametrize("names", ["", "latency2", "latency1,nope"])
def test_unknown_workloads_are_refused_before_a_model_is_loaded(names, monkeypatch):
    monkeypatch.setattr(offline, "LLM", None, raising=False)
    with pytest.raises(ConfigError, match="workloads must be of latency1"):
        run_offline_bench(OfflineBenchOptions(workloads=names), model="m")
