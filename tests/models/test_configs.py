"""From config.json and from GGUF metadata to the same spec; values that cannot be served are named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import transformers

from headrace.base.errors import ConfigError
from headrace.models.catalog import find_family, find_gguf_family

WIDE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
}


def metadata(architecture: str, **more: Any) -> dict[str, Any]:
    keys = {
        "context_length": 256, "embedding_length": 64, "block_count": 7, "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0, "rope.dimension_count": 32, **more,
    }
    return {
        "general.architecture": architecture, "tokenizer.ggml.tokens": ["t"] * 64, "tokenizer.ggml.eos_token_id": 5,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
    }


GGUF_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "qwen2": ("Qwen2ForCausalLM", {}, {}),
    "qwen3": ("Qwen3ForCausalLM",
              {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
              {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "gemma3": ("Gemma3ForCausalLM", {"attention.sliding_window": 16, "attention.head_count_kv": [2] * 7},
               {"sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "phi3": (
        "Phi3ForCausalLM", {"attention.sliding_window": 20, "rope.dimension_count": 24},
        {"sliding_window": 20, "partial_rotary_factor": 0.75}
    ),
    "olmo2": ("Olmo2ForCausalLM", {}, {}),
    "granite": ("GraniteForCausalLM",
                {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 8.0},
                {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.2,
                 "logits_scaling": 8.0}),
    "glm4": ("Glm4ForCausalLM", {"rope.dimension_count": 16}, {"partial_rotary_factor": 0.5}),
    "gemma": ("GemmaForCausalLM", {}, {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"attention.sliding_window": 16, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        {
            "sliding_window": 16, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0, "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {}, {}),
    "seed_oss": ("SeedOssForCausalLM", {}, {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}, {}),
    "exaone4": (
        "Exaone4ForCausalLM",
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, False] * 2 + [False]},
        {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2 + ["full_attention", *["sliding_attention"] * 2,
                                                                          *["full_attention"] * 2]},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"attention.layer_norm_epsilon": 1e-6}, {"norm_epsilon": 1e-6}),
    "olmoe": (
        "OlmoeForCausalLM", {"expert_count": 8, "expert_used_count": 2}, {"num_experts": 8, "num_experts_per_tok": 2}
    ),
}


@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf_metadata_reads_like_config_json(name: str):
    architecture, more, options = GGUF_CASES[name]
    family = find_gguf_family(name)
    config = family.gguf_config(metadata(name, **more))
    assert config["architectures"] == [architecture] and config["eos_token_id"] == 5
    assert family.read_config(config) == family.read_config({**WIDE, "architectures": [architecture], **options})


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4", "gemma3"])
def test_without_a_key_length_heads_share_the_width(name: str):
    """That is the format's rule, whatever a config.json of the family would mean by leaving it out."""
    stated = {
        key: value for key,
        value in metadata(name, **{"rope.dimension_count": 16, "attention.sliding_window": 16}).items()
        if "_length" not in key or "context" in key
    }
    stated |= {f"{name}.embedding_length": 64, f"{name}.feed_forward_length": 96}
    family = find_gguf_family(name)
    spec = family.read_config(family.gguf_config(stated))
    assert spec.attention.head_dim == 16


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_without_a_type_divides_all_frequencies(key: str):
    """Older files have nothing else, under either name."""
    family = find_gguf_family("llama")
    scaling = family.read_config(family.gguf_config(metadata("llama", **{key: 4.0}))).layers[0].rope.scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_rotary_divisors_of_a_gguf_file_are_taken_from_the_metadata():
    divisors = np.linspace(1, 9, 16, dtype=np.float32)
    family = find_gguf_family("llama")
    scaling = family.read_config(
        family.gguf_config({**metadata("llama"), "rope_freqs.weight": divisors})
    ).layers[0].rope.scaling
    assert scaling.short_factor == scaling.long_factor == tuple(float(d) for d in divisors)
    assert scaling.attention_factor == 1.0

    family = find_gguf_family("phi3")
    more = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19}
    tensors = {"rope_factors_short.weight": divisors, "rope_factors_long.weight": divisors * 2}
    config = family.gguf_config({**metadata("phi3", **more), **tensors})
    json.dumps(config)
    scaling = family.read_config(config).layers[0].rope.scaling
    assert (scaling.kind, scaling.original_max_position, scaling.attention_factor) == ("longrope", 64, 1.19)
    assert scaling.long_factor == tuple(2 * factor for factor in scaling.short_factor)


