"""What an adapter has for a layer in host memory, as a rank copies it to the device, and how much room there is for it.

r rank, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.base.errors import AdapterError, UnsupportedFeature
from headrace.kernels.lora.codes import CodedFactors
from headrace.layers.lora.contract import TENSORS, AdaptedPart

ALIGNMENT, BUFFER_BYTES = 64, 2 << 20
"""Bytes: of which tensors in a buffer begin at multiples, and of a buffer; see `gather_parts`."""
MAX_THREADS = 8
"""That read, scan, hash or move tensors of an adapter; memory has no more for them."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that numpy has, by bytes of a number."""

RANK_STEP = 16
"""Ranks are padded to multiples of this with zeros, for tensor cores."""

DENSE_RANKS = 128
"""Of all adapters together, with which each row is multiplied in the launch of the base's product: an eighth to a
thirtieth of its outputs in a model of 8 billion parameters, mostly in tiles that would be empty otherwise."""
MOST_DENSE_RANKS = 1024
"""The same for many adapters: a step of some rows is still faster so than with a product for the rows of each."""

T = TypeVar("T")
R = TypeVar("R")


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
    part], with the scale multiplied in; ``b`` is float32 where a magnitude is still to be. ``coded``: instead of both,
    or beside them where the sum's norms are needed. ``rank``: r, 0 without an addition. ``start``: the first of its
    outputs. The others are as in `AdaptedPart`, narrowed to this rank. ``num_parts``: of all P parts of a layer, which
    have additions of the same rank and nothing else: ``a`` [P, r, I] and ``b`` [r, O of all]."""

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
    num_parts: int = 1

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


@dataclass(slots=True)
class _Move:
    """What becomes tensor ``name`` [``shape``] of a part: the bits of numbers, and their places in it."""

    part: PreparedPart
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: list[tuple[Any, np.ndarray]]
    num_bytes: int
    start: int = 0


def gather_parts(
    layers: Mapping[str, list[PreparedPart]], num_parts: Callable[[str], int], take: Callable[[int], torch.Tensor]
) -> dict[str, list[PreparedPart]]:
    """The same parts of an adapter in few buffers, which a GPU may copy from: ``take`` returns one of so many bytes, on
    any thread. None is larger than `BUFFER_BYTES` for the sake of more than one tensor. Of a layer that has
    ``num_parts``, those that are all there and alike are one."""
    moves: list[_Move] = []
    gathered: dict[str, list[PreparedPart]] = {}
    for name, parts in layers.items():
        stacked = _stack(parts, num_parts(name))
        gathered[name] = parts if stacked is None else [stacked[0].part]
        moves += stacked or (move for part in parts for move in _list_moves(part))
    buffers = _pack(moves)
    for buffer, own in zip(run_in_threads(partial(_move, take), buffers), buffers, strict=True):
        for move in own:
            place = buffer[move.start : move.start + move.num_bytes]
            setattr(move.part, move.name, place.view(move.dtype).view(move.shape))
    return gathered


def run_in_threads(work: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    """The results of all jobs, in order, or what the first of them raised. As many threads as are faster than fewer."""
    with ThreadPoolExecutor(max(1, min(MAX_THREADS, torch.get_num_threads(), len(jobs))), "adapter-piece") as threads:
        return list(threads.map(work, jobs))


def _stack(parts: list[PreparedPart], num_parts: int) -> list[_Move] | None:
    """Of all parts of a layer as one; None where they are not alike."""
    alike = {(part.rank, part.a.dtype, part.b.dtype) for part in parts if part.a is not None and part.b is not None}
    if num_parts == 1 or len(alike) != 1 or any(part.has_extras or part.a is None for part in parts):
        return None
    ordered = sorted(parts, key=lambda part: part.index)
    if [part.index for part in ordered] != list(range(num_parts)):
        return None
    stacked = PreparedPart(0, 0, rank=ordered[0].rank, num_parts=num_parts)
    a, b = [part.a for part in ordered if part.a is not None], [part.b for part in ordered if part.b is not None]
    columns = [slice(part.start, part.start + own.shape[1]) for part, own in zip(ordered, b, strict=True)]
    return [
        _make_move(stacked, "a", (num_parts, *a[0].shape), list(enumerate(a))),
        _make_move(
            stacked, "b", (stacked.rank, columns[-1].stop),
            [((slice(None), own), tensor) for own, tensor in zip(columns, b, strict=True)],
        ),
    ]


def _list_moves(part: PreparedPart) -> Iterator[_Move]:
    for name in TENSORS:
        tensor = getattr(part, name)
        if tensor is not None:
            yield _make_move(part, name, tuple(tensor.shape), [(..., tensor)])


def _make_move(
    part: PreparedPart, name: str, shape: tuple[int, ...], sources: Sequence[tuple[Any, torch.Tensor]]
) -> _Move:
    first = sources[0][1]
    bits = BITS[first.element_size()]
    num_bytes = prod(shape) * first.element_size()
    return _Move(part, name, first.dtype, shape, [(at, np.asarray(own.view(bits))) for at, own in sources], num_bytes)


def _pack(moves: list[_Move]) -> list[list[_Move]]:
    """Into few buffers: the largest first, each into the first buffer that has room."""
    buffers: list[list[_Move]] = []
    used: list[int] = []
    for move in sorted(moves, key=lambda move: -move.num_bytes):
        size = align(move.num_bytes)
        index = next((i for i, num_bytes in enumerate(used) if num_bytes + size <= BUFFER_BYTES), len(used))
        if index == len(used):
            buffers.append([])
            used.append(0)
        move.start = used[index]
        buffers[index].append(move)
        used[index] += size
    return buffers


def _move(take: Callable[[int], torch.Tensor], moves: list[_Move]) -> torch.Tensor:
    # by numpy: torch would transpose at half the rate, and start as many threads as there are cores
    buffer = take(moves[-1].start + align(moves[-1].num_bytes))
    content = np.asarray(buffer)
    for move in moves:
        place = content[move.start : move.start + move.num_bytes]
        for at, bits in move.sources:
            if bits.size:
                np.copyto(place.view(bits.dtype).reshape(move.shape)[at], bits)
    return buffer


def align(num_bytes: int) -> int:
    """Rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def check_range(part: AdaptedPart, name: str, made: torch.Tensor | None) -> None:
    """Raise `AdapterError` where a tensor of a part, whose numbers are finite, is not finite any more, as ``made`` of
    it: scaled, or in a dtype of a smaller range."""
    given = getattr(part, name)
    if made is None or not made.numel() or (made.dtype == given.dtype and (name != "b" or part.scale == 1.0)):
        return
    if not all(bound.isfinite() for bound in made.aminmax()):
        scaled = f" by its scale of {part.scale:g}" if name == "b" else ""
        raise AdapterError(
            f"numbers in {name} of {part.module} {part.part}".rstrip() + f" are too large{scaled} for "
            f"{str(made.dtype).removeprefix('torch.')}; serve the model in a dtype of a larger range, or train it anew",
            param="lora_path",
        )


def refuse(module: str, what: str, fix: str) -> UnsupportedFeature:
    """The error for a part of an adapter that a layer cannot take."""
    return UnsupportedFeature(f"the adapter has {what} for {module}, which is not served; {fix}", param="lora_path")
