"""Arcee's AFM: Llama with the square of ReLU in an MLP without a gate."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import UNGATED_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_decoder, read_mlp
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    fields = Fields({**DEFAULTS, **config})
    mlp = read_mlp(fields, default="relu2", bias=fields.flag("mlp_bias", False), gated=False)
    return read_decoder(fields, mlp=mlp)


FAMILY = Family(
    name="arcee",
    architectures=decoder_architectures("Arcee"),
    read_config=read_config,
    names=CheckpointNames(UNGATED_NAMES),
)
