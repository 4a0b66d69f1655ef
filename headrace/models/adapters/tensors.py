"""The tensors of an adapter: a safetensors file or its bytes, checked before they are read."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from headrace.base.errors import AdapterError
from headrace.layers.lora.memory import AdapterMemory
from headrace.models.adapters.contents import Contents, Piece, Stored, examine
from headrace.models.weights.safetensors_file import StoredTensor, read_header, read_packed_header

MAX_HEADER_BYTES = 32 << 20
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AdapterTensors:
    """The tensors of one file, by name: `place` says which are needed, and `fill` reads these. Not by a mapping, as for
    the model's weights: trainers write adapters anew while a server reads them, and a mapped file that gets shorter
    ends the process. ``contents``: what is known of those that were read."""

    def __init__(self, entries: Iterable[StoredTensor], file: io.FileIO | memoryview, memory: AdapterMemory | None):
        self.entries: Mapping[str, StoredTensor] = {entry.name: entry for entry in entries}
        self.contents = Contents()
        self._file, self._memory = file, memory or AdapterMemory()
        self._placed: list[Stored] = []  # and not yet read

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

    def place(self, name: str, shape: tuple[int, ...], *, is_examined: bool = True) -> torch.Tensor:
        """Memory for a copy of a tensor that must have this shape, in its own dtype (float32 for float64), which `fill`
        writes; raises `AdapterError`. ``is_examined``: it is a part's as it is, and `contents` are to tell of it."""
        entry = self.entries[name]
        if entry.shape != shape:
            raise AdapterError(f"{name} has shape {list(entry.shape)}, the model needs {list(shape)}")
        dtype, num_bytes = entry.dtype, entry.stop - entry.start
        if dtype not in FLOATS:
            raise AdapterError(
                f"{name} is {str(dtype).removeprefix('torch.')}; save the adapter in float32, bfloat16 or float16"
            )
        place, is_converted = self._memory.allocate(num_bytes), dtype == torch.float64
        address, view = self._memory.view_bytes(place, num_bytes)
        self._placed.append(Stored(address, view, dtype, entry.start, is_examined and not is_converted))
        tensor = self._memory.view(place, dtype, shape)
        if not is_converted:
            return tensor
        self.fill()
        return tensor.float()

    def fill(self) -> None:
        """Read what was placed, by several threads; raises `AdapterError` for a file that became shorter."""
        placed, self._placed = sorted(self._placed, key=lambda one: one.at), []
        examine(placed, self.contents, self._read)

    def _read(self, piece: Piece) -> None:
        """Read a piece, by one call for what lies side by side in the file."""
        views, begin, end = list[memoryview](), 0, 0
        for _, part in piece:
            if part.at != end:
                self._read_run(begin, views)
                views, begin = [], part.at
            views.append(part.view)
            end = part.at + len(part.view)
        self._read_run(begin, views)

    def _read_run(self, at: int, views: list[memoryview]) -> None:
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
