"""GLM-4.5 and later: experts as in DeepSeek-V3, plain attention of which half of each head is rotated. Solar Open: the
same without a dense layer, whole heads being rotated."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import EXPERT_NAMES, SHARED_EXPERT_NAMES, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    add_experts,
    read_attention,
    read_decoder,
    read_layers,
    read_rope,
    read_sigmoid_routing,
)
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "n_routed_experts": 128,
    "n_shared_experts": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}
SOLAR_DEFAULTS = {"head_dim": 128, "moe_intermediate_size": 1280, "first_k_dense_replace": 0}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``attention_bias`` applies to q, k and v, not to the output projection."""
    given = {name: value for name, value in config.items() if value is not None}
    is_solar = config["architectures"][0].startswith("SolarOpen")
    fields = Fields({**DEFAULTS, **(SOLAR_DEFAULTS if is_solar else {}), **given})
    rope = read_rope(fields, theta=1e6 if is_solar else 1e4, partial=1.0 if is_solar else 0.5)
    layers = add_experts(fields, read_layers(fields, rope), read_sigmoid_routing(fields))
    qk_norm = "head" if fields.flag("use_qk_norm", False) else "none"
    return read_decoder(fields, layers, attention=read_attention(fields, output_bias=False, qk_norm=qk_norm))


FAMILY = Family(
    name="glm4_moe",
    architectures=decoder_architectures("Glm4Moe", "SolarOpen"),
    read_config=read_config,
    names=CheckpointNames({**SPLIT_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES}, has_draft_layers=True),
    tool_parser="glm45",
    reasoning_parser="glm45",
)
