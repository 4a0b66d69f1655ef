"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window in the upper layers if the config asks for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_rope, read_windowed_layers
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """The biases are part of the architecture, not of the config."""
    fields = Fields({"max_position_embeddings": 32768, **config})
    attention = read_attention(fields, qkv_bias=True, output_bias=False)
    return read_decoder(fields, read_windowed_layers(fields, read_rope(fields)), attention=attention)


FAMILY = Family(
    name="qwen2",
    architectures=decoder_architectures("Qwen2"),
    read_config=read_config,
    gguf_architectures=("qwen2",),
    gguf_config=partial(read_gguf_config, architecture="Qwen2ForCausalLM"),
    tool_parser="hermes",
)
