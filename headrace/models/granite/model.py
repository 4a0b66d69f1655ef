"""Granite's checkpoint names are the ones that most decoders share."""

from headrace.layers.decoder.decoder import Decoder


class GraniteModel(Decoder):
    """The plain decoder with multipliers, which the spec asks for."""
