"""RoBERTa's checkpoint names: the classifier is a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headrace.layers.encoder.encoder import Encoder
from headrace.layers.encoder.names import SCORE_HEAD_NAMES


class RobertaModel(Encoder):
    """The encoder."""

    score_names: ClassVar[Mapping[str, str]] = SCORE_HEAD_NAMES
    prefixes: ClassVar[tuple[str, ...]] = ("roberta.",)
