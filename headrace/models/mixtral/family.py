"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_decoder, read_layers, read_moe, read_rope, read_window
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """As Mistral, but with a sliding window only if the config states one."""
    fields = Fields({**DEFAULTS, **config})
    layers = read_layers(fields, read_rope(fields, theta=1e6), window=read_window(fields))
    return read_decoder(
        fields, layers,
        mlp=read_moe(fields, "num_local_experts", intermediate_size="intermediate_size", renormalise=True),
    )


FAMILY = Family(
    name="mixtral",
    architectures=decoder_architectures("Mixtral"),
    read_config=read_config,
    names=CheckpointNames(
        {**SPLIT_NAMES, **EXPERT_NAMES, "model.layers.{i}.mlp.gate": ROUTER},
        # names in the originally published checkpoints
        renames={".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
    ),
    tool_parser="mistral",
)