@pytest.mark.parametrize("pattern", [2, np.array([True, False, True, False, True, False, True])])
def test_gemma3_gguf_window_pattern(pattern: Any):
    family = find_gguf_family("gemma3")
    more = {
        "attention.sliding_window": 16, "attention.sliding_window_pattern": pattern,
        "attention.head_count_kv": np.full(7, 2, dtype=np.int32)
    }
    config = family.gguf_config(metadata("gemma3", **more))
    json.dumps(config)
    assert [layer.window for layer in family.read_config(config).layers] == [16, 0, 16, 0, 16, 0, 16]


def test_gguf_values_that_differ_between_layers_are_refused():
    with pytest.raises(ConfigError, match="head_count_kv differs from layer to layer"):
        find_gguf_family("llama").gguf_config(metadata("llama", **{"attention.head_count_kv": [2, 2, 4, 2, 2, 2, 2]}))


def test_gemma3_layers_and_cache_groups():
    config = transformers.Gemma3TextConfig().to_dict()
    spec = find_family("Gemma3ForCausalLM").read_config({**config, "architectures": ["Gemma3ForCausalLM"]})
    assert [layer.window for layer in spec.layers[:7]] == [4096] * 5 + [0] + [4096]
    assert {layer.rope.theta for layer in spec.layers if layer.window} == {1e4}
    assert {layer.rope.theta for layer in spec.layers if not layer.window} == {1e6}
    kinds = {(s.kind, s.window) for s in find_family("Gemma3ForCausalLM").cache_specs(spec, "bfloat16")}
    assert kinds == {("full", 0), ("sliding_window", 4096)}
    assert (
        spec == find_family("Gemma3ForCausalLM").read_config({"architectures": ["Gemma3ForCausalLM"]})
    ), "left-out fields have transformers' defaults"


@pytest.mark.parametrize(
    ("architecture", "options", "named"),
    [
        ("LlamaForCausalLM", {"hidden_size": None}, "hidden_size"),
        ("LlamaForCausalLM", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"intermediate_size": 10**30}, "intermediate_size"),
        ("LlamaForCausalLM", {"num_attention_heads": True}, "num_attention_heads"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("LlamaForCausalLM", {"hidden_act": "relu2"}, "hidden_act"),
        (
            "Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"]},
            "layer_types"
        ),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": 5}, "layer_types"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers"),
        ("MistralForCausalLM", {"sliding_window": "x"}, "sliding_window"),
        ("MistralForCausalLM", {"sliding_window": -4}, "sliding_window"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "tanh"}, "scoring_func"),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.5}, "moe_norm_min"),
        ("LlamaForCausalLM", {"rope_scaling": 5}, "rope_scaling"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ("LlamaForCausalLM", {"rope_theta": -1.0}, "rope_theta"),
        ("LlamaForCausalLM", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked"] * 7}, "layer_types"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepseekV2ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": [2, 1]}, "moe_topk"),
    ],
)
def test_values_that_cannot_be_served_are_named(architecture: str, options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named) as caught:
        find_family(architecture).read_config({**WIDE, "architectures": [architecture], **options})
    assert caught.value.param == named


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_stretch_that_was_added_to_a_newer_file_counts(architecture: str, kind: str):
    """As with transformers, and for users of ``config_overrides``; the file's own base stays."""
    plain = {"rope_type": "default", "rope_theta": 4321.0}
    parameters = plain if architecture.startswith("Llama") else {"full_attention": plain, "sliding_attention": plain}
    added = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    windows = {"sliding_window": 16, "sliding_window_pattern": 2}
    config = {
        **WIDE, **windows, "architectures": [architecture], "rope_theta": 1e4, "rope_parameters": parameters,
        "rope_scaling": added
    }
    full = [layer.rope for layer in find_family(architecture).read_config(config).layers if not layer.window]
    assert full and all((rope.theta, rope.scaling.kind, rope.scaling.factor) == (4321.0, "yarn", 4.0) for rope in full)


