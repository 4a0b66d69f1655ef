"""Checkpoint tensors into parameters: stacked parts, tied heads, types, and errors that name the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.base.errors import WeightError
from headrace.layers.build import Build
from headrace.layers.loading import find_targets
from headrace.models.llama.family import read_config
from headrace.models.llama.model import LlamaModel

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}


def build(dtype: torch.dtype = torch.float32, **options: Any) -> LlamaModel:
    return LlamaModel(read_config({**CONFIG, **options}), Build(torch.device("cpu"), dtype))


def checkpoint(model: LlamaModel) -> dict[str, torch.Tensor]:
    return {name: torch.randn(target.shape) for name, target in find_targets(model, model.names, 2).items()}


def test_parts_land_in_their_rows():
    model = build(attention_bias=True)
    tensors = checkpoint(model)
    model.load_weights(reversed(tensors.items()))
    for layer in range(2):
        attention, mlp = model.layers[layer].attention, model.layers[layer].mlp
        at = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            stacked = torch.cat([tensors[f"{at}self_attn.{part}_proj.{kind}"] for part in "qkv"])
            assert torch.equal(getattr(attention.qkv, kind), stacked)
        assert torch.equal(mlp.gate_up.weight, torch.cat([tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")]))
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


def test_types_are_converted():
    model = build(torch.bfloat16)
    tensors = checkpoint(model)
    model.load_weights(tensors.items())
    assert model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"].bfloat16())


def test_tied_head_shares_storage_and_may_be_in_the_file():
    model = build(tie_word_embeddings=True)
    tensors = checkpoint(build())
    model.load_weights([*tensors.items(), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2))])
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert torch.equal(model.head.weight, tensors["model.embed_tokens.weight"])
    del tensors["lm_head.weight"]
    build(tie_word_embeddings=True).load_weights(tensors.items())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), r"missing \(1\): model.layers.1.self_attn.k_proj.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}), r"not expected \(1\): model.layers.2.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}), r"not expected \(1\): model.layers.0.self_attn.q_proj.bias"),
        (lambda t: t.update({"lm_head.weight": torch.ones(30, 16)}), r"wrong shape \(1\): lm_head.weight is \[30, 16\], not \[31, 16\]"),
    ],
)
def test_faults_are_named(fault: Any, message: str):
    model = build()
    tensors = checkpoint(model)
    fault(tensors)
    with pytest.raises(WeightError, match=message):
        model.load_weights(tensors.items())


def test_a_tensor_given_twice_and_many_missing():
    model = build()
    pairs = [("model.norm.weight", torch.ones(16))] * 2
    with pytest.raises(WeightError, match=r"given twice \(1\): model.norm.weight") as caught:
        model.load_weights(pairs)
    assert "missing (20): " in str(caught.value) and "and 14 more" in str(caught.value)
