"""`check_parts`: that the numbers of an adapter are finite, and the digest of its content. `examine` scans and hashes
memory by several threads, also while it is filled.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import torch

from headrace.base.errors import AdapterError
from headrace.layers.lora.contract import TENSORS, AdaptedPart
from headrace.layers.lora.memory import view_bytes

PIECE_BYTES, MOST_IN_PIECE = 2 << 20, 512
"""Bytes that a thread reads, scans and hashes at a time, and of how many tensors: calls that are long beside those of
Python around them, for which threads would wait for one another."""
MAX_THREADS = 8
"""That do so; memory has no more for them."""
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Bits of it; those of what is no number are more."""
BITS = {2: torch.int16, 4: torch.int32}
"""Integers of so many bytes."""

Span = tuple[int, int]
"""Memory: its address, and how many bytes."""


class Stored(NamedTuple):
    """A tensor of ``dtype`` in the memory ``view`` at ``address``; ``at``: where it is in a file. ``is_examined``:
    whether it is scanned and hashed."""

    address: int
    view: memoryview
    dtype: torch.dtype
    at: int = 0
    is_examined: bool = True


Piece = list[tuple[Span, Stored]]
"""Tensors, or a part of one, of at most `PIECE_BYTES`, each with the memory of the whole tensor."""


@dataclass(slots=True)
class Contents:
    """What is known of tensors in memory: ``digests`` of each, one of every `PIECE_BYTES`; ``bound``: no number has a
    larger magnitude, infinite where one is not finite."""

    digests: dict[Span, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    bound: float = 0.0


def examine(tensors: Iterable[Stored], contents: Contents, read: Callable[[Piece], None] | None = None) -> None:
    """Scan and hash tensors piece by piece, behind ``read`` of each, and add what is known of them; raises what reading
    raised. A thread takes the next piece when it is done with one; this one is one of them."""
    pieces = list(_cut(tensors))
    left = iter(enumerate(pieces))

    def work(_: int = 0) -> list[tuple[int, list[bytes], float]]:
        return [(i, *_examine_piece(piece, read)) for i, piece in left]

    count = min(MAX_THREADS, torch.get_num_threads(), len(pieces))
    with ThreadPoolExecutor(max(1, count - 1), "adapter-piece") as threads:
        others = threads.map(work, range(1, count))
        examined = sorted(chain(work(), *others))  # in the order of pieces, whichever thread took them
    for i, digests, bound in examined:
        contents.bound = max(contents.bound, bound)
        for owner, digest in zip((span for span, part in pieces[i] if part.is_examined), digests, strict=True):
            contents.digests[owner].append(digest)


def _cut(tensors: Iterable[Stored]) -> Iterator[Piece]:
    piece: Piece = []
    room = PIECE_BYTES
    for one in tensors:
        size = len(one.view)
        for begin in range(0, size, PIECE_BYTES):
            part = one if size <= PIECE_BYTES else one._replace(
                address=one.address + begin, view=one.view[begin : begin + PIECE_BYTES], at=one.at + begin
            )
            if len(part.view) > room or len(piece) == MOST_IN_PIECE:
                yield piece
                piece, room = [], PIECE_BYTES
            piece.append(((one.address, size), part))
            room -= len(part.view)
    if piece:
        yield piece


def _examine_piece(piece: Piece, read: Callable[[Piece], None] | None) -> tuple[list[bytes], float]:
    if read is not None:
        read(piece)
    parts = [part for _, part in piece if part.is_examined]
    bound = max(map(_find_largest, _join(parts)), default=0.0)
    # one by one, as a digest must not depend on the order of tensors in a file
    return [hashlib.sha256(part.view).digest() for part in parts], bound


class _Numbers(NamedTuple):
    """Floats of a dtype, as integers of their bits."""

    dtype: torch.dtype
    bits: np.ndarray


def _join(parts: Sequence[Stored]) -> Iterator[_Numbers]:
    """All floats: tensors that lie side by side in memory are one."""
    first, end = 0, 0
    for i, part in enumerate(parts):
        if (part.address, part.dtype) != (end, parts[first].dtype):
            yield from _view_numbers(parts[first].address, end, parts[first].dtype)
            first = i
        end = part.address + len(part.view)
    if parts:
        yield from _view_numbers(parts[first].address, end, parts[first].dtype)


def _view_numbers(begin: int, end: int, dtype: torch.dtype) -> Iterator[_Numbers]:
    """Those between two addresses; none where there are none, or no floats."""
    if begin < end and dtype in INFINITY:
        yield _Numbers(dtype, view_bytes(begin, end - begin).view(f"i{dtype.itemsize}"))


def _find_largest(numbers: _Numbers) -> float:
    """The largest magnitude, infinite where one is not finite. By numpy: in each of several threads, torch would start
    as many threads as there are cores. By the largest bits of positive numbers and of negative ones, so that no other
    memory is written."""
    bits = numbers.bits
    sign = 1 << (8 * bits.itemsize - 1)
    largest = max(0, int(bits.max()), int(bits.view(f"u{bits.itemsize}").max()) - sign)
    if largest >= INFINITY[numbers.dtype]:
        return inf
    return float(torch.tensor(largest, dtype=BITS[bits.itemsize]).view(numbers.dtype))


class _Named(NamedTuple):
    """A tensor of a part, and its memory."""

    part: AdaptedPart
    name: str
    tensor: torch.Tensor
    span: Span


def check_parts(parts: list[AdaptedPart], known: Contents | None = None) -> str:
    """The SHA-256 of the content of an adapter's parts, in hex, the same for any file that it was read from; sets
    `AdaptedPart.bound`. ``known``: of tensors that were examined when they were read, to which others are added. Raises
    `AdapterError` for a number that is not finite, and for outputs that two parts change.
    """
    ordered = sorted(parts, key=lambda part: (part.module, part.expert, part.part))
    for before, part in pairwise(ordered):  # an empty part, which is all outputs, comes first
        is_same = (before.module, before.expert) == (part.module, part.expert)
        if is_same and before.part in ("", part.part):
            raise AdapterError(f"the adapter changes {part.module} {part.part}".rstrip() + " twice, by different names")
    named = [
        _Named(part, name, own := tensor.contiguous(), (own.data_ptr(), own.nbytes)) for part in ordered
        for name in TENSORS if (tensor := getattr(part, name)) is not None
    ]
    contents = Contents() if known is None else known
    others = {one.span: one.tensor.dtype for one in named if one.span not in contents.digests}
    if others:
        stored = (Stored(span[0], view_bytes(*span).data, dtype) for span, dtype in others.items())
        examine(stored, contents)
    if not isfinite(contents.bound):
        part, name, *_ = next(one for one in named if inf in map(_find_largest, _numbers_of(one)))
        raise AdapterError(
            f"the adapter has numbers that are not finite, in {name} of {part.module} {part.part}".rstrip()
        )
    for part in parts:
        part.bound = contents.bound
    return _digest(named, contents)


def _numbers_of(one: _Named) -> Iterator[_Numbers]:
    address, num_bytes = one.span
    return _view_numbers(address, address + num_bytes, one.tensor.dtype)


def _digest(named: list[_Named], contents: Contents) -> str:
    """Of the digests of pieces, and what they belong to."""
    whole, last = list[bytes](), None
    for part, name, tensor, span in named:
        if part is not last:
            whole.append(repr((part.module, part.part, part.expert, part.scale)).encode())
            last = part
        whole.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole += contents.digests.get(span, [])
    return hashlib.sha256(b"".join(whole)).hexdigest()
