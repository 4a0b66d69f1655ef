"""GLM-4's checkpoint names: gate and up in one tensor, and its own words for the norms."""

from typing import ClassVar

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import SPLIT_NAMES, with_stacked_mlp


class Glm4Model(Decoder):
    """The decoder with interleaved partial rotation, which the spec asks for."""

    names: ClassVar[dict[str, str]] = {
        **with_stacked_mlp(SPLIT_NAMES),
        "model.layers.{i}.post_self_attn_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.post_mlp_layernorm": "layers.{i}.mlp_post_norm",
    }
