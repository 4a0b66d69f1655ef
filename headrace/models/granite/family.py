"""Granite 3.x dense: Llama with multipliers on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.layers.spec import DecoderSpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import read_shared
from headrace.models.reading import Fields, read_attention, read_decoder, read_layers, read_rope

GGUF_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Multipliers are 1 unless given."""
    fields = Fields(config)
    spec = read_decoder(
        fields, read_layers(fields, read_rope(fields)),
        attention=read_attention(fields, scale=fields.number("attention_multiplier", 1.0)),
    )
    vocabulary = replace(
        spec.vocabulary, embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
    return replace(spec, vocabulary=vocabulary, residual_scale=fields.number("residual_multiplier", 1.0))


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return read_shared(metadata, "GraniteForCausalLM", keys=GGUF_KEYS)


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.granite.model:GraniteModel",
    gguf_architectures=("granite",),
    gguf_config=gguf_config,
    gguf_weights="headrace.models.weights.gguf_naming:interleaved_rotary_naming",
    tool_parser="granite",
    reasoning_parser="granite",
)
