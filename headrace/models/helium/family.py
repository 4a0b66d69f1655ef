"""Helium: Llama whose heads are rotated in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_rope
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``attention_bias`` is that of queries, keys and values alone."""
    fields = Fields({**DEFAULTS, **config})
    layers = read_layers(fields, read_rope(fields, theta=100000.0, interleaved=True))
    return read_decoder(fields, layers, attention=read_attention(fields, output_bias=False))


FAMILY = Family(
    name="helium",
    architectures=decoder_architectures("Helium"),
    read_config=read_config,
)
