"""Qwen3's checkpoint names are the ones that most decoders share."""

from headrace.layers.decoder.decoder import Decoder


class Qwen3Model(Decoder):
    """The plain decoder with query and key norms, which the spec asks for."""
