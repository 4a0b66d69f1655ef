"""Pooling: results other than tokens, a vector or scores of a whole text, and what the edges must know of such models.

Refuses: torch, and how a result is computed (``execution/pooling``).
"""

from __future__ import annotations

import sys
from array import array
from typing import Literal

import msgspec

PoolingKind = Literal["embed", "classify"]
Activation = Literal["sigmoid", "softmax", "identity"]


class PoolingSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request that ends with its prompt and yields numbers instead of tokens.

    ``label_ids`` empty: what the model itself makes of a text, its embedding or the logits of its classes; else the
    log-probabilities of these tokens after the prompt's last one. Tokens from position ``second_start`` on belong to a
    second text (0: there is none). ``needs_all_tokens``: the result is made of every position, so none may come from
    the prefix cache.
    """

    label_ids: list[int] = []
    second_start: int = 0
    needs_all_tokens: bool = False

    @property
    def n(self) -> int:
        """Results of a request, as `SamplingParams` counts its choices."""
        return 1


class PoolingFacts(msgspec.Struct, frozen=True):
    """A pooling model. ``width`` is the size of its embeddings, or the number of its classes,
    whose names are ``labels``. ``activation`` turns the logits of classes into what users expect. ``takes_pairs``: it
    was made to judge two texts together."""

    kind: PoolingKind
    width: int
    needs_all_tokens: bool = False
    labels: list[str] = []
    activation: Activation = "identity"
    takes_pairs: bool = False


def pack_floats(values: list[float]) -> bytes:
    """Little-endian float32, the form in which results travel."""
    return _little_endian(array("f", values)).tobytes()


def unpack_floats(packed: bytes) -> list[float]:
    """The numbers in a result."""
    values = array("f")
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
