"""GGUF names against the gguf package's table, for the parameters of transformers' own models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

from headrace.base.errors import WeightError
from headrace.layers.names import GgufNaming
from headrace.models.catalog import find_gguf_family
from headrace.models.weights.gguf_file import GgufTensor
from headrace.models.weights.gguf_naming import (
    name_tensors,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "granite": "GraniteForCausalLM", "glm4": "Glm4ForCausalLM",
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM", "exaone4": "Exaone4ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}

TIED = ("GemmaForCausalLM", "Gemma2ForCausalLM")
"""The converter's table has no head of these."""


def stored(name, rows=8):
    return GgufTensor(name, (rows, 4), 0, Path("x.gguf"), 0)


def parameter_names(architecture):
    import torch

    model_class = getattr(transformers, architecture)
    config_class = transformers.Gemma3TextConfig if architecture.startswith("Gemma3") else model_class.config_class
    config = config_class(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8, pad_token_id=0, tie_word_embeddings=architecture in TIED, bos_token_id=1, eos_token_id=2,
    )
    with torch.device("meta"):
        return [name for name, _ in model_class(config).named_parameters()]


@pytest.mark.parametrize("gguf_architecture", ARCHITECTURES)
def test_names_invert_the_converters_table(gguf_architecture):
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == gguf_architecture)
    table = gguf.get_tensor_name_map(number, 2)
    names = parameter_names(ARCHITECTURES[gguf_architecture])
    tensors = [stored(table.get_name(name, try_suffixes=(".weight", ".bias"))) for name in names]
    family = find_gguf_family(gguf_architecture)
    metadata = {"general.architecture": gguf_architecture, f"{gguf_architecture}.attention.head_count": 4}
    assert [named.name for named in name_tensors(tensors, metadata, family.gguf_naming)] == names


def test_constants_are_left_out_and_unknown_names_kept():
    tensors = [
        stored("rope_freqs.weight"), stored("rope_factors_long.weight"), stored("blk.0.mystery.weight"),
        stored("v.blk.0.x")
    ]
    assert [named.name for named in name_tensors(tensors, {}, GgufNaming())] == ["blk.0.mystery.weight", "v.blk.0.x"]


def interleave(weight, num_heads):
    """What the converter does to q and k: two halves of a head become pairs."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (8, 1)])
def test_interleaved_rows_are_put_back(num_heads, num_kv_heads):
    metadata = {
        "general.architecture": "a", "a.attention.head_count": num_heads, "a.attention.head_count_kv": num_kv_heads
    }
    tensors = [
        stored("blk.3.attn_q.weight", 6 * num_heads), stored("blk.3.attn_k.weight", 6 * num_kv_heads),
        stored("blk.3.attn_v.weight", 6 * num_kv_heads)
    ]
    query, key, value = name_tensors(tensors, metadata, GgufNaming(is_rotary_interleaved=True))
    for named, heads in ((query, num_heads), (key, num_kv_heads)):
        weight = np.random.default_rng(0).normal(size=(6 * heads, 5))
        np.testing.assert_array_equal(interleave(weight, heads)[named.row_order], weight)
    assert value.row_order is None


def test_head_counts_per_layer_and_unsound_ones():
    metadata = {"general.architecture": "a", "a.attention.head_count": np.array([2, 4])}
    orders = [
        named.row_order
        for named in name_tensors(
            [stored("blk.0.attn_q.weight"), stored("blk.1.attn_q.weight")], metadata,
            GgufNaming(is_rotary_interleaved=True)
        )
    ]
    assert orders[0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7] and orders[1].tolist() == list(range(8))
    for count in (None, 0, 3, "4", np.array([2])):
        with pytest.raises(WeightError, match="head"):
            name_tensors(
                [stored("blk.1.attn_q.weight")], {"general.architecture": "a", "a.attention.head_count": count},
                GgufNaming(is_rotary_interleaved=True)
            )


def test_the_offset_is_for_norm_weights_alone():
    names = [
        "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight", "blk.0.post_ffw_norm.weight",
        "blk.0.ffn_up.weight", "token_embd.weight"
    ]
    offsets = [named.offset for named in name_tensors(map(stored, names), {}, GgufNaming(norm_offset=1.0))]
    assert offsets == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
