"""Granite 3.x dense: Llama with multipliers on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.names import GgufNaming
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_vocabulary
from headrace.models.family import Family
from headrace.models.gguf_config import read_gguf_config

GGUF_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Multipliers are 1 unless given."""
    fields = Fields(config)
    return read_decoder(
        fields, attention=read_attention(fields, scale=fields.number("attention_multiplier", 1.0)),
        vocabulary=read_vocabulary(
            fields, embedding_scale=fields.number("embedding_multiplier", 1.0),
            logits_divisor=fields.number("logits_scaling", 1.0),
        ),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    read_config=read_config,
    gguf_architectures=("granite",),
    gguf_config=partial(read_gguf_config, architecture="GraniteForCausalLM", keys=GGUF_KEYS),
    gguf_naming=GgufNaming(is_rotary_interleaved=True),
    tool_parser="granite",
    reasoning_parser="granite",
)
