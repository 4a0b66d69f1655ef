"""Llama 1 to 3.x and models of the same architecture: Mistral (with or without sliding window), SmolLM2."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import GgufNaming
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_decoder, read_layers, read_rope, read_window
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import EXPERT_KEYS, read_gguf_config


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Mistral has a sliding window, of 4096 tokens if its config does not state one; null means none."""
    fields = Fields(config)
    window = read_window(fields, 4096) if config["architectures"][0].startswith("Mistral") else 0
    return read_decoder(fields, read_layers(fields, read_rope(fields), window=window))


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Mistral and Mixtral files state ``llama`` as their architecture too. Mixtral's are recognised by their experts;
    Mistral's are served as Llama, without a window."""
    if metadata.get("llama.expert_count"):
        return read_gguf_config(metadata, "MixtralForCausalLM", keys=EXPERT_KEYS)
    return read_gguf_config(metadata, "LlamaForCausalLM")


FAMILY = Family(
    name="llama",
    architectures=decoder_architectures("Llama", "Mistral"),
    read_config=read_config,
    gguf_architectures=("llama",),
    gguf_config=gguf_config,
    gguf_naming=GgufNaming(is_rotary_interleaved=True),
)
