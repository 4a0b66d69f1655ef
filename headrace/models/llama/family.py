"""Llama 1 to 3.x and models of the same architecture: Mistral, Ministral and Ministral 3 (with or without sliding
windows), SmolLM2."""

from __future__ import annotations

import re
from typing import Any

from headrace.layers.names import GgufNaming
from headrace.layers.spec import DecoderSpec, LayerSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_decoder, read_layers, read_rope, read_sliding, read_window
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import EXPERT_KEYS, read_gguf_config

WINDOWED = {"Mistral": 4096, "Ministral": 4096, "Ministral3": 0}
"""Architectures with a sliding window, and its length in tokens where a config states none."""
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}
MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Mistral": MISTRAL_DEFAULTS, "Ministral": MISTRAL_DEFAULTS,
    "Ministral3": {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        "rope_parameters": YARN,
    },
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """A ``sliding_window`` of null means none. Ministral's ``layer_types`` say which layers have it."""
    kind = re.split("For|Model", config["architectures"][0])[0]
    replaced = {"rope_parameters": None} if config.get("rope_scaling") else {}  # by the older spelling
    fields = Fields({**DEFAULTS.get(kind, {}), **replaced, **config})
    rope, window = read_rope(fields), read_window(fields, WINDOWED[kind]) if kind in WINDOWED else 0
    layers = read_layers(fields, rope, window=window)
    if kind == "Ministral":
        are_sliding = read_sliding(fields, lambda _: True)
        layers = tuple(LayerSpec(window if is_sliding else 0, rope) for is_sliding in are_sliding)
    return read_decoder(fields, layers)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Mistral and Mixtral files state ``llama`` as their architecture too. Mixtral's are recognised by their experts;
    Mistral's are served as Llama, without a window."""
    if metadata.get("llama.expert_count"):
        return read_gguf_config(metadata, "MixtralForCausalLM", keys=EXPERT_KEYS)
    return read_gguf_config(metadata, "LlamaForCausalLM")


FAMILY = Family(
    name="llama",
    architectures=decoder_architectures("Llama", "Mistral", "Ministral", "Ministral3"),
    read_config=read_config,
    gguf_architectures=("llama",),
    gguf_config=gguf_config,
    gguf_naming=GgufNaming(is_rotary_interleaved=True),
)
