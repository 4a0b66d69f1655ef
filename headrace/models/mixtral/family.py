"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.reading import Fields, read_decoder, read_layers, read_moe, read_rope, read_window

DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """A window only where the config has one."""
    fields = Fields({**DEFAULTS, **config})
    layers = read_layers(fields, read_rope(fields, theta=1e6), window=read_window(fields))
    return read_decoder(
        fields, layers,
        mlp=read_moe(fields, "num_local_experts", intermediate_size="intermediate_size", renormalise=True),
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.mixtral.model:MixtralModel",
    tool_parser="mistral",
)
