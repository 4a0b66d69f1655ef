"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention (MLA), and a mixture of experts with grouped routing and a
shared MLP. arXiv:2405.04434, arXiv:2412.19437."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import LATENT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    add_experts,
    read_decoder,
    read_latent_attention,
    read_layers,
    read_rope,
    read_sigmoid_routing,
)
from headrace.models.family import Family, decoder_architectures

SHARED_DEFAULTS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
V2_DEFAULTS = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
V3_DEFAULTS = {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
GLM_DEFAULTS = {
    "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2": V2_DEFAULTS, "DeepseekV3": V3_DEFAULTS, "Glm4MoeLite": GLM_DEFAULTS
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """V3 routes by sigmoid scores, with a learned bias on the choice that balances the experts' load; V2 by softmax.
    ``mlp_layer_types`` of newer files says which layers have experts."""
    kind = next(kind for kind in DEFAULTS if config["architectures"][0].startswith(kind))
    is_v3 = kind != "DeepseekV2"
    named = {"n_routed_experts": config.get("num_local_experts"), **SHARED_DEFAULTS, **DEFAULTS[kind]}
    if types := config.get("mlp_layer_types"):
        named["first_k_dense_replace"] = _count_dense(types)
    fields = Fields({**named, **{name: value for name, value in config.items() if value is not None}})
    _check_routing(fields, is_v3=is_v3)
    attention = read_latent_attention(fields)
    layers = read_layers(fields, read_rope(fields, interleaved=not is_v3 or fields.flag("rope_interleave", True)))
    routing = read_sigmoid_routing(fields) if is_v3 else _v2_routing(fields)
    return read_decoder(fields, add_experts(fields, layers, routing), attention=attention)


def _check_routing(fields: Fields, *, is_v3: bool) -> None:
    """Raises `ConfigError` for other scores and choices than the generation's, and for dense layers between."""
    score = "sigmoid" if is_v3 else "softmax"
    fields.choice("scoring_func", {score: score}, score)
    if is_v3:
        fields.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise ConfigError(
            f"config.json: moe_layer_freq must be 1, got {fields.integer('moe_layer_freq')}", param="moe_layer_freq"
        )


def _count_dense(types: list[str]) -> int:
    count = types.count("dense")
    if types != ["dense"] * count + ["sparse"] * (len(types) - count):
        raise ConfigError(
            f"config.json: mlp_layer_types must be dense layers before sparse ones, got {types!r:.200}",
            param="mlp_layer_types",
        )
    return count


def _v2_routing(fields: Fields) -> dict[str, Any]:
    methods = {"greedy": "greedy", "group_limited_greedy": "grouped"}
    if fields.choice("topk_method", methods, "greedy") == "greedy":
        return {}
    return dict(num_groups=fields.integer("n_group"), top_groups=fields.integer("topk_group"))


FAMILY = Family(
    name="deepseek_v3",
    architectures=decoder_architectures(*DEFAULTS),
    read_config=read_config,
    names=CheckpointNames(
        LATENT_NAMES, renames={".self_attn.q_a_proj.": ".self_attn.q_proj."}, has_draft_layers=True,
    ),
)
