"""Llama's checkpoint names are the ones that most decoders share."""

from headrace.layers.decoder.decoder import Decoder


class LlamaModel(Decoder):
    """The plain decoder."""
