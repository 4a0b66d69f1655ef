"""Pipeline stages compute what one rank does: the same tokens, logprobs alike, for every family, on CPU ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parallel import rank_processes
from parallel.rank_processes import Ranked, RankProcesses
from parallel.test_tensor_parallel import compare, compare_embeddings, draw_config
from service import random_models

from headrace import LLM, SamplingParams
from headrace.base.step import StepPlan
from headrace.service import build

FOUR = ("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")
"""Families that four ranks serve here: tied and sliding windows, latent attention, mixtures."""


@pytest.fixture(scope="module", params=[(1, 2), (1, 4), (2, 2)], ids=lambda sizes: f"tp{sizes[0]}pp{sizes[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    made = RankProcesses(*request.param)
    yield made
    made.close()


def draw_layers(family: str, ranks: RankProcesses) -> dict[str, Any]:
    """A random configuration of a family with a layer for each stage, and one more."""
    config, layout = draw_config(family, ranks.ranks.layout.tensor), ranks.ranks.layout
    config["num_hidden_layers"] = layout.pipeline + 1
    if "layer_types" in config:  # one kind is on one stage alone
        config["layer_types"] = ["sliding_attention", *["full_attention"] * layout.pipeline]
    return config


@pytest.mark.parametrize("family", [*random_models.DENSE, *random_models.MIXTURES])
def test_tokens_of_stages_are_those_of_one_rank(
    ranks: RankProcesses, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if ranks.size > 2 and family not in FOUR:
        pytest.skip("four ranks serve four families here")
    layout = ranks.ranks.layout
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    compare(ranks, draw_layers(family, ranks), tmp_path, monkeypatch, **sizes)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification"])
def test_an_encoder_has_stages_as_well(
    ranks: RankProcesses, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layout = ranks.ranks.layout
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    compare_embeddings(ranks, architecture, tmp_path, monkeypatch, num_layers=layout.pipeline, **sizes)


def test_stages_compute_at_the_same_time(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The last stage finishes a step only once the first has begun with as many as there are stages."""
    pipeline, followers = ranks.ranks.layout.pipeline, ranks.followers
    begun_before: list[int] = []

    class Patient(Ranked):
        def __init__(self, executor: Any, *rest: Any):
            super().__init__(executor, *rest)
            launch = executor.execute

            def launch_late(plan: StepPlan) -> Any:
                # prompts of 16 tokens and steps of 16: each of the first plans has a chunk
                first_stage = followers.begun[-1]
                deadline = time.monotonic() + 20
                while plan.step_id == 0 and len(first_stage) < pipeline and time.monotonic() < deadline:
                    followers.read(0.1)
                begun_before.append(len(first_stage))
                return launch(plan)

            executor.execute = launch_late

    followers.read(0)
    for begun in followers.begun:
        begun.clear()
    monkeypatch.setattr(rank_processes, "Ranked", Patient)
    config = draw_layers("LlamaForCausalLM", ranks)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {
        "model": str(tmp_path), "load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "device": "cpu",
        "max_model_len": 256, "kv_pages": 64, "max_step_tokens": 16,
    }
    monkeypatch.setattr(build, "build_executor", ranks.builder(options))
    prompts = [{"prompt_token_ids": [(3 * i + j) % 90 for j in range(16)]} for i in range(2 * pipeline)]
    with LLM(**options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert begun_before[0] == pipeline
