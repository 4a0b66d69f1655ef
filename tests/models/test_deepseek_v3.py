"""What is DeepSeek-V3's own beyond parity: two ways to attend, 8-bit checkpoints, layers that are not loaded."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import build_harness, dequantise_blocks
from test_parity import oracle_logits

from headrace.base.errors import ConfigError, WeightError
from headrace.layers import latent_attention
from headrace.models.catalog import find_family

SCALED = ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "down_proj")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return make_oracle(*CASES["deepseek-v3"])


def test_both_ways_to_attend_say_the_same(oracle: Any, monkeypatch: pytest.MonkeyPatch):
    tokens, expected = [prompt(0), prompt(1, 9)], None
    for is_whole in (True, False):
        harness = build_harness(config_json(oracle), oracle.state_dict())
        if not is_whole:
            monkeypatch.setattr(latent_attention, "has_whole_prompts", lambda inputs: False)
        logits = torch.cat(harness.step(*((harness.start(), t) for t in tokens)))
        if expected is None:
            expected = logits
        assert logits is expected or not torch.equal(logits, expected), "two ways, which round differently"
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(expected[: len(tokens[0])], oracle_logits(oracle, tokens[0]), atol=1e-4, rtol=1e-4)


def test_a_checkpoint_of_scaled_8_bit_floats(oracle: Any):
    """Equal to one that was dequantised before; layers beyond the last are left out."""
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in oracle.state_dict().items():
        if name.split(".")[-2] in SCALED and tensor.dim() == 2:
            scale = tensor.abs().max().view(1, 1) / 448
            stored[name], stored[f"{name}_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), scale
            plain[name] = dequantise_blocks(stored[name], scale)
        else:
            stored[name] = plain[name] = tensor
    assert len(stored) > len(plain)
    stored["model.layers.3.enorm.weight"] = torch.ones(48)
    logits = []
    for tensors in (plain, stored):
        harness = build_harness(config_json(oracle), tensors)
        logits.append(harness.step((harness.start(), prompt(0)))[0])
    assert torch.equal(*logits)


def test_a_missing_scale_is_told(oracle: Any):
    tensors = dict(oracle.state_dict())
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(WeightError, match=r"o_proj"):
        build_harness(config_json(oracle), {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})


def test_a_token_costs_one_vector_per_layer(oracle: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    family = find_family("DeepseekV3ForCausalLM")
    specs = family.cache_specs(family.read_config(config_json(oracle)), "bfloat16")
    assert {(s.kind, s.num_kv_heads, s.head_dim, s.value_dim) for s in specs} == {("mla", 1, 24, 16)}


@pytest.mark.parametrize(("options", "named"), [
    ({"n_group": 3}, "n_group"), ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ({"attention_bias": True}, "attention_bias"),
])
def test_values_that_cannot_be_served_are_named(oracle: Any, options: dict[str, Any], named: str):
    with pytest.raises(ConfigError) as caught:
        find_family("DeepseekV3ForCausalLM").read_config({**config_json(oracle), **options})
    assert named in str(caught.value)
