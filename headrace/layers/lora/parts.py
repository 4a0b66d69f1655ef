"""What an adapter has for a layer in host memory, as a rank copies it to the device, and how much room there is for it.

r rank, O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.base.errors import AdapterError, UnsupportedFeature
from headrace.kernels.lora.codes import CodedFactors
from headrace.layers.lora.contract import AdaptedPart

RANK_STEP = 16
"""Ranks are padded to multiples of this with zeros, for tensor cores."""

DENSE_RANKS = 128
"""Of all adapters together, with which each row is multiplied in the launch of the base's product: an eighth to a
thirtieth of its outputs in a model of 8 billion parameters, mostly in tiles that would be empty otherwise."""
MOST_DENSE_RANKS = 1024
"""The same for many adapters: a step of some rows is still faster so than with a product for the rows of each."""


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
    def dense_counts(self) -> tuple[int, ...]:
        """What `SlotRows.num_dense` is in steps whose adapters are all in so many of the first slots, the least first;
        at the end all slots, or 0 where they are too many."""
        few = min(self.num_slots, max(1, DENSE_RANKS // self.padded_rank))
        if few == self.num_slots:
            return (few,)
        return few, self.num_slots if self.num_slots * self.padded_rank <= MOST_DENSE_RANKS else 0


@dataclass(slots=True)
class PreparedPart:
    """An `AdaptedPart` in host memory as a rank copies it to one part of its bank: ``a`` [r, I] and ``b`` [r, O of the
    part], which is still multiplied by ``scale``; ``b`` is float32 where a magnitude is still to be. ``coded``: instead
    of both, or beside them where the sum's norms are needed. ``rank``: r, 0 without an addition. ``start``: the first
    of its outputs. The others are as in `AdaptedPart`, narrowed to this rank."""

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
    scale: float = 1.0

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


def check_range(part: AdaptedPart, name: str, made: torch.Tensor | None) -> None:
    """Raise `AdapterError` where a tensor of a part, whose numbers are finite, is not finite any more, as ``made`` of
    it: scaled, or in a dtype of a smaller range."""
    given = getattr(part, name)
    if made is None or not made.numel() or (made.dtype == given.dtype and (name != "b" or part.scale == 1.0)):
        return
    if fits(part, name, made.dtype) or all(bound.isfinite() for bound in made.aminmax()):
        return
    scaled = f" by its scale of {part.scale:g}" if name == "b" else ""
    raise AdapterError(
        f"numbers in {name} of {part.module} {part.part}".rstrip() + f" are too large{scaled} for "
        f"{str(made.dtype).removeprefix('torch.')}; serve the model in a dtype of a larger range, or train it anew",
        param="lora_path",
    )


def fits(part: AdaptedPart, name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of a part, scaled where it is ``b``, is finite in a dtype by its bound alone."""
    return part.bound * (abs(part.scale) if name == "b" else 1.0) < torch.finfo(dtype).max


def refuse(module: str, what: str, fix: str) -> UnsupportedFeature:
    """The error for a part of an adapter that a layer cannot take."""
    return UnsupportedFeature(f"the adapter has {what} for {module}, which is not served; {fix}", param="lora_path")
