"""The tensors of an adapter: a safetensors file or its bytes, checked before they are read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from headrace.base.errors import AdapterError
from headrace.layers.lora.contract import TENSORS, AdaptedPart
from headrace.layers.lora.memory import AdapterMemory, view_bytes
from headrace.layers.lora.parts import run_in_threads
from headrace.models.weights.safetensors_file import StoredTensor, read_header, read_packed_header

MAX_HEADER_BYTES = 32 << 20
PIECE_BYTES, MOST_IN_PIECE = 2 << 20, 512
"""Bytes that a thread reads, scans or hashes at a time, and of how many tensors: calls that are long beside those of
Python around them, for which threads would wait for one another."""
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Bits of it; those of what is no number are more."""
BITS = {2: torch.int16, 4: torch.int32}
"""Integers of so many bytes."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AdapterTensors:
    """The tensors of one file, by name: `place` says which are needed, and `fill` reads these. Not by a mapping, as for
    the model's weights: trainers write adapters anew while a server reads them, and a mapped file that gets shorter
    ends the process."""

    def __init__(self, entries: Iterable[StoredTensor], file: io.FileIO | memoryview, memory: AdapterMemory | None):
        self.entries: Mapping[str, StoredTensor] = {entry.name: entry for entry in entries}
        self._file, self._memory = file, memory or AdapterMemory()
        self._placed: list[tuple[StoredTensor, memoryview]] = []  # and not yet read

    @classmethod
    def open(cls, path: Path, memory: AdapterMemory | None = None) -> AdapterTensors:
        """Of a file, into this memory; raises `WeightError`. Close it."""
        entries = read_header(path, most_bytes=MAX_HEADER_BYTES)
        return cls(entries, path.open("rb", buffering=0), memory)

    @classmethod
    def unpack(cls, data: bytes, name: str, memory: AdapterMemory | None = None) -> AdapterTensors:
        """Of a file's bytes, which errors call ``name``; raises `WeightError`."""
        return cls(read_packed_header(data, name, most_bytes=MAX_HEADER_BYTES), memoryview(data), memory)

    def close(self) -> None:
        """Close the file."""
        if isinstance(self._file, io.FileIO):
            self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.entries[name].shape

    def place(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for a copy of a tensor that must have this shape, in its own dtype (float32 for float64), which `fill`
        writes; raises `AdapterError`."""
        entry = self.entries[name]
        if entry.shape != shape:
            raise AdapterError(f"{name} has shape {list(entry.shape)}, the model needs {list(shape)}")
        if entry.dtype not in FLOATS:
            raise AdapterError(
                f"{name} is {str(entry.dtype).removeprefix('torch.')}; save the adapter in float32, bfloat16 or float16"
            )
        num_bytes = entry.stop - entry.start
        tensor = self._memory.view(self._memory.allocate(num_bytes), entry.dtype, shape, num_bytes)
        self._placed.append((entry, view_bytes(tensor.data_ptr(), num_bytes).data))
        if entry.dtype != torch.float64:
            return tensor
        self.fill()
        return tensor.float()

    def fill(self) -> None:
        """Read what was placed, by several threads; raises `AdapterError` for a file that became shorter."""
        pieces, self._placed = list(self._cut()), []
        run_in_threads(self._fill_piece, pieces)

    def _cut(self) -> Iterator[tuple[int, list[memoryview]]]:
        """Where pieces begin in the file, and the memory of each, in order."""
        begin, end, views = 0, 0, list[memoryview]()
        for entry, memory in sorted(self._placed, key=lambda placed: placed[0].start):
            for at in range(0, len(memory), PIECE_BYTES):
                view = memory[at : at + PIECE_BYTES]
                is_next = entry.start + at == end and end + len(view) - begin <= PIECE_BYTES
                if views and not (is_next and len(views) < MOST_IN_PIECE):
                    yield begin, views
                    views = []
                if not views:
                    begin = end = entry.start + at
                views.append(view)
                end += len(view)
        if views:
            yield begin, views

    def _fill_piece(self, piece: tuple[int, list[memoryview]]) -> None:
        at, views = piece
        if isinstance(self._file, memoryview):
            for view in views:
                np.copyto(np.asarray(view), np.asarray(self._file[at : at + len(view)]))
                at += len(view)
            return
        while views:
            count = os.preadv(self._file.fileno(), views, at)
            if not count:
                raise AdapterError("the file became shorter while it was read; load the adapter again")
            at += count
            while views and count >= len(views[0]):
                count -= len(views[0])
                views = views[1:]
            if count:
                views = [views[0][count:], *views[1:]]


def check_parts(parts: list[AdaptedPart]) -> str:
    """The SHA-256 of the content of an adapter's parts, in hex, the same for any file that it was read from; sets
    `AdaptedPart.bound`. Raises `AdapterError` for a number that is not finite, and for outputs that two parts change.
    """
    ordered = sorted(parts, key=lambda part: (part.module, part.expert, part.part))
    for before, part in pairwise(ordered):  # an empty part, which is all outputs, comes first
        is_same = (before.module, before.expert) == (part.module, part.expert)
        if is_same and before.part in ("", part.part):
            raise AdapterError(f"the adapter changes {part.module} {part.part}".rstrip() + " twice, by different names")
    named = [
        _Named(part, name, own := tensor.contiguous(), own.data_ptr(), own.nbytes) for part in ordered
        for name in TENSORS if (tensor := getattr(part, name)) is not None
    ]
    bound = max(run_in_threads(_find_largest, list(_cut_stretches(named))), default=0.0)
    if not isfinite(bound):
        part, name, *_ = next(one for one in named if inf in map(_find_largest, _cut_stretches([one])))
        raise AdapterError(
            f"the adapter has numbers that are not finite, in {name} of {part.module} {part.part}".rstrip()
        )
    for part in parts:
        part.bound = bound
    return _digest(named)


class _Named(NamedTuple):
    """A tensor of a part, and its memory."""

    part: AdaptedPart
    name: str
    tensor: torch.Tensor
    address: int
    num_bytes: int


class _Numbers(NamedTuple):
    """Floats of a dtype, as integers of their bits."""

    dtype: torch.dtype
    bits: np.ndarray


def _cut_stretches(named: list[_Named]) -> Iterator[_Numbers]:
    """All floats in few pieces: tensors that lie side by side in memory are one."""
    ordered = sorted((one.address, one.num_bytes, one.tensor.dtype) for one in named if one.tensor.dtype in INFINITY)
    begin, end, dtype = 0, 0, torch.float32
    for address, num_bytes, own in [*ordered, (-1, 0, dtype)]:
        if (address, own) != (end, dtype):
            for at in range(begin, end, PIECE_BYTES):
                content = view_bytes(at, min(PIECE_BYTES, end - at))
                yield _Numbers(dtype, content.view(f"i{dtype.itemsize}"))
            begin, dtype = address, own
        end = address + num_bytes


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


def _digest(named: list[_Named]) -> str:
    """Of the digests of pieces, each in one tensor, and what they belong to."""
    jobs: list[list[memoryview]] = [[]]
    lengths, job_bytes = [], 0
    for *_, address, num_bytes in named:
        starts = range(0, num_bytes, PIECE_BYTES)
        for at in starts:
            size = min(PIECE_BYTES, num_bytes - at)
            if jobs[-1] and job_bytes + size > PIECE_BYTES:
                jobs.append([])
                job_bytes = 0
            jobs[-1].append(view_bytes(address + at, size).data)
            job_bytes += size
        lengths.append(len(starts))
    digests = iter([digest for found in run_in_threads(_hash_all, jobs) for digest in found])
    whole, last = hashlib.sha256(), None
    for (part, name, *_), length in zip(named, lengths, strict=True):
        if part is not last:
            whole.update(repr((part.module, part.part, part.expert, part.scale)).encode())
            last = part
        tensor = getattr(part, name)
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(b"".join(islice(digests, length)))
    return whole.hexdigest()


def _hash_all(pieces: list[memoryview]) -> list[bytes]:
    return [hashlib.sha256(piece).digest() for piece in pieces]
