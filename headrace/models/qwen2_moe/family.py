"""Qwen1.5-MoE and Qwen2-MoE: experts beside an MLP of all tokens, whose output a gate of its own weighs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, MlpSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    GATED_ACTIVATIONS,
    add_sparse_steps,
    read_attention,
    read_decoder,
    read_moe,
    read_rope,
    read_windowed_layers,
)
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "max_position_embeddings": 32768,
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``qkv_bias`` is that of queries, keys and values. Where a config does not say which layers have the window, every
    other one of the first ``max_window_layers`` has it, as in transformers."""
    fields = Fields({**DEFAULTS, **config})
    num_windowed = fields.count("max_window_layers", 28)
    activation = fields.choice("hidden_act", GATED_ACTIVATIONS, "silu")
    moe = read_moe(
        fields, "num_experts", intermediate_size="moe_intermediate_size",
        renormalise=fields.flag("norm_topk_prob", False),
        shared=MlpSpec(fields.integer("shared_expert_intermediate_size"), activation),
    )
    layers = read_windowed_layers(fields, read_rope(fields), has_window=lambda i: i % 2 == 0 and i < num_windowed)
    layers = add_sparse_steps(fields, layers, replace(moe, shared_gate=True))
    attention = read_attention(fields, qkv_bias=fields.flag("qkv_bias", True), output_bias=False)
    return read_decoder(fields, layers, attention=attention)


FAMILY = Family(
    name="qwen2_moe",
    architectures=decoder_architectures("Qwen2Moe"),
    read_config=read_config,
    names=CheckpointNames({
        **SPLIT_NAMES,
        **EXPERT_NAMES,
        "model.layers.{i}.mlp.gate": ROUTER,
        "model.layers.{i}.mlp.shared_expert.gate_proj": "layers.{i}.mlp.shared.gate_up#gate",
        "model.layers.{i}.mlp.shared_expert.up_proj": "layers.{i}.mlp.shared.gate_up#up",
        "model.layers.{i}.mlp.shared_expert.down_proj": "layers.{i}.mlp.shared.down",
        "model.layers.{i}.mlp.shared_expert_gate": "layers.{i}.mlp.shared_gate",
    }),
)
