"""gpt-oss: sliding-window and full layers alternate, attention sinks, biases everywhere, experts with a clamped SwiGLU.
"""

from __future__ import annotations

from typing import Any

from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames, GgufNaming
from headrace.layers.spec import DecoderSpec, LayerSpec, SwigluClamp
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_moe,
    read_rope,
    read_sliding,
    read_window,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import EXPERT_KEYS, read_gguf_config

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
    rope, window = read_rope(fields, theta=150000.0), read_window(fields)
    return tuple(
        LayerSpec(window if is_sliding else 0, rope) for is_sliding in read_sliding(fields, lambda i: i % 2 == 0)
    )


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The file states neither which layers have the window nor the clamp: the defaults of the published models apply.
    """
    config = read_gguf_config(
        metadata, "GptOssForCausalLM", keys={**EXPERT_KEYS, "expert_feed_forward_length": "intermediate_size"}
    )
    if config.get("rope_scaling"):
        config["rope_scaling"]["truncate"] = False
    return config


FAMILY = Family(
    name="gpt_oss",
    architectures=decoder_architectures("GptOss"),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **EXPERT_NAMES,
            "model.layers.{i}.mlp.router": ROUTER,
            "model.layers.{i}.self_attn.sinks": "layers.{i}.attention.sinks",
        },
        renames={".self_attn.sinks.weight": ".self_attn.sinks"},  # as GGUF files have it
        stacked_experts="alternating",
    ),
    gguf_architectures=("gpt-oss",),
    gguf_config=gguf_config,
    gguf_naming=GgufNaming(parts={"ffn_gate_inp": "mlp.router"}),
    tool_parser="gpt_oss",
    reasoning_parser="gpt_oss",
)
