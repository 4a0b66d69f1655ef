"""The tensors of an adapter: a safetensors file or its bytes, checked before they are read. T tensors."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from headrace.base.errors import AdapterError
from headrace.layers.lora.contract import AdaptedPart
from headrace.models.weights.safetensors_file import StoredTensor, read_header, read_packed_header

MAX_HEADER_BYTES = 32 << 20
MAX_THREADS = 8
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Bits of it; those of what is no number are more."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AdapterTensors:
    """The tensors of one file, by name. ``read`` copies one, on any thread. Not by a mapping, as for the model's
    weights: trainers write adapters anew while a server reads them, and a mapped file that gets shorter ends the
    process."""

    def __init__(self, entries: Iterable[StoredTensor], file: io.FileIO | memoryview):
        self.entries: Mapping[str, StoredTensor] = {entry.name: entry for entry in entries}
        self._file = file

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

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of a tensor that must have this shape, in its own dtype; raises `AdapterError`."""
        entry = self.entries[name]
        if entry.shape != shape:
            raise AdapterError(f"{name} has shape {list(entry.shape)}, the model needs {list(shape)}")
        if entry.dtype not in FLOATS:
            raise AdapterError(
                f"{name} is {str(entry.dtype).removeprefix('torch.')}; save the adapter in float32, bfloat16 or float16"
            )
        data = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
        self._fill(np.asarray(data).data, entry)
        tensor = data.view(entry.dtype).view(entry.shape)
        return tensor.float() if entry.dtype == torch.float64 else tensor

    def _fill(self, rest: memoryview, entry: StoredTensor) -> None:
        if isinstance(self._file, memoryview):
            rest[:] = self._file[entry.start : entry.stop]
            return
        at = entry.start
        while rest:
            count = os.preadv(self._file.fileno(), [rest], at)
            if not count:
                raise AdapterError(f"the file became shorter while {entry.name} was read; load the adapter again")
            rest, at = rest[count:], at + count


def start_threads() -> ThreadPoolExecutor:
    """As many as read, scan and hash faster than fewer; all of these let other threads run."""
    return ThreadPoolExecutor(max(1, min(MAX_THREADS, torch.get_num_threads())), "adapter-part")


def check_parts(parts: list[AdaptedPart]) -> str:
    """The SHA-256 of the content of an adapter's parts, in hex; raises `AdapterError` for a number that is not finite,
    and for outputs that two parts change."""
    ordered = sorted(parts, key=lambda part: (part.module, part.expert, part.part))
    for before, part in pairwise(ordered):  # an empty part, which is all outputs, comes first
        is_same = (before.module, before.expert) == (part.module, part.expert)
        if is_same and before.part in ("", part.part):
            raise AdapterError(f"the adapter changes {part.module} {part.part}".rstrip() + " twice, by different names")
    with start_threads() as threads:
        digests = list(threads.map(_digest_part, ordered))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_part(part: AdaptedPart) -> bytes:
    digest = hashlib.sha256(repr((part.module, part.part, part.expert, part.scale)).encode())
    named = {
        "a": part.a, "b": part.b, "magnitude": part.magnitude, "bias": part.bias, "weight": part.weight,
        "token_ids": part.token_ids, "token_rows": part.token_rows,
    }
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise AdapterError(
                f"the adapter has numbers that are not finite, in {name} of {part.module} {part.part}".rstrip()
            )
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _is_finite(tensor: torch.Tensor) -> bool:
    """By numpy: in each of several threads, torch would start as many threads as there are cores. By the largest bits
    of positive numbers and of negative ones, so that no other memory is written."""
    size, infinity = tensor.element_size(), INFINITY[tensor.dtype]
    bits = np.asarray(tensor.contiguous().flatten().view(torch.uint8)).view(f"i{size}")
    if not bits.size:
        return True
    sign = 1 << (8 * size - 1)
    return bool(bits.max() < infinity and bits.view(f"u{size}").max() < sign + infinity)
