"""Phi-1, 1.5 and 2: attention and MLP in parallel after one layer norm, biases everywhere, also of the head."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import UNGATED_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_mlp,
    read_rope,
    read_vocabulary,
)
from headrace.models.family import Family, decoder_architectures


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Raises `ConfigError` for norms of queries and keys, which no published model has."""
    fields = Fields(config)
    if fields.flag("qk_layernorm", False):
        raise ConfigError(
            "config.json: qk_layernorm must be false; this family has no such norms", param="qk_layernorm"
        )
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, partial=0.5)),
        attention=read_attention(fields, qkv_bias=True, output_bias=True),
        mlp=read_mlp(fields, default="gelu_new", bias=True, gated=False),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        vocabulary=read_vocabulary(fields, head_bias=True), block="parallel_one_norm",
    )


FAMILY = Family(
    name="phi",
    architectures=decoder_architectures("Phi"),
    read_config=read_config,
    names=CheckpointNames(
        UNGATED_NAMES,
        renames={
            ".self_attn.dense.": ".self_attn.o_proj.", ".fc1.": ".up_proj.", ".fc2.": ".down_proj.",
            "model.final_layernorm.": "model.norm.",
        },
    ),
)
