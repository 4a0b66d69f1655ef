"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``attention_bias`` is that of queries, keys and values alone."""
    fields = Fields({**DEFAULTS, **config})
    bias = fields.flag("attention_out_bias", False)
    return read_decoder(fields, attention=read_attention(fields, output_bias=bias))


FAMILY = Family(
    name="seed_oss",
    architectures=decoder_architectures("SeedOss"),
    read_config=read_config,
    gguf_architectures=("seed_oss",),
    gguf_config=partial(read_gguf_config, architecture="SeedOssForCausalLM"),
)
