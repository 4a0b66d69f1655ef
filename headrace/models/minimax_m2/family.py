"""MiniMax-M2: experts chosen by sigmoid scores with a bias, query and key norms over all heads together."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_moe, read_rope
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {
    "head_dim": 128, "num_key_value_heads": 8, "num_local_experts": 256, "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``rotary_dim`` of published files is how many dims of a head are rotated."""
    fields = Fields({**DEFAULTS, **config})
    partial = fields.count("rotary_dim", 0) / fields.integer("head_dim") or 1.0
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, theta=5e6, partial=partial)),
        attention=read_attention(fields, qk_norm="full"),
        mlp=read_moe(
            fields, "num_local_experts", intermediate_size="intermediate_size", score="sigmoid", choice_bias=True,
            renormalise=True,
        ),
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
