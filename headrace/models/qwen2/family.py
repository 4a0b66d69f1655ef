"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window in the upper layers if the config asks for it."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import read_shared
from headrace.models.reading import Fields, read_attention, read_decoder, read_rope, read_windowed_layers


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """The biases are part of the architecture, not of the config."""
    fields = Fields(config)
    attention = read_attention(fields, qkv_bias=True, output_bias=False)
    return read_decoder(fields, read_windowed_layers(fields, read_rope(fields)), attention=attention)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return read_shared(metadata, "Qwen2ForCausalLM")


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification"),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.qwen2.model:Qwen2Model",
    gguf_architectures=("qwen2",),
    gguf_config=gguf_config,
    tool_parser="hermes",
)
