"""Granite 3.x: Llama with multipliers on embeddings, attention, residual branches and logits; dense, or with a mixture
of experts and perhaps an MLP of all tokens beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames, GgufNaming
from headrace.layers.spec import DecoderSpec, MlpKind
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_mlp, read_moe, read_vocabulary
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

GGUF_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Multipliers are 1 unless given."""
    fields = Fields(config)
    dense = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    mlp: MlpKind = dense
    if config["architectures"][0].startswith("GraniteMoe"):
        size = fields.count("shared_intermediate_size", 0)
        mlp = read_moe(
            fields, "num_local_experts", intermediate_size="intermediate_size", renormalise=True,
            shared=replace(dense, intermediate_size=size) if size else None,
        )
    return read_decoder(
        fields, attention=read_attention(fields, scale=fields.number("attention_multiplier", 1.0)), mlp=mlp,
        vocabulary=read_vocabulary(
            fields, embedding_scale=fields.number("embedding_multiplier", 1.0),
            logits_divisor=fields.number("logits_scaling", 1.0),
        ),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )


FAMILY = Family(
    name="granite",
    architectures=decoder_architectures("Granite", "GraniteMoe", "GraniteMoeShared"),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **EXPERT_NAMES,
            "model.layers.{i}.mlp.router": ROUTER,
            "model.layers.{i}.shared_mlp.input_linear": "layers.{i}.mlp.shared.gate_up",
            "model.layers.{i}.shared_mlp.output_linear": "layers.{i}.mlp.shared.down",
        },
        renames={
            ".block_sparse_moe.": ".mlp.", ".mlp.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".mlp.output_linear.weight": ".mlp.experts.down_proj", ".router.layer.": ".router.",
        },
    ),
    gguf_architectures=("granite",),
    gguf_config=partial(read_gguf_config, architecture="GraniteForCausalLM", keys=GGUF_KEYS),
    gguf_naming=GgufNaming(is_rotary_interleaved=True),
    tool_parser="granite",
    reasoning_parser="granite",
)
