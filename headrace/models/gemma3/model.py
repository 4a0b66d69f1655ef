"""Gemma 3's checkpoint names: norms on both sides of each branch."""

from typing import ClassVar

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import SPLIT_NAMES


class Gemma3Model(Decoder):
    """The decoder with two kinds of layers, which the spec asks for."""

    names: ClassVar[dict[str, str]] = {
        **SPLIT_NAMES,
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }
