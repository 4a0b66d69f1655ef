"""DeepSeek-V2 and V3: latent attention (MLA), and a mixture of experts with grouped routing and a shared MLP.
arXiv:2405.04434, arXiv:2412.19437."""

from __future__ import annotations

from typing import Any

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
from headrace.models.family import Family

SHARED_DEFAULTS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
V2_DEFAULTS = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
V3_DEFAULTS = {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """V3 routes by sigmoid scores, with a learned bias on the choice that balances the experts' load; V2 by softmax."""
    is_v3 = config["architectures"][0].startswith("DeepseekV3")
    named = {
        "n_routed_experts": config.get("num_local_experts"), **SHARED_DEFAULTS,
        **(V3_DEFAULTS if is_v3 else V2_DEFAULTS)
    }
    fields = Fields({**named, **{name: value for name, value in config.items() if value is not None}})
    attention = read_latent_attention(fields)
    layers = read_layers(fields, read_rope(fields, interleaved=not is_v3 or fields.flag("rope_interleave", True)))
    routing = read_sigmoid_routing(fields) if is_v3 else _v2_routing(fields)
    return read_decoder(fields, add_experts(fields, layers, routing), attention=attention)


def _v2_routing(fields: Fields) -> dict[str, Any]:
    methods = {"greedy": "greedy", "group_limited_greedy": "grouped"}
    if fields.choice("topk_method", methods, "greedy") == "greedy":
        return {}
    return dict(num_groups=fields.integer("n_group"), top_groups=fields.integer("topk_group"))


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    read_config=read_config,
    names=CheckpointNames(
        LATENT_NAMES, renames={".self_attn.q_a_proj.": ".self_attn.q_proj."}, has_draft_layers=True,
    ),
)
