"""ERNIE 4.5: Llama whose heads are rotated in neighbouring pairs; the larger ones have experts, chosen by their softmax
and a learned bias, beside an MLP of all tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import EXPERT_NAMES, SHARED_EXPERT_NAMES, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, LayerSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_mlp,
    read_moe,
    read_rope,
    read_vocabulary,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

SHARED_DEFAULTS = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
DENSE_DEFAULTS = {**SHARED_DEFAULTS, "head_dim": 128, "num_key_value_heads": 2}
MIXTURE_DEFAULTS = {
    **SHARED_DEFAULTS, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_intermediate_size": 1536,
}
LEAST_SUM = 1e-6


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``use_bias`` is for all products but those of experts; where there are experts, for the head too."""
    is_mixture = config["architectures"][0].startswith("Ernie4_5_Moe")
    fields = Fields({**(MIXTURE_DEFAULTS if is_mixture else DENSE_DEFAULTS), **config})
    bias = fields.flag("use_bias", False)
    layers = read_layers(fields, read_rope(fields, theta=500000.0, interleaved=True))
    return read_decoder(
        fields, _add_experts(fields, layers) if is_mixture else layers,
        attention=read_attention(fields, qkv_bias=bias, output_bias=bias), mlp=read_mlp(fields, bias=bias),
        vocabulary=read_vocabulary(fields, tied=True, head_bias=bias and is_mixture),
    )


def _add_experts(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Every ``moe_layer_interval``-th layer between two has experts; an end of -1 is the last layer. Raises
    `ConfigError` for a least sum of weights that is more than a guard against dividing by 0."""
    if (least := fields.number("moe_norm_min", 1e-12)) > LEAST_SUM:
        raise ConfigError(f"config.json: moe_norm_min must be at most {LEAST_SUM}, got {least}", param="moe_norm_min")
    fields.config["num_experts_per_tok"] = fields.integer("moe_k", 6)
    num_shared, dense = fields.count("moe_num_shared_experts", 2), read_mlp(fields, bias=fields.flag("use_bias", False))
    moe = read_moe(
        fields, "moe_num_experts", intermediate_size="moe_intermediate_size", renormalise=True, choice_bias=True,
        in_float32=True,
        shared=replace(dense, intermediate_size=fields.integer("moe_intermediate_size") * num_shared) if num_shared
        else None,
    )
    first, last = fields.count("moe_layer_start_index", 1), fields.number("moe_layer_end_index", -1)
    last, step = len(layers) - 1 if last == -1 else last, fields.integer("moe_layer_interval", 1)
    return tuple(
        replace(layer, mlp=moe) if first <= i <= last and (i + 1) % step == 0 else layer
        for i, layer in enumerate(layers)
    )


FAMILY = Family(
    name="ernie4_5",
    architectures=decoder_architectures("Ernie4_5", "Ernie4_5_Moe"),
    read_config=read_config,
    names=CheckpointNames(
        {**SPLIT_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES},
        # newer files have the bias within the gate, published ones beside it
        renames={".gate.moe_statics.": ".gate.", ".mlp.moe_statics.": ".mlp.gate."},
        ignored=("model.mtp_",),
    ),
    gguf_architectures=("ernie4_5",),
    gguf_config=partial(read_gguf_config, architecture="Ernie4_5ForCausalLM"),
)
