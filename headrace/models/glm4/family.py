"""GLM-4 dense, both generations: half of each head is rotated, in neighbouring pairs; the newer one adds post-norms."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, NormSpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import read_shared
from headrace.models.reading import Fields, read_attention, read_decoder, read_layers, read_rope

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``attention_bias`` is for q, k and v alone."""
    fields = Fields({**DEFAULTS, **config})
    rope = read_rope(fields, partial=0.5, interleaved=True)
    return read_decoder(
        fields, read_layers(fields, rope), attention=read_attention(fields, output_bias=False),
        norm=NormSpec(fields.number("rms_norm_eps", 1.5625e-7), after=config["architectures"][0].startswith("Glm4")),
    )


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return read_shared(metadata, "Glm4ForCausalLM")


FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM", "GlmForCausalLM"),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.glm4.model:Glm4Model",
    gguf_architectures=("glm4",),
    gguf_config=gguf_config,
    gguf_weights="headrace.models.glm4.gguf_naming:name_norms",
)
