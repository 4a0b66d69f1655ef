"""Reads safetensors files without a copy. The header is checked before any tensor is made from it.

Layout (https://huggingface.co/docs/safetensors): u64 header length, JSON header, then the tensors' bytes. Not the
library's reader: loading is equally fast, and errors here name the file, the tensor and what is wrong with it.
"""

from __future__ import annotations

import io
import json
import logging
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import torch

from headrace.base.errors import WeightError
from headrace.models.weights.files import map_file, require_content, view_bytes

MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
MAX_DIMS = 32

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}

_log = logging.getLogger(__name__)


class StoredTensor(NamedTuple):
    """One header entry; the tensor is bytes ``[start, stop)`` of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path, *, most_bytes: int = MAX_HEADER_BYTES) -> list[StoredTensor]:
    """Every tensor of a safetensors file, in file order; raises `WeightError` for an invalid header, or one of more
    than ``most_bytes``."""
    require_content(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _read_entries(path, file, size, most_bytes)
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error


def read_packed_header(data: bytes, name: str, *, most_bytes: int = MAX_HEADER_BYTES) -> list[StoredTensor]:
    """The same of a file's content; errors call it ``name``."""
    return _read_entries(Path(name), io.BytesIO(data), len(data), most_bytes)


def _read_entries(path: Path, file: IO[bytes], size: int, most_bytes: int) -> list[StoredTensor]:
    length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
    if not 0 < length <= min(size - 8, most_bytes):
        raise WeightError(
            f"{path} is truncated or no safetensors file: {size} bytes, header of {length}; fetch it again"
        )
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path} has a corrupt safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise WeightError(f"{path} has a corrupt safetensors header: it is no JSON object")
    entries = [
        _read_entry(path, name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_cover(path, entries, 8 + length, size)
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ; of equal keys Python would keep the last, other readers the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in made if names.count(name) > 1)
        raise ValueError(f"the key {repeated[:200]!r} is there twice")
    return made


def _check_cover(path: Path, entries: list[StoredTensor], start: int, size: int) -> None:
    """Raise `WeightError` unless the tensors, sorted by offset, cover bytes ``[start, size)`` once each, as the format
    demands: shared bytes are a wrong offset, and so are bytes that no tensor has."""
    owner = None
    for entry in entries:
        if entry.start < start and owner is not None:
            raise WeightError(
                f"{path} is corrupt: tensors {owner.name!r} and {entry.name!r} overlap, at bytes {entry.start} to "
                f"{min(start, entry.stop)}; save the weights again"
            )
        if entry.start > start:
            raise WeightError(
                f"{path} is corrupt: bytes {start} to {entry.start}, before tensor {entry.name!r}, belong to no "
                "tensor; save the weights again"
            )
        owner, start = entry, entry.stop
    if start < size:
        raise WeightError(
            f"{path} is corrupt: its last {size - start} bytes belong to no tensor; fetch it again"
        )


def _read_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    def corrupt(what: str) -> WeightError:
        return WeightError(f"{path} is truncated or corrupt: tensor {name!r} {what}; fetch it again")

    if not isinstance(entry, dict):
        raise corrupt("has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise corrupt(f"has dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    # dims beside a zero are checked too: their product must fit torch's int64 strides
    if not _is_sizes(shape) or len(shape) > MAX_DIMS or math.prod(filter(None, shape)) >= 1 << 62:
        raise corrupt(f"has shape {str(shape)[:200]}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise corrupt(f"has data_offsets {str(offsets)[:200]}")
    start, stop = data_start + offsets[0], data_start + offsets[1]
    if start > stop or stop > size:
        raise corrupt(f"lies at bytes {start} to {stop} of a file of {size}")
    if stop - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise corrupt(f"of {dtype} {shape} is said to have {stop - start} bytes")
    return StoredTensor(name, _DTYPES[dtype], tuple(shape), start, stop)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    # bool is no size; an adapter has hundreds
    return isinstance(value, list) and {*map(type, value)} <= {int} and min(value, default=0) >= 0


def read_safetensors(paths: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of all files, each a view of the memory-mapped file in the stored dtype (a copy if the
    file does not align it).

    All headers are checked before the first tensor is yielded; a name that an earlier file had is skipped with a
    warning. Raises `WeightError`.
    """
    seen: set[str] = set()
    headers = [(path, read_header(path)) for path in paths]
    for path, tensors in headers:
        if not tensors:
            continue
        data = map_file(path)
        for tensor in tensors:
            if tensor.name in seen:
                _log.warning("%s holds %s again; the first one is used", path.name, tensor.name)
                continue
            seen.add(tensor.name)
            yield tensor.name, view_tensor(data, tensor)


def view_tensor(data: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """A tensor of a file whose bytes are ``data`` (uint8)."""
    raw = view_bytes(data, tensor.start, tensor.stop - tensor.start, tensor.dtype.itemsize)
    return raw.view(tensor.dtype).view(tensor.shape)


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors as the bytes of a safetensors file; raises `WeightError` for what is no tensor, or of a dtype that the
    format does not have."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    parts, at = [], 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in names:
            raise WeightError(f"{name!r} must be a tensor of a dtype of safetensors, got {str(type(tensor))[:80]}")
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]
        }
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return b"".join((struct.pack("<Q", len(text)), text, *parts))
