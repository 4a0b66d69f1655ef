"""Gemma: RMS norms that multiply by ``1 + weight``, embeddings scaled by the root of their size, a tied head."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.names import GgufNaming
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_decoder, read_mlp, read_vocabulary
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """The activation is GELU by tanh also where ``hidden_act`` says ``gelu``: the first published files mean it so."""
    fields = Fields({**DEFAULTS, **config})
    if fields.config.get("hidden_act") == "gelu":
        fields.config["hidden_act"] = "gelu_pytorch_tanh"
    return read_decoder(
        fields, mlp=read_mlp(fields, default="gelu_pytorch_tanh"),
        norm=NormSpec(fields.number("rms_norm_eps", 1e-6), offset=1.0),
        vocabulary=read_vocabulary(fields, tied=True, embedding_scale=fields.integer("hidden_size") ** 0.5),
    )


FAMILY = Family(
    name="gemma",
    architectures=decoder_architectures("Gemma"),
    read_config=read_config,
    gguf_architectures=("gemma",),
    gguf_config=partial(read_gguf_config, architecture="GemmaForCausalLM"),
    gguf_naming=GgufNaming(norm_offset=1.0),
)
