"""Every family against transformers, on tiny random configs in float32: logits, and greedy tokens against
``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import Harness, build_harness
from safetensors.torch import load_file

from headrace.kernels.linear.reference import norm_linear
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.self_attention import Attention

VOCAB = 97
PROMPT_LEN, NEW_TOKENS = 23, 12
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

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


@torch.no_grad()
def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def prefill_in_chunks(harness: Harness, tokens: list[int], chunk: int) -> tuple[Any, torch.Tensor]:
    sequence = harness.start()
    pieces = [harness.step((sequence, tokens[i : i + chunk]))[0] for i in range(0, len(tokens), chunk)]
    return sequence, torch.cat(pieces)


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest) -> tuple[transformers.PreTrainedModel, Any]:
    model = make_oracle(*CASES[request.param])

    def build(page_size: int) -> Harness:
        return build_harness(
            config_json(model), model.state_dict(), page_size=page_size,
            max_model_len=MAX_MODEL_LEN.get(request.param, 0)
        )

    return model, build


def test_logits_whole_chunked_and_step_by_step(pair):
    """One prefill, prefill in chunks that straddle pages, and a decode of every token after a short prefill."""
    model, build = pair
    tokens = prompt(0)
    expected = oracle_logits(model, tokens)
    for page_size in (4, 16):
        harness = build(page_size)
        for chunk in (PROMPT_LEN, 5, 7):
            torch.testing.assert_close(prefill_in_chunks(harness, tokens, chunk)[1], expected, **TOLERANCE)
        sequence = harness.start()
        pieces = [harness.step((sequence, tokens[:3]))[0]]
        pieces += [harness.step((sequence, [token]))[0] for token in tokens[3:]]
        torch.testing.assert_close(torch.cat(pieces), expected, **TOLERANCE)


def test_mixed_batches(pair):
    """Decodes of different lengths together with chunks of other requests change nothing for anyone."""
    model, build = pair
    harness = build(4)
    long, short, late = prompt(1, 29), prompt(2, 4), prompt(3, 19)
    expected = [oracle_logits(model, tokens) for tokens in (long, short, late)]
    first, second, third = harness.start(), harness.start(), harness.start()
    harness.step((first, long[:28]), (second, short[:3]))
    mixed = harness.step((first, long[28:]), (third, late[:8]), (second, short[3:]))
    torch.testing.assert_close(mixed[0], expected[0][28:], **TOLERANCE)
    torch.testing.assert_close(mixed[1], expected[2][:8], **TOLERANCE)
    torch.testing.assert_close(mixed[2], expected[1][3:], **TOLERANCE)
    torch.testing.assert_close(harness.step((third, late[8:]))[0], expected[2][8:], **TOLERANCE)


def test_greedy_tokens_equal_generate(pair):
    """Two requests decoded together, each as ``generate`` has it."""
    model, build = pair
    harness = build(16)
    tokens, others = prompt(4), prompt(5, 9)
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(p):].tolist()
        for p in (tokens, others)
    ]
    sequences = [harness.start(), harness.start()]
    logits = harness.step((sequences[0], tokens), (sequences[1], others))
    sampled: list[list[int]] = [[], []]
    for _ in range(NEW_TOKENS):
        for row_tokens, piece in zip(sampled, logits, strict=True):
            row_tokens.append(int(piece[-1].argmax()))
        logits = harness.step(*((s, [d[-1]]) for s, d in zip(sequences, sampled, strict=True)))
    assert sampled == expected


def test_last_layer_computes_no_more_than_what_is_wanted(pair):
    """Last tokens of some spans of a mixed step, and of none; what a later step reads is complete all the same."""
    model, build = pair
    harness = build(4)
    if not harness.model.prunes_last_layer:
        pytest.skip("this kind of attention computes every token")
    prompts = [prompt(seed, length) for seed, length in ((7, 11), (8, 6), (9, 13))]
    whole = [oracle_logits(model, tokens) for tokens in prompts]
    sequences = [harness.start() for _ in prompts]
    assert len(harness.step((sequences[0], prompts[0][:10]), wanted=[])[0]) == 0
    spans = [(sequences[0], prompts[0][10:]), (sequences[1], prompts[1]), (sequences[2], prompts[2][:9])]
    decode, finished, unfinished = harness.step(*spans, wanted=[0, 1])
    torch.testing.assert_close(decode, whole[0][-1:], **TOLERANCE)
    torch.testing.assert_close(finished, whole[1][-1:], **TOLERANCE)
    assert len(unfinished) == 0
    torch.testing.assert_close(harness.step((sequences[2], prompts[2][9:]), wanted=[0])[0], whole[2][-1:], **TOLERANCE)


def test_norms_fused_with_products_change_nothing(pair, monkeypatch):
    """The fused product of few rows, in its place in every block whose norm comes first."""
    _, build = pair
    harness, fused = build(4), []
    for layer in harness.model.modules():
        if isinstance(layer, Linear):
            monkeypatch.setattr(layer, "_norm_linear", lambda *args: fused.append(len(args[0])) or norm_linear(*args))
    tokens = prompt(6, 9)
    first = harness.step((harness.start(), tokens))[0]
    sequence = harness.start()
    pieces = [harness.step((sequence, tokens[:2]))[0], *(harness.step((sequence, [token]))[0] for token in tokens[2:])]
    torch.testing.assert_close(torch.cat(pieces), first, **TOLERANCE)
    layers = harness.model.layers
    most = sum(
        isinstance(layer.attention_norm, RmsNorm) and isinstance(layer.attention, Attention) for layer in layers
    ) - 1
    assert len(fused) >= 8 * most and set(fused) <= {1, 2}


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3", "granite", "olmo2"])
def test_bfloat16_is_as_near_as_transformers_is(name: str):
    """Both round in their own places; neither may be much further from float32 than the other."""
    model = make_oracle(*CASES[name])
    tokens = prompt(6)
    exact = oracle_logits(model, tokens)
    harness = build_harness(config_json(model), model.state_dict(), dtype=torch.bfloat16)
    ours = harness.step((harness.start(), tokens))[0]
    theirs = oracle_logits(model.bfloat16(), tokens).float()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize(
    "name", ["dots1", "granite-moe", "granite-moe-shared", "minimax-m2", "olmoe", "phi", "qwen2-moe", "qwen3-moe"]
)
def test_tensors_as_they_are_published(name: str, tmp_path: Path):
    """transformers renames and stacks tensors when it loads a model, and undoes that when it saves one."""
    model = make_oracle(*CASES[name])
    model.save_pretrained(tmp_path)
    harness = build_harness(config_json(model), load_file(tmp_path / "model.safetensors"))
    tokens = prompt(8)
    torch.testing.assert_close(harness.step((harness.start(), tokens))[0], oracle_logits(model, tokens), **TOLERANCE)


def test_minimax_m2_without_its_norms_and_with_another_routing_is_mixtral():
    """Fields of published files that transformers does not read."""
    model = make_oracle("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})
    plain = {"head_dim": 12, "use_qk_norm": False, "scoring_func": "softmax", "use_routing_bias": False}
    harness = build_harness(
        {**config_json(model), **plain, "architectures": ["MiniMaxM2ForCausalLM"]}, model.state_dict()
    )
    tokens = prompt(8)
    torch.testing.assert_close(harness.step((harness.start(), tokens))[0], oracle_logits(model, tokens), **TOLERANCE)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("mixtral", "qwen3-moe", "gpt-oss", "deepseek"))]
)
def test_mixtures_of_experts_on_a_gpu(name: str):
    """In float32 as on a CPU, chunked and step by step; in bfloat16 about as near as transformers is: rounding makes
    some token choose another expert, here as there."""
    model, tokens, device = make_oracle(*CASES[name]), prompt(0), torch.device("cuda")
    expected = oracle_logits(model, tokens)
    harness = build_harness(config_json(model), model.state_dict(), page_size=16, device=device)
    for chunk in (PROMPT_LEN, 5, 1):
        torch.testing.assert_close(prefill_in_chunks(harness, tokens, chunk)[1], expected, **TOLERANCE)
    halved = build_harness(config_json(model), model.state_dict(), page_size=16, device=device, dtype=torch.bfloat16)
    ours = halved.step((halved.start(), tokens))[0]
    theirs = oracle_logits(model.bfloat16(), tokens).float()
    assert (ours - expected).norm() <= 4 * (theirs - expected).norm()
