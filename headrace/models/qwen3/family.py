"""Qwen3 dense: queries and keys are normalised per head; heads may be wider together than the model."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import read_shared
from headrace.models.reading import Fields, read_attention, read_decoder, read_rope, read_windowed_layers


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``head_dim`` is 128 unless said otherwise."""
    fields = Fields({"head_dim": 128, **config})
    attention = read_attention(fields, qk_norm="head")
    return read_decoder(fields, read_windowed_layers(fields, read_rope(fields)), attention=attention)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return read_shared(metadata, "Qwen3ForCausalLM")


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.qwen3.model:Qwen3Model",
    gguf_architectures=("qwen3",),
    gguf_config=gguf_config,
    tool_parser="hermes",
    reasoning_parser="qwen3",
)
