"""Qwen2's checkpoint names are the ones that most decoders share."""

from headrace.layers.decoder.decoder import Decoder


class Qwen2Model(Decoder):
    """The plain decoder with biases, which the spec asks for."""
