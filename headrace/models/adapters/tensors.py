"""The tensors of an adapter: a safetensors file or its bytes, checked before they are read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch

from headrace.base.errors import AdapterError
from headrace.layers.lora.contract import TENSORS, AdaptedPart
from headrace.layers.lora.parts import align, run_in_threads
from headrace.models.weights.safetensors_file import StoredTensor, read_header, read_packed_header

MAX_HEADER_BYTES = 32 << 20
PIECE_BYTES, MOST_IN_PIECE = 2 << 20, 512
"""Bytes that a thread reads, scans or hashes at a time, and of how many tensors: calls that are long beside those of
Python around them, for which threads would wait for one another."""
BLOCK_BYTES = 16 << 20
"""Bytes of memory that tensors share."""
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Bits of it; those of what is no number are more."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AdapterTensors:
    """The tensors of one file, by name: `place` says which are needed, and `fill` reads these. Not by a mapping, as for
    the model's weights: trainers write adapters anew while a server reads them, and a mapped file that gets shorter
    ends the process."""

    def __init__(self, entries: Iterable[StoredTensor], file: io.FileIO | memoryview):
        self.entries: Mapping[str, StoredTensor] = {entry.name: entry for entry in entries}
        self._file = file
        self._placed: list[tuple[StoredTensor, memoryview]] = []  # and not yet read
        self._block, self._used = torch.empty(0, dtype=torch.uint8), 0

    @classmethod
    def open(cls, path: Path) -> AdapterTensors:
        """Of a file; raises `WeightError`. Close it."""
        entries = read_header(path, most_bytes=MAX_HEADER_BYTES)
        return cls(entries, path.open("rb", buffering=0))

    @classmethod
    def unpack(cls, data: bytes, name: str) -> AdapterTensors:
        """Of a file's bytes, which errors call ``name``; raises `WeightError`."""
        return cls(read_packed_header(data, name, most_bytes=MAX_HEADER_BYTES), memoryview(data))

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
        data = self._allocate(entry.stop - entry.start)
        self._placed.append((entry, np.asarray(data).data))
        tensor = data.view(entry.dtype).view(entry.shape)
        if entry.dtype != torch.float64:
            return tensor
        self.fill()
        return tensor.float()

    def fill(self) -> None:
        """Read what was placed, by several threads; raises `AdapterError` for a file that became shorter."""
        pieces, self._placed = list(self._cut()), []
        run_in_threads(self._fill_piece, pieces)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        # by numpy, which asks for large pages: touching small ones would take as long as reading
        if num_bytes > BLOCK_BYTES // 2:
            return torch.from_numpy(np.empty(num_bytes, np.uint8))
        if self._used + num_bytes > len(self._block):
            self._block, self._used = torch.from_numpy(np.empty(BLOCK_BYTES, np.uint8)), 0
        start = self._used
        self._used += align(num_bytes)
        return self._block[start : start + num_bytes]

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
    """The SHA-256 of the content of an adapter's parts, in hex, the same for any file that it was read from; raises
    `AdapterError` for a number that is not finite, and for outputs that two parts change."""
    ordered = sorted(parts, key=lambda part: (part.module, part.expert, part.part))
    for before, part in pairwise(ordered):  # an empty part, which is all outputs, comes first
        is_same = (before.module, before.expert) == (part.module, part.expert)
        if is_same and before.part in ("", part.part):
            raise AdapterError(f"the adapter changes {part.module} {part.part}".rstrip() + " twice, by different names")
    named = [
        (part, name, tensor.contiguous().view(-1)) for part in ordered for name in TENSORS
        if (tensor := getattr(part, name)) is not None
    ]
    floats = [tensor for *_, tensor in named if tensor.is_floating_point()]
    if not all(run_in_threads(_is_finite, list(_cut_stretches(floats)))):
        part, name, _ = next(found for found in named if found[2].is_floating_point() and not _is_finite(found[2]))
        raise AdapterError(
            f"the adapter has numbers that are not finite, in {name} of {part.module} {part.part}".rstrip()
        )
    return _digest(named)


def _cut_stretches(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same numbers in few pieces: tensors that lie side by side in memory are one."""
    places = sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors) if tensor.numel())
    stretch, size = None, 0
    for address, i in places:
        own = tensors[i]
        is_next = (
            stretch is not None and address == stretch.data_ptr() + size * stretch.element_size()
            and own.dtype == stretch.dtype
            and own.untyped_storage().data_ptr() == stretch.untyped_storage().data_ptr()
        )
        if stretch is not None and not is_next:
            yield from stretch.as_strided((size,), (1,)).split(PIECE_BYTES // stretch.element_size())
        if stretch is None or not is_next:
            stretch, size = own, 0
        size += len(own)
    if stretch is not None:
        yield from stretch.as_strided((size,), (1,)).split(PIECE_BYTES // stretch.element_size())


def _is_finite(tensor: torch.Tensor) -> bool:
    """Of a contiguous tensor [n]. By numpy: in each of several threads, torch would start as many threads as there are
    cores. By the largest bits of positive numbers and of negative ones, so that no other memory is written."""
    size, infinity = tensor.element_size(), INFINITY[tensor.dtype]
    bits = np.asarray(tensor.view(torch.uint8)).view(f"i{size}")
    if not bits.size:
        return True
    sign = 1 << (8 * size - 1)
    return bool(bits.max() < infinity and bits.view(f"u{size}").max() < sign + infinity)


def _digest(named: list[tuple[AdaptedPart, str, torch.Tensor]]) -> str:
    """Of the digests of pieces, each in one tensor, and what they belong to."""
    jobs: list[list[np.ndarray]] = [[]]
    lengths, job_bytes = [], 0
    for *_, tensor in named:
        content = np.asarray(tensor.view(torch.uint8))
        starts = range(0, len(content), PIECE_BYTES)
        for at in starts:
            piece = content[at : at + PIECE_BYTES]
            if jobs[-1] and job_bytes + len(piece) > PIECE_BYTES:
                jobs.append([])
                job_bytes = 0
            jobs[-1].append(piece)
            job_bytes += len(piece)
        lengths.append(len(starts))
    digests = iter([digest for found in run_in_threads(_hash_all, jobs) for digest in found])
    whole, last = hashlib.sha256(), None
    for (part, name, _), length in zip(named, lengths, strict=True):
        if part is not last:
            whole.update(repr((part.module, part.part, part.expert, part.scale)).encode())
            last = part
        tensor = getattr(part, name)
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(b"".join(islice(digests, length)))
    return whole.hexdigest()


def _hash_all(pieces: list[np.ndarray]) -> list[bytes]:
    return [hashlib.sha256(piece.data).digest() for piece in pieces]
