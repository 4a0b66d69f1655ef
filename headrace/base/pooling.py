"""Pooling: requests whose result is not tokens but a vector or scores of a whole text, and facts of pooling models.

Refuses: torch, and how a result is computed (``execution/pooling``).
"""

from __future__ import annotations

import sys
from array import array
from typing import Literal

import msgspec

PoolingKind = Literal["embed", "classify"]
Activation = Literal["sigmoid", "softmax", "identity"]


class Alignment(msgspec.Struct, frozen=True, array_like=True):
    """Asks which sound each token attends to, of the tokens from position ``begin`` on in a prompt that begins with a
    window of sound. ``num_positions`` of the window, of 20 ms each, are the clip. ``heads``: pairs of layer and head,
    which follow what is said."""

    begin: int
    num_positions: int
    heads: list[tuple[int, int]]


class PoolingSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request that is only prefilled and returns float32 values instead of tokens.

    Without ``label_ids``: the output of the model's pooling head, an embedding or the logits of its classes. With them:
    the log-probabilities of these tokens as the next one. Tokens from position ``second_start`` on belong to a second
    text (0: there is none). ``needs_all_tokens``: the head pools hidden states of all positions (mean pooling, for
    example), so none may be taken from the prefix cache. With ``alignment``: a matrix [tokens, num_positions] of how
    much each attends to each, normalised, smoothed and averaged over the heads; ``needs_all_tokens`` then.
    """

    label_ids: list[int] = []
    second_start: int = 0
    needs_all_tokens: bool = False
    alignment: Alignment | None = None

    @property
    def n(self) -> int:
        """Number of results of a request; named as `SamplingParams.n`."""
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
    """Pack as little-endian float32, the wire format of results."""
    return _little_endian(array("f", values)).tobytes()


def unpack_floats(packed: bytes) -> list[float]:
    """The values of a packed result."""
    values = array("f")
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
