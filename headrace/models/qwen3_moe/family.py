"""Qwen3 MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    add_sparse_steps,
    read_attention,
    read_decoder,
    read_layers,
    read_moe,
    read_rope,
    read_window,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import EXPERT_KEYS, read_gguf_config

DEFAULTS = {
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4, "max_position_embeddings": 32768,
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Newer files call ``num_experts`` ``num_local_experts``."""
    fields = Fields({"num_experts": config.get("num_local_experts") or 128, **DEFAULTS, **config})
    window = read_window(fields, 4096) if fields.flag("use_sliding_window", False) else 0
    moe = read_moe(
        fields, "num_experts", intermediate_size="moe_intermediate_size",
        renormalise=fields.flag("norm_topk_prob", False),
    )
    layers = add_sparse_steps(fields, read_layers(fields, read_rope(fields), window=window), moe)
    return read_decoder(fields, layers, attention=read_attention(fields, qk_norm="head"))


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The files do not state that all layers have experts and that weights are renormalised; published models do both.
    """
    config = read_gguf_config(metadata, "Qwen3MoeForCausalLM", keys={**EXPERT_KEYS, "expert_count": "num_experts"})
    return {"norm_topk_prob": True, "intermediate_size": config.get("moe_intermediate_size"), **config}


FAMILY = Family(
    name="qwen3_moe",
    architectures=decoder_architectures("Qwen3Moe"),
    read_config=read_config,
    names=CheckpointNames({**SPLIT_NAMES, **EXPERT_NAMES, "model.layers.{i}.mlp.gate": ROUTER}),
    gguf_architectures=("qwen3moe",),
    gguf_config=gguf_config,
    tool_parser="hermes",
    reasoning_parser="qwen3",
)
