"""Tiny configurations of every decoder, and transformers' random models of them as oracles."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB, PROMPT_LEN = 97, 23

BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}
# older versions have a fixed one
SWIGLU_LIMIT = {"swiglu_limit": 0.5} if hasattr(transformers.GptOssConfig, "swiglu_limit") else {}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 9.0]
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7,
        "mscale_all_dim": 1.0, "truncate": False
    },
}
MINISTRAL3 = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7
}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-mqa-odd-group": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    **{f"llama-head{dim}": ("Llama", {"head_dim": dim}) for dim in (64, 80, 128, 256)},
    **{f"llama-{name}": ("Llama", {"rope_scaling": scaling}) for name, scaling in SCALINGS.items()},
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3}),
    "ministral3-window": ("Ministral3", {"head_dim": 16, "sliding_window": 6, "rope_parameters": MINISTRAL3}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3-biased-mqa": ("Qwen3", {"head_dim": 128, "num_key_value_heads": 1, "attention_bias": True}),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 6, "layer_types": TYPES, "query_pre_attn_scalar": 20}
    ),
    "gemma3-softcap-left-over": ("Gemma3Text", {"head_dim": 16, "attn_logit_softcapping": 1.0}),
    "gemma3-head256": (
        "Gemma3Text",
        {
            "num_hidden_layers": 3, "head_dim": 256, "num_key_value_heads": 1, "sliding_window": 5,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 5000.0, "rope_local_base_freq": 70.0,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-window-gqa": ("Phi3", {"sliding_window": 9, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "phi3-long": ("Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 3, "sliding_window": None}),
    "phi3-short-partial": (
        "Phi3",
        {
            "rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0]},
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64, "tie_word_embeddings": True, "sliding_window": 200,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-mha-biased": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0,
            "tie_word_embeddings": True
        },
    ),
    "granite-biased": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.5}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-unbiased-head64": (
        "Glm4", {"head_dim": 64, "attention_bias": False, "num_key_value_heads": 4, "partial_rotary_factor": 0.25}
    ),
    "glm": ("Glm", {"head_dim": 24, "partial_rotary_factor": 1.0}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-unbiased-window": (
        "Starcoder2", {"use_bias": False, "sliding_window": 7, "hidden_act": "gelu", "tie_word_embeddings": False}
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere-biased": ("Cohere", {"attention_bias": True, "num_key_value_heads": 4}),
    "cohere-normed": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 6, "layer_types": TYPES}),
}
CASES |= {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7, "head_dim": 32}
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
            "head_dim": 16
        }
    ),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3], "attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}
    ),
    "gpt-oss-plain-rope": (
        "GptOss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 32, "num_key_value_heads": 1,
            "layer_types": TYPES[:2], **SWIGLU_LIMIT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "attention_bias": False,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": 20, "n_routed_experts": 8,
            "n_group": 4, "topk_group": 2,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rope_scaling": SCALINGS["yarn-mscale"],
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **MLA, "first_k_dense_replace": 0, "q_lora_rank": None, "n_routed_experts": 6, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "n_shared_experts": 2, "norm_topk_prob": False, "rope_interleave": False,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": 16, "n_routed_experts": 6,
            "n_group": 3, "topk_group": 2,
            "topk_method": "group_limited_greedy", "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v2-greedy": (
        "DeepseekV2",
        {
            **MLA, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "rope_scaling": SCALINGS["yarn-mscale"]
        },
    ),
}
# many heads: of few, all may score 0, and which of equal scores are taken is anybody's choice
INDEXER = {
    **MLA, "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "index_n_heads": 32, "index_head_dim": 16, "index_topk": 6,
}
CASES |= {
    "deepseek-v32": (
        "DeepseekV32",
        {
            **INDEXER, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
            "rope_scaling": SCALINGS["yarn-mscale"],
        },
    ),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {
            **INDEXER, "num_hidden_layers": 4, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
}
CASES |= {
    "glm4-moe": (
        "Glm4Moe",
        {
            "num_hidden_layers": 3, "head_dim": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24, "attention_bias": True, "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4-moe-plain": (
        "Glm4Moe",
        {
            "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0, "partial_rotary_factor": 0.25,
        },
    ),
}
CASES |= {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma-mqa": ("Gemma", {"head_dim": 64, "num_key_value_heads": 1, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-uncapped": (
        "Gemma2",
        {
            "head_dim": 16, "sliding_window": 5, "layer_types": TYPES[1:], "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 6}),
    "olmo3-yarn": (
        "Olmo3",
        {
            "sliding_window": 7, "layer_types": TYPES[:2],
            "rope_parameters": {
                "full_attention": {**SCALINGS["yarn"], "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe-renormalised": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-window": (
        "SmolLM3",
        {
            "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 6,
            "layer_types": TYPES, "tie_word_embeddings": False,
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "seed-oss-biased": ("SeedOss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "ernie4_5-biased": ("Ernie4_5", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("Helium", {"head_dim": 12}),
    "helium-biased": ("Helium", {"head_dim": 12, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 6}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "arcee": ("Arcee", {}),
    "arcee-biased": ("Arcee", {"attention_bias": True, "mlp_bias": True, "rope_scaling": SCALINGS["yarn"]}),
    "stablelm": ("StableLm", {"hidden_size": 64, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"hidden_size": 64, "use_parallel_residual": True, "qk_layernorm": True}),
    "phi": ("Phi", {}),
    "phi-partial-tied": (
        "Phi",
        {
            "hidden_size": 64, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
    ),
    "dots1": (
        "Dots1",
        {
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        },
    ),
    "dots1-window": (
        "Dots1",
        {
            "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "sliding_window": 6, "max_window_layers": 1,
        },
    ),
    "minimax-m2": ("MiniMaxM2", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "minimax-m2-partial": (
        "MiniMaxM2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 3, "rotary_dim": 8}
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **MLA, "num_hidden_layers": 3, "q_lora_rank": 20, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3,
            "attention_multiplier": 0.2, "logits_scaling": 4.0,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
            "attention_multiplier": 0.5, "tie_word_embeddings": True,
        },
    ),
    "ministral": ("Ministral", {"num_hidden_layers": 3, "sliding_window": 6, "layer_types": TYPES, "head_dim": 16}),
    "solar-open": (
        "SolarOpen",
        {
            "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "attention_bias": True, "rope_scaling": SCALINGS["yarn"],
        },
    ),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
            "moe_layer_end_index": 1, "use_bias": True,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1", {"head_dim": 12, "num_experts": 6, "moe_topk": [2, 2], "attention_bias": True},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen2-moe-some-dense": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False,
        },
    ),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}
MAX_MODEL_LEN = {"phi3-short-partial": 64}


def make_oracle(kind: str, options: dict[str, Any]) -> transformers.PreTrainedModel:
    """A tiny random model with every parameter, norms and biases too, away from its neutral value."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **options})
    model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def config_json(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
