"""Phi-3, Phi-3.5 and Phi-4: stacked projections in the checkpoint, LongRoPE, partial rotation of each head."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames, with_stacked_mlp, with_stacked_qkv
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_rope, read_window
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """With LongRoPE the short factors are used if ``max_model_len`` is at most ``original_max_position_embeddings``,
    else the long ones, for all requests alike: cached keys must stay valid."""
    fields = Fields(_name_longrope({**DEFAULTS, **config}))
    layers = read_layers(fields, read_rope(fields), window=read_window(fields))
    return read_decoder(fields, layers, attention=read_attention(fields, qkv_bias=False, output_bias=False))


def _name_longrope(config: dict[str, Any]) -> dict[str, Any]:
    """Normalise the scaling type: early configs call LongRoPE ``su`` or ``yarn``."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
        return {**config, "rope_scaling": {**scaling, "rope_type": "longrope"}}
    return config


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The factors of LongRoPE are tensors in the file, found in the metadata under their names."""
    config = read_gguf_config(metadata, "Phi3ForCausalLM")
    if "rope_factors_long.weight" in metadata:
        config["original_max_position_embeddings"] = metadata["phi3.rope.scaling.original_context_length"]
        config["rope_scaling"] = {
            "rope_type": "longrope", "attention_factor": metadata.get("phi3.rope.scaling.attn_factor"),
            **{
                f"{name}_factor": [float(f) for f in metadata[f"rope_factors_{name}.weight"]]
                for name in ("short", "long")
            },
        }
    return config


FAMILY = Family(
    name="phi3",
    architectures=decoder_architectures("Phi3"),
    read_config=read_config,
    names=CheckpointNames(with_stacked_qkv(with_stacked_mlp(SPLIT_NAMES))),
    gguf_architectures=("phi3",),
    gguf_config=gguf_config,
)