def test_scaled_queries_shorten_no_context():
    """As Ministral 3 has it: from ``original_max_position_embeddings`` on, by the logarithm of positions."""
    rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
    config = {**WIDE, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 512, "rope_parameters": rope}
    spec = find_family("MistralForCausalLM").read_config(config)
    assert spec.max_model_len == 512
    assert [layer.rope.scaling.query_growth for layer in spec.layers] == [0.1] * len(spec.layers)
    older = {**WIDE, "architectures": ["Ministral3ForCausalLM"], "rope_scaling": rope}
    assert {layer.rope.theta for layer in find_family("Ministral3ForCausalLM").read_config(older).layers} == {50000.0}
    config |= {"architectures": ["DeepseekV3ForCausalLM"]}
    with pytest.raises(ConfigError, match="llama_4_scaling_beta must be 0 for latent attention"):
        find_family("DeepseekV3ForCausalLM").read_config(config)


def test_window_as_long_as_the_context_is_no_window():
    spec = find_family("MistralForCausalLM").read_config(
        {**WIDE, "architectures": ["MistralForCausalLM"], "sliding_window": 256}
    )
    assert {layer.window for layer in spec.layers} == {0}


@pytest.mark.parametrize(
    "name",
    [
        "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text", "Phi3", "Olmo2", "Granite", "Glm4", "Glm", "Mixtral",
        "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3", "Ministral", "Ministral3"
    ]
)
def test_norms_rotary_bases_and_lengths_left_out_are_those_transformers_fills_in(name: str):
    architecture = name.removesuffix("Text") + "ForCausalLM"
    shape = {
        key: value for key, value in WIDE.items()
        if key not in ("rms_norm_eps", "rope_theta", "max_position_embeddings")
    } | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    theirs = getattr(transformers, f"{name}Config")(**shape)
    spec = find_family(architecture).read_config({**shape, "architectures": [architecture]})
    rotations = theirs.rope_parameters if name == "Gemma3Text" else {"every layer": theirs.rope_parameters}
    assert spec.norm.eps == theirs.rms_norm_eps and spec.max_model_len == theirs.max_position_embeddings
    assert {layer.rope.theta for layer in spec.layers} == {rotation["rope_theta"] for rotation in rotations.values()}


@pytest.mark.parametrize("name", ["Dots1", "Qwen2", "Qwen2Moe", "Qwen3", "SmolLM3"])
@pytest.mark.parametrize(
    "stated",
    [
        {}, {"sliding_window": None, "max_window_layers": 2}, {"max_window_layers": 3},
        {"sliding_window": 100, "max_window_layers": 0},
    ],
)
def test_windows_left_out_are_those_transformers_fills_in(name: str, stated: dict[str, Any]):
    shape = {**WIDE, "num_hidden_layers": 30, "max_position_embeddings": 8192, "use_sliding_window": True, **stated}
    shape |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    filled = getattr(transformers, f"{name}Config")(**shape).to_dict()
    found = find_family(f"{name}ForCausalLM").read_config({**shape, "architectures": [f"{name}ForCausalLM"]})
    kinds = {"full_attention": 0, "sliding_attention": filled["sliding_window"] or 0}
    assert [layer.window for layer in found.layers] == [kinds[kind] for kind in filled["layer_types"]]
