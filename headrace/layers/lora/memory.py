"""`AdapterMemory`: where the tensors of one adapter lie on the host. `view_bytes`: memory of the host for numpy."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT, BLOCK_BYTES = 64, 16 << 20
"""Bytes: of which tensors begin at multiples, and of memory that they share."""


class Place(NamedTuple):
    """A piece of memory by its number, and a byte in it."""

    piece: int
    begin: int


def take_plain(num_bytes: int) -> torch.Tensor:
    """Memory [num_bytes] uint8; by numpy, which asks for large pages: touching small ones takes as long as reading."""
    return torch.from_numpy(np.empty(num_bytes, np.uint8))


def view_bytes(address: int, num_bytes: int) -> np.ndarray:
    """Memory of the host [num_bytes] uint8, which the caller keeps: for hundreds of tensors, in a third of the time
    that torch takes for it."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


class AdapterMemory:
    """Pieces of memory that many tensors share. ``take`` returns one of so many bytes; ``piece_bytes``: of each, unless
    a tensor is larger. Pieces are filled in the order of calls. For one thread."""

    def __init__(self, take: Callable[[int], torch.Tensor] = take_plain, piece_bytes: int = BLOCK_BYTES):
        self.pieces: list[torch.Tensor] = []
        self.used: list[int] = []
        """Bytes of each piece."""
        self._take, self._piece_bytes = take, piece_bytes
        self._addresses: list[int] = []  # where pieces begin, in order
        self._numbers: list[int] = []  # and which they are
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # pieces as numbers
        self._bytes: list[tuple[int, memoryview]] = []  # where each piece begins, and itself

    def allocate(self, num_bytes: int) -> Place:
        """Memory of the caller's own."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        found = len(self.pieces) - 1
        if found < 0 or self.used[found] + size > len(self._bytes[found][1]):
            found = self._add(max(size, self._piece_bytes))
        begin = self.used[found]
        self.used[found] += size
        return Place(found, begin)

    def view(self, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor that begins there."""
        typed = self._typed.get((place.piece, dtype))
        if typed is None:
            typed = self._typed[place.piece, dtype] = self.pieces[place.piece].view(dtype)
        strides = (shape[1], 1) if len(shape) == 2 else [prod(shape[i + 1 :]) for i in range(len(shape))]
        return typed.as_strided(shape, strides, place.begin // dtype.itemsize)  # one call of torch, not two

    def view_bytes(self, place: Place, num_bytes: int) -> tuple[int, memoryview]:
        """The address of so many bytes that begin there, and themselves."""
        address, piece = self._bytes[place.piece]
        return address + place.begin, piece[place.begin : place.begin + num_bytes]

    def keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Place]:
        """A tensor, or a copy of it in this memory where it lies elsewhere, and where it begins."""
        found = self.locate(tensor.data_ptr())
        if found is not None:
            return tensor, found
        place = self.allocate(tensor.nbytes)
        return self.view(place, tensor.dtype, tuple(tensor.shape)).copy_(tensor), place

    def locate(self, address: int) -> Place | None:
        """Where an address is; None for one that is elsewhere."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        begin, number = address - self._addresses[at], self._numbers[at]
        return Place(number, begin) if begin < self.used[number] else None

    def _add(self, num_bytes: int) -> int:
        piece = self._take(num_bytes)
        self.pieces.append(piece)
        self.used.append(0)
        self._bytes.append((piece.data_ptr(), view_bytes(piece.data_ptr(), len(piece)).data))
        at = bisect_right(self._addresses, piece.data_ptr())
        self._addresses.insert(at, piece.data_ptr())
        self._numbers.insert(at, len(self.pieces) - 1)
        return len(self.pieces) - 1
