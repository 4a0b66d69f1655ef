"""BERT's checkpoint names are those that encoders share."""

from typing import ClassVar

from headrace.layers.encoder.encoder import Encoder


class BertModel(Encoder):
    """The encoder."""

    prefixes: ClassVar[tuple[str, ...]] = ("bert.",)
