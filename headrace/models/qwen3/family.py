"""Qwen3 dense: queries and keys are normalised per head; all heads together may be larger than ``hidden_size``."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_rope, read_windowed_layers
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``head_dim`` is 128 where the config does not say."""
    fields = Fields({"head_dim": 128, "max_position_embeddings": 32768, **config})
    layers = read_windowed_layers(fields, read_rope(fields))
    return read_decoder(fields, layers, attention=read_attention(fields, qk_norm="head"))


FAMILY = Family(
    name="qwen3",
    architectures=decoder_architectures("Qwen3"),
    read_config=read_config,
    gguf_architectures=("qwen3",),
    gguf_config=partial(read_gguf_config, architecture="Qwen3ForCausalLM"),
    tool_parser="hermes",
    reasoning_parser="qwen3",
)
