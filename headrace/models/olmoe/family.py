"""OLMoE: a mixture of experts in every layer, query and key norms over all heads together."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_moe
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import EXPERT_KEYS, read_gguf_config

DEFAULTS = {"num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Raises `ConfigError` for clipped queries, keys and values, which no published model has."""
    fields = Fields({**DEFAULTS, **config})
    if "clip_qkv" in fields:
        raise ConfigError("config.json: clip_qkv must be null; this family does not clip", param="clip_qkv")
    renormalise = fields.flag("norm_topk_prob", False)
    return read_decoder(
        fields, attention=read_attention(fields, qk_norm="full"),
        mlp=read_moe(fields, "num_experts", intermediate_size="intermediate_size", renormalise=renormalise),
    )


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Weights of chosen experts are not renormalised, as in the published models."""
    return read_gguf_config(metadata, "OlmoeForCausalLM", keys={**EXPERT_KEYS, "expert_count": "num_experts"})


FAMILY = Family(
    name="olmoe",
    architectures=decoder_architectures("Olmoe"),
    read_config=read_config,
    names=CheckpointNames({**SPLIT_NAMES, **EXPERT_NAMES, "model.layers.{i}.mlp.gate": ROUTER}),
    gguf_architectures=("olmoe",),
    gguf_config=gguf_config,
)
