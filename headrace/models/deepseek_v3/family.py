"""DeepSeek-V2 and V3: latent attention (MLA), and a mixture of experts with grouped routing and a shared MLP.
arXiv:2405.04434, arXiv:2412.19437."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import EXPERT_NAMES, SHARED_EXPERT_NAMES, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, LatentAttentionSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    add_experts,
    read_decoder,
    read_layers,
    read_rope,
    read_rope_parameters,
    read_sigmoid_routing,
    yarn_sharpening,
)
from headrace.models.family import Family

SHARED_DEFAULTS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
V2_DEFAULTS = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
V3_DEFAULTS = {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}

NAMES = {
    **{theirs: ours for theirs, ours in SPLIT_NAMES.items() if "self_attn" not in theirs},
    **EXPERT_NAMES,
    **SHARED_EXPERT_NAMES,
    "model.layers.{i}.self_attn.q_proj": "layers.{i}.attention.down#q",
    "model.layers.{i}.self_attn.q_a_layernorm": "layers.{i}.attention.q_norm",
    "model.layers.{i}.self_attn.q_b_proj": "layers.{i}.attention.q_up",
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa": "layers.{i}.attention.down#kv",
    "model.layers.{i}.self_attn.kv_a_layernorm": "layers.{i}.attention.kv_norm",
    "model.layers.{i}.self_attn.kv_b_proj": "layers.{i}.attention.kv_up",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.output",
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """V3 routes by sigmoid scores, with a learned bias on the choice that balances the experts' load; V2 by softmax."""
    is_v3 = config["architectures"][0].startswith("DeepseekV3")
    named = {
        "n_routed_experts": config.get("num_local_experts"), **SHARED_DEFAULTS,
        **(V3_DEFAULTS if is_v3 else V2_DEFAULTS)
    }
    fields = Fields({**named, **{name: value for name, value in config.items() if value is not None}})
    fields.config["head_dim"] = fields.integer("qk_rope_head_dim")  # the dims that are rotated
    if fields.flag("attention_bias", False):
        raise ConfigError("config.json: attention_bias must be false for latent attention", param="attention_bias")
    layers = read_layers(fields, read_rope(fields, interleaved=not is_v3 or fields.flag("rope_interleave", True)))
    routing = read_sigmoid_routing(fields) if is_v3 else _v2_routing(fields)
    return read_decoder(fields, add_experts(fields, layers, routing), attention=_read_attention(fields))


def _v2_routing(fields: Fields) -> dict[str, Any]:
    methods = {"greedy": "greedy", "group_limited_greedy": "grouped"}
    if fields.choice("topk_method", methods, "greedy") == "greedy":
        return {}
    return dict(num_groups=fields.integer("n_group"), top_groups=fields.integer("topk_group"))


def _read_attention(fields: Fields) -> LatentAttentionSpec:
    qk_nope_head_dim, qk_rope_head_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return LatentAttentionSpec(
        fields.integer("num_attention_heads"), qk_nope_head_dim, qk_rope_head_dim, fields.integer("v_head_dim"),
        fields.integer("kv_lora_rank"),
        fields.integer("q_lora_rank", 0), scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * _sharpening(fields),
    )


def _sharpening(fields: Fields) -> float:
    """YaRN's attention scale for long contexts. These models apply it to queries and keys, so logits get its square."""
    rope = Fields(read_rope_parameters(fields))
    if rope.config.get("rope_type", "default") == "default" or not rope.config.get("mscale_all_dim"):
        return 1.0
    return yarn_sharpening(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    read_config=read_config,
    names=CheckpointNames(
        NAMES, renames={".self_attn.q_a_proj.": ".self_attn.q_proj."}, has_draft_layers=True,
    ),
)
