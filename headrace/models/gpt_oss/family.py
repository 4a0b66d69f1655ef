"""gpt-oss: windowed and full layers by turns, attention sinks, biases everywhere, experts with a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, LayerSpec, SwigluClamp, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import EXPERT_KEYS, read_shared
from headrace.models.reading import (
    Fields,
    check_layer_types,
    read_attention,
    read_decoder,
    read_moe,
    read_num_layers,
    read_rope,
    read_window,
)

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "attention_bias": True, "rope_parameters": YARN,
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``rope_scaling`` of older files replaces the default ``rope_parameters``."""
    given = {name: value for name, value in config.items() if value is not None}
    fields = Fields({**DEFAULTS, **({"rope_parameters": None} if "rope_scaling" in given else {}), **given})
    clamp = SwigluClamp(fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702), up_offset=1.0)
    return read_decoder(
        fields, _read_layers(fields), attention=read_attention(fields, sinks=True),
        mlp=read_moe(
            fields, "num_local_experts", intermediate_size="intermediate_size", renormalise=True, bias=True, clamp=clamp
        ),
    )


def _read_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    num_layers, rope = read_num_layers(fields), read_rope(fields, theta=150000.0)
    types = (
        fields.config.get("layer_types")
        or ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    )
    check_layer_types(types, num_layers)
    return tuple(LayerSpec(read_window(fields) if kind == "sliding_attention" else 0, rope) for kind in types)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Which layers have the window, and the clamp, are not in the file: they are as in the published models."""
    config = read_shared(
        metadata, "GptOssForCausalLM", keys={**EXPERT_KEYS, "expert_feed_forward_length": "intermediate_size"}
    )
    if config.get("rope_scaling"):
        config["rope_scaling"]["truncate"] = False
    return config


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.gpt_oss.model:GptOssModel",
    gguf_architectures=("gpt-oss",),
    gguf_config=gguf_config,
    gguf_weights="headrace.models.gpt_oss.gguf_naming:name_router",
    tool_parser="gpt_oss",
    reasoning_parser="gpt_oss",
)
