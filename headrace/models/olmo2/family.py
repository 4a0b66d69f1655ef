"""OLMo 2: norms after the branches and none before, query and key norms over the full width of all heads."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, NormSpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import read_shared
from headrace.models.reading import Fields, read_attention, read_decoder, read_layers, read_rope


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Every layer alike."""
    fields = Fields(config)
    return read_decoder(
        fields, read_layers(fields, read_rope(fields)), attention=read_attention(fields, qk_norm="full"),
        norm=NormSpec(fields.number("rms_norm_eps", 1e-5), before=False, after=True),
    )


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return read_shared(metadata, "Olmo2ForCausalLM")


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.olmo2.model:Olmo2Model",
    gguf_architectures=("olmo2",),
    gguf_config=gguf_config,
)
