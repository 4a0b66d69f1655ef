"""Phi-3's checkpoint names: q, k, v in one tensor, gate and up in another."""

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import SPLIT_NAMES, with_stacked_mlp, with_stacked_qkv


class Phi3Model(Decoder):
    """The plain decoder."""

    names = with_stacked_qkv(with_stacked_mlp(SPLIT_NAMES))
