"""OLMo 2: norms after the branches and none before, query and key norms over all heads together."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder
from headrace.models.family import Family
from headrace.models.gguf_config import read_gguf_config


def read_config(config: dict[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5), before=False, after=True)
    return read_decoder(fields, attention=read_attention(fields, qk_norm="full"), norm=norm)


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    read_config=read_config,
    names=CheckpointNames({
        **SPLIT_NAMES,
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }),
    gguf_architectures=("olmo2",),
    gguf_config=partial(read_gguf_config, architecture="Olmo2ForCausalLM"),
)
