"""What an adapter has for a layer in host memory, as a rank copies it to the device, and how much room there is for it.

r rank, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from headrace.base.errors import UnsupportedFeature
from headrace.kernels.lora.codes import CodedFactors

TENSORS = ("a", "b", "magnitude", "bias", "weight", "token_ids", "token_rows")
"""Those of a `PreparedPart`."""
ALIGNMENT, BUFFER_BYTES = 64, 2 << 20
"""Bytes: of tensors in a buffer, and of a buffer; see `gather_parts`."""
MAX_THREADS = 8
"""That move tensors of an adapter; memory has no more for them."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that numpy has, by bytes of a number."""

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


_Owned = tuple[PreparedPart, str, torch.Tensor]
"""A tensor of a part, and its name there."""


@dataclass(frozen=True, slots=True)
class LoadBytes:
    """Bytes of the device that loading an adapter takes: ``kept`` ones, and those given back when it is loaded."""

    kept: int = 0
    passing: int = 0


def gather_parts(parts: Iterable[PreparedPart], take: Callable[[int], torch.Tensor]) -> None:
    """Move the tensors of an adapter's parts into few buffers, which a GPU may copy from: ``take`` returns one of so
    many bytes, on any thread. None is larger than `BUFFER_BYTES` for the sake of more than one tensor."""
    buffers: list[list[_Owned]] = [[]]
    num_bytes = 0
    for part in parts:
        for name in TENSORS:
            tensor = getattr(part, name)
            if tensor is None:
                continue
            if buffers[-1] and num_bytes + tensor.nbytes > BUFFER_BYTES:
                buffers.append([])
                num_bytes = 0
            buffers[-1].append((part, name, tensor))
            num_bytes += _align(tensor.nbytes)
    with ThreadPoolExecutor(max(1, min(MAX_THREADS, torch.get_num_threads())), "adapter-copy") as threads:
        for _ in threads.map(partial(_move, take), buffers):
            pass  # raises what moving raised


def _move(take: Callable[[int], torch.Tensor], owned: list[_Owned]) -> None:
    starts = [0, *accumulate(_align(tensor.nbytes) for _, _, tensor in owned)]
    buffer = take(starts[-1])
    for (part, name, tensor), start in zip(owned, starts, strict=False):
        place = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if tensor.numel():
            # by numpy: torch would transpose at half the rate, and start as many threads as there are cores
            bits = BITS[tensor.element_size()]
            np.copyto(np.asarray(place.view(bits)), np.asarray(tensor.view(bits)))
        setattr(part, name, place)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def refuse(module: str, what: str, fix: str) -> UnsupportedFeature:
    """The error for a part of an adapter that a layer cannot take."""
    return UnsupportedFeature(f"the adapter has {what} for {module}, which is not served; {fix}", param="lora_path")
