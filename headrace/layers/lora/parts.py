"""What an adapter has for a layer in host memory, as a rank copies it to the device, and how much room there is for it.

r rank, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from headrace.base.errors import UnsupportedFeature
from headrace.kernels.lora.codes import CodedFactors

TENSORS = ("a", "b", "magnitude", "bias", "weight", "token_ids", "token_rows")
"""Those of a `PreparedPart`."""
ALIGNMENT, BUFFER_BYTES = 64, 2 << 20
"""Bytes: of tensors in a buffer, and of a buffer; see `gather_parts`."""

RANK_STEP = 16
"""Ranks are padded to multiples of this with zeros, for tensor cores."""

DENSE_RANKS = 128
"""Of all adapters together, with which each row is multiplied in the launch of the base's product: an eighth to a
thirtieth of its outputs in a model of 8 billion parameters, mostly in tiles that would be empty otherwise."""


@dataclass(frozen=True)
class BankSizes:
    """How many adapters there is room for on the device, and of which rank at most. ``dtype``: of low-rank additions,
    where it is not that of weights. ``is_coded``: those to linears whose weight may be stored otherwise are kept in 8
    bits; on a CPU alone."""

    num_slots: int
    max_rank: int
    dtype: torch.dtype | None = None
    is_coded: bool = False

    @property
    def padded_rank(self) -> int:
        """Ranks of a part in a slot."""
        return -(-self.max_rank // RANK_STEP) * RANK_STEP

    @property
    def num_dense(self) -> int:
        """Of a product over the ``a`` of the first slots, the most of these: see `SlotRows.num_dense`."""
        return min(self.num_slots, max(1, DENSE_RANKS // self.padded_rank))


@dataclass(slots=True)
class PreparedPart:
    """An `AdaptedPart` in host memory as a rank copies it to one part of its bank: ``a`` [r, I] and ``b`` [r, O of the
    part], with the scale multiplied in; ``b`` is float32 where a magnitude is still to be. ``coded``: instead of both,
    or beside them where the sum's norms are needed. ``rank``: r, 0 without an addition. ``start``: the first of its
    outputs. The others are as in `AdaptedPart`, narrowed to this rank."""

    index: int
    start: int
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    rank: int = 0
    coded: CodedFactors | None = None

    @property
    def has_extras(self) -> bool:
        """Whether it is more than a low-rank addition."""
        return any(
            tensor is not None for tensor in (self.magnitude, self.bias, self.weight, self.token_ids)
        )


@dataclass(frozen=True, slots=True)
class LoadBytes:
    """Bytes of the device that loading an adapter takes: ``kept`` ones, and those given back when it is loaded."""

    kept: int = 0
    passing: int = 0


def gather_parts(parts: Iterable[PreparedPart], *, is_pinned: bool) -> None:
    """Move the tensors of an adapter's parts into few buffers, which with ``is_pinned`` a GPU copies from: pinning
    hundreds of them one by one takes longer than reading their file. None is larger than `BUFFER_BYTES` for the sake of
    more than one tensor: launches of other threads wait while memory is pinned, some milliseconds for each 10 MB."""
    together: list[tuple[PreparedPart, str, torch.Tensor]] = []
    num_bytes = 0
    for part in parts:
        for name in TENSORS:
            tensor = getattr(part, name)
            if tensor is None:
                continue
            if together and num_bytes + tensor.nbytes > BUFFER_BYTES:
                _move(together, is_pinned=is_pinned)
                together, num_bytes = [], 0
            together.append((part, name, tensor))
            num_bytes += _align(tensor.nbytes)
    _move(together, is_pinned=is_pinned)


def _move(owned: list[tuple[PreparedPart, str, torch.Tensor]], *, is_pinned: bool) -> None:
    starts = [0, *accumulate(_align(tensor.nbytes) for _, _, tensor in owned)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_pinned)
    for (part, name, tensor), start in zip(owned, starts, strict=False):
        place = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        setattr(part, name, place.copy_(tensor))


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def refuse(module: str, what: str, fix: str) -> UnsupportedFeature:
    """The error for a part of an adapter that a layer cannot take."""
    return UnsupportedFeature(f"the adapter has {what} for {module}, which is not served; {fix}", param="lora_path")
