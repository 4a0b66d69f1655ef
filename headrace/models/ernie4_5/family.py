"""ERNIE 4.5 dense: Llama whose heads are rotated in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec
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

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``use_bias`` is for all products."""
    fields = Fields({**DEFAULTS, **config})
    bias = fields.flag("use_bias", False)
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, theta=500000.0, interleaved=True)),
        attention=read_attention(fields, qkv_bias=bias, output_bias=bias), mlp=read_mlp(fields, bias=bias),
        vocabulary=read_vocabulary(fields, tied=True),
    )


FAMILY = Family(
    name="ernie4_5",
    architectures=decoder_architectures("Ernie4_5"),
    read_config=read_config,
)
