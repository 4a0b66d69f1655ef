"""MiniMax-M2: experts chosen by sigmoid scores with a bias, query and key norms over all heads together."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_moe, read_rope
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {
    "head_dim": 128, "num_key_value_heads": 8, "num_local_experts": 256, "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
}
FULL_ATTENTION = 1
"""In ``attn_type_list``; 0 is linear attention."""


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``rotary_dim`` of published files is how many dims of a head are rotated. Raises `ConfigError` for linear
    attention, norms of single heads and shared experts, which only other generations have."""
    fields = Fields({**DEFAULTS, **config})
    _check_parts(fields)
    partial = fields.count("rotary_dim", 0) / fields.integer("head_dim") or 1.0
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, theta=5e6, partial=partial)),
        attention=read_attention(fields, qk_norm="full" if fields.flag("use_qk_norm", True) else "none"),
        mlp=read_moe(
            fields, "num_local_experts", intermediate_size="intermediate_size", renormalise=True,
            score=fields.choice("scoring_func", {"sigmoid": "sigmoid", "softmax": "softmax"}, "sigmoid"),
            choice_bias=fields.flag("use_routing_bias", True),
        ),
    )


def _check_parts(fields: Fields) -> None:
    fields.choice("qk_norm_type", {"per_layer": "per_layer"}, "per_layer")
    if width := fields.count("shared_intermediate_size", 0):
        raise ConfigError(
            f"config.json: shared_intermediate_size must be 0, got {width}; this family has no shared experts",
            param="shared_intermediate_size",
        )
    kinds = fields.config.get("attn_type_list") or []
    if any(kind != FULL_ATTENTION for kind in kinds):
        raise ConfigError(
            f"config.json: attn_type_list must be {FULL_ATTENTION} for all layers, got {kinds!r:.200}; this family has "
            "no linear attention", param="attn_type_list",
        )


FAMILY = Family(
    name="minimax_m2",
    architectures=decoder_architectures("MiniMaxM2"),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **EXPERT_NAMES,
            "model.layers.{i}.mlp.gate": ROUTER,
            "model.layers.{i}.mlp.e_score_correction_bias": "layers.{i}.mlp.router.choice_bias",
        },
        # names in published checkpoints
        renames={".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
        has_draft_layers=True,
    ),
)
