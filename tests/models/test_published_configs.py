"""Configs as they are published, in the spelling of their time, read as transformers reads them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from headrace.models.catalog import find_family

LLAMA3 = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"
}
LONG = {"long_factor": [1.0 + i / 4 for i in range(48)], "short_factor": [1.0 + i / 99 for i in range(48)]}
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "llama-1": {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-06, "vocab_size": 32000,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-8b-yarn": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
        "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
        "rope_scaling": {**LONG, "type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144,
        "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "olmo-2-1b": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "granite-3.3-2b": {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
    "glm-4-9b-0414": {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 151552,
    },
    "glm-4-9b-hf": {
        "architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129280,
    },
    "ernie-4.5-21b-a3b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-05,
        "rope_theta": 500000, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
    },
    "hunyuan-a13b": {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 3072, "max_position_embeddings": 32768, "mlp_bias": False,
        "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-05,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True, "vocab_size": 128167,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
        "v_head_dim": 128, "vocab_size": 102400,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_read_as_transformers_reads_it(name: str):
    """Reading the file equals reading what transformers makes of it, which has every default and the newest
    spelling."""
    published = PUBLISHED[name]
    architecture = published["architectures"][0]
    config_class = (
        "Gemma3TextConfig" if architecture.startswith("Gemma3") else architecture.replace("ForCausalLM", "Config")
    )
    filled = getattr(transformers, config_class)(
        **{**published, "rope_scaling": dict(published.get("rope_scaling") or {}) or None}
    ).to_dict()
    family = find_family(architecture)
    spec = family.read_config(published)
    assert spec == family.read_config({**filled, "architectures": [architecture]})
    assert name.startswith("deepseek") or spec.attention.head_dim in (64, 96, 128, 256)
    assert spec.num_layers == published["num_hidden_layers"]
    assert spec.max_model_len == (131072 if name == "qwen3-8b-yarn" else published.get("max_position_embeddings", 2048))


def test_latent_attention_is_as_sharp_as_its_makers_have_it():
    """Heads of 192 whose logits YaRN sharpens twice over; cosines are left alone where both scales are equal."""
    for name, weight in (("deepseek-v3", 1.0), ("deepseek-v2-lite", 0.707)):
        spec = find_family(PUBLISHED[name]["architectures"][0]).read_config(PUBLISHED[name])
        assert spec.attention.scale == pytest.approx(192**-0.5 * (0.1 * weight * math.log(40) + 1) ** 2)
        assert spec.layers[0].rope.scaling.attention_factor == 1.0 and spec.layers[0].rope.rotary_dim == 64


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_early_names_of_longrope(kind: str):
    """transformers renames them too late to read such a file by itself."""
    config = PUBLISHED["phi-4-mini"]
    early = {**config, "rope_scaling": {**LONG, "type": kind}}
    read = find_family("Phi3ForCausalLM").read_config
    assert read(early) == read(config)
    assert read(early).layers[0].rope.scaling.kind == "longrope"
