"""Pipeline stages compute what one rank does: the same tokens, logprobs alike, for every family, on CPU ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from execution.tiny_checkpoint import write_tiny_checkpoint
from parallel import rank_processes
from parallel.rank_processes import Ranked, RankProcesses
from parallel.test_tensor_parallel import compare, compare_embeddings, compare_images, draw_config
from safetensors.torch import load_file, save_file
from service import random_models, tiny_vision

from headrace import LLM, SamplingParams
from headrace.base.errors import ModelError
from headrace.base.step import StepPlan
from headrace.service import build

FOUR = {
    "LlamaForCausalLM": (1, 4), "DeepseekV3ForCausalLM": (1, 4), "Gemma3ForCausalLM": (2, 2),
    "GptOssForCausalLM": (2, 2),
}
"""Families that four ranks serve here, tied and sliding windows, latent attention, mixtures, and the layout in which
they do without --slow: ranks of a stage, and stages."""


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


LATENT_STREAMS = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 256, "hidden_size": 32,
    "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "qk_rope_head_dim": 8, "q_lora_rank": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "num_hash_layers": 1, "sliding_window": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 32,
    "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0,
}


def test_streams_and_caches_of_several_kinds_go_through_stages(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    count = ranks.ranks.layout.pipeline + 1
    config = {**LATENT_STREAMS, "num_hidden_layers": count, "compress_ratios": [0, 4, 128, 4, 4][:count]}
    compare(ranks, config, tmp_path, monkeypatch)


def test_layers_stay_with_the_one_that_selects_for_them(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """GLM's layers of kind ``shared`` attend to what the latest of kind ``full`` has selected; 3 and 1 would be even
    with the head."""
    pipeline = ranks.ranks.layout.pipeline
    config = {
        **draw_layers("DeepseekV3ForCausalLM", ranks), "architectures": ["GlmMoeDsaForCausalLM"], "q_lora_rank": 20,
        "model_type": "glm_moe_dsa", "index_n_heads": 32, "index_head_dim": 16, "index_topk": 6, "n_group": 1,
        "num_hidden_layers": 2 * pipeline + 1, "indexer_types": [*["full", "shared"] * pipeline, "shared"],
        "first_k_dense_replace": 0,
    }
    compare(ranks, config, tmp_path, monkeypatch)


@pytest.mark.parametrize("family", [*random_models.DENSE, *random_models.MIXTURES])
def test_tokens_of_stages_are_those_of_one_rank(
    ranks: RankProcesses, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    layout = (ranks.ranks.layout.tensor, ranks.ranks.layout.pipeline)
    if ranks.size > 2 and family not in FOUR:
        pytest.skip("four ranks serve four families here")
    if ranks.size > 2 and layout != FOUR[family] and not request.config.getoption("slow"):
        pytest.skip("four ranks serve it in this layout with --slow")
    compare(ranks, draw_layers(family, ranks), tmp_path, monkeypatch)


def test_ranks_of_a_stage_divide_experts(ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if ranks.ranks.layout.tensor == 1:
        pytest.skip("a stage has one rank")
    compare(ranks, draw_layers("Qwen3MoeForCausalLM", ranks), tmp_path, monkeypatch, enable_expert_parallel=True)
    config = {**draw_layers("DeepseekV3ForCausalLM", ranks), "first_k_dense_replace": 1}
    own = {"enable_expert_parallel": True, "enable_eplb": True, "pipeline_layers": "1,2"}  # one without experts
    compare(ranks, config, tmp_path, monkeypatch, **own)
    own["eplb_config"] = '{"step_interval": 3, "num_redundant_experts": 2}'
    config = {**LATENT_STREAMS, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    compare(ranks, config, tmp_path, monkeypatch, **own)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification"])
def test_an_encoder_has_stages_as_well(
    ranks: RankProcesses, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compare_embeddings(ranks, architecture, tmp_path, monkeypatch, num_layers=ranks.ranks.layout.pipeline)


def test_parts_of_images_are_added_where_their_layers_are(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Behind two layers, of which one may be the last of a stage; positions have three axes on all stages."""
    folder = tiny_vision.write_qwen3(tmp_path / "qwen", ranks.ranks.layout.pipeline + 1)
    compare_images(ranks, folder, monkeypatch)


def test_stages_change_weights_together_or_not_at_all(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    count = ranks.ranks.layout.pipeline
    first, second, broken = (
        write_tiny_checkpoint(tmp_path / name, seed, num_hidden_layers=count)
        for name, seed in (("first", 1), ("second", 2), ("broken", 3))
    )
    path = broken / "model.safetensors"  # of one stage alone
    save_file({name: x for name, x in load_file(path).items() if "layers.0.mlp.down" not in name}, path)
    options = {"skip_tokenizer": True, "dtype": "float32", "device": "cpu", "kv_pages": 64, "threads": 1}
    prompts = [{"prompt_token_ids": list(range(3, 30))}, {"prompt_token_ids": list(range(9, 20))}]

    def generate(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    expected = []
    for folder in (first, second):
        with LLM(str(folder), **options) as llm:
            expected.append(generate(llm))
    assert expected[0] != expected[1]
    monkeypatch.setattr(build, "build_executor", ranks.builder({"model": str(first), **options}))
    with LLM(str(first), **options) as llm:
        engine = llm._client._engine
        assert generate(llm) == expected[0]
        engine.drain()
        with pytest.raises(ModelError, match="tensors missing"):
            engine.executor.replace_weights(str(broken), "auto")
        assert generate(llm) == expected[0]
        engine.drain()
        engine.executor.replace_weights(str(second), "auto")
        assert generate(llm) == expected[1]
        engine.drain()
        engine.executor.release_memory(["weights", "kv_cache"])
        engine.executor.acquire_memory(["weights", "kv_cache"])
        assert generate(llm) == expected[1]


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
