"""Adapters that PEFT saved: what the reader makes of them gives the same logits as PEFT, merged and unmerged."""

from __future__ import annotations

import json
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import peft_rig as rig
import pytest
import torch
import transformers
from transformers import LlamaConfig, PhiConfig, Qwen2Config

from headrace.base.errors import HeadraceError
from headrace.models.adapters.config import parse_config

pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def check(model: Any, folder: Path, *, is_tied: bool = False, changes: bool = True, **fields: Any) -> Any:
    """The parts that were read, which must give the logits of PEFT."""
    adapted = rig.adapt(model, folder, **fields)
    sites = rig.find_sites(model, rig.names_of(model), is_tied=is_tied)
    weights = rig.read(folder, sites)
    wanted = rig.outputs_of(adapted)
    found = rig.outputs_of(rig.merge(model, sites, weights))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # PEFT merges into both of two tied weights what is of one, and twice what is of both
    if not is_tied or "embed_tokens" not in fields["target_modules"]:
        merged = rig.outputs_of(adapted.merge_and_unload())
        torch.testing.assert_close(found, merged, rtol=1e-4, atol=1e-4)
    if changes:
        assert (found - rig.outputs_of(model)).abs().max() > 1e-2
    return weights


def test_every_field_of_peft_is_applied_or_refused_by_name():
    """Those that a later version adds are found here first."""
    for field in fields_of(__import__("peft").LoraConfig):
        try:
            parse_config(json.dumps({"r": 4, field.name: True}))
        except HeadraceError as error:
            assert field.name in error.message and "is not known here" not in error.message


@pytest.fixture(scope="module")
def llama() -> Any:
    return rig.make_model(LlamaConfig(**rig.LLAMA))


@pytest.fixture(scope="module")
def tied() -> Any:
    return rig.make_model(LlamaConfig(**{**rig.LLAMA, "tie_word_embeddings": True}))


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "every linear": {"target_modules": [*ATTENTION, *MLP]},
    "rslora": {"target_modules": ATTENTION, "use_rslora": True, "r": 8},
    "dora": {"target_modules": [*ATTENTION, *MLP], "use_dora": True},
    "dora and rslora": {"target_modules": ATTENTION, "use_dora": True, "use_rslora": True},
    "rank_pattern": {
        "target_modules": [*ATTENTION, *MLP],
        "rank_pattern": {"q_proj": 2, r"layers\.[12]\.mlp\.(gate|up)_proj": 6, "^model.layers.0.self_attn.o_proj": 3},
    },
    "alpha_pattern": {
        "target_modules": ATTENTION, "alpha_pattern": {"k_proj": 32, r".*\.0\..*": 1}, "use_rslora": True,
        "rank_pattern": {"k_proj": 9},
    },
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "head and embedding": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "low rank head and embedding": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "a module of a branch": {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]},
    "layers": {"target_modules": ATTENTION, "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ATTENTION, "layers_to_transform": 1, "layers_pattern": "layers"},
    "patterns of layers": {"target_modules": MLP, "layers_to_transform": [1], "layers_pattern": ["h", "lay.rs"]},
    "excluded": {"target_modules": ATTENTION, "exclude_modules": ["layers.1.self_attn.q_proj", "o_proj"]},
    "excluded by pattern": {"target_modules": ATTENTION, "exclude_modules": r".*\.layers\.[01]\..*"},
    "pattern": {"target_modules": r".*\.(0|2)\.self_attn\.(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "token rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9, 63]},
    "token rows by name": {
        "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 60], "lm_head": [1, 2, 8]}
    },
    "fan_in_fan_out": {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    "parameters": {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight", "mlp.up_proj.weight"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_gives_the_logits_of_peft(llama: Any, tmp_path: Path, name: str):
    weights = check(llama, tmp_path, **FIELDS[name])
    assert weights.rank == max(part.rank for part in weights.parts) and len(weights.digest) == 64


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases(tmp_path: Path, bias: str):
    model = rig.make_model(Qwen2Config(**rig.LLAMA))
    weights = check(model, tmp_path, target_modules=["q_proj", "k_proj", "o_proj"], bias=bias)
    biased = {part.part for part in weights.parts if part.bias is not None}
    assert biased == ({"q", "k", "v"} if bias == "all" else {"q", "k"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fields", [
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]},
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ], ids=["token rows", "low rank", "saved", "embedding alone", "head alone"],
)
def test_a_head_that_is_the_embedding(tied: Any, tmp_path: Path, fields: dict[str, Any]):
    check(tied, tmp_path, is_tied=True, **fields)


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_the_bias_of_a_head_with_an_addition(tmp_path: Path, bias: str):
    """PEFT saves the base's beside the head's weight; it is another one only where biases are trained."""
    model = rig.make_model(PhiConfig(**rig.LLAMA))
    weights = check(model, tmp_path, target_modules=["embed_tokens", "lm_head"], bias=bias)
    assert any(part.bias is not None for part in weights.parts) == (bias == "lora_only")


MOE: dict[str, Any] = {
    **rig.LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
    "num_local_experts": 4,
}


@pytest.mark.parametrize("config", ["Qwen3MoeConfig", "MixtralConfig", "GptOssConfig"])
@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"], ["gate_up_proj"]])
def test_stacked_experts(tmp_path: Path, config: str, parameters: list[str]):
    model = rig.make_model(getattr(transformers, config)(**MOE))
    check(
        model, tmp_path, target_modules=["q_proj"], target_parameters=[f"mlp.experts.{name}" for name in parameters],
        rank_pattern={"gate_up_proj": 3}, lora_alpha=8,
    )


@pytest.mark.parametrize("config", ["Phi3Config", "Gemma3TextConfig", "Starcoder2Config", "Glm4Config", "Olmo2Config"])
def test_fused_and_unusual_modules(tmp_path: Path, config: str):
    model = rig.make_model(getattr(transformers, config)(**rig.LLAMA, head_dim=8))
    check(model, tmp_path, target_modules="all-linear", is_tied=False)
