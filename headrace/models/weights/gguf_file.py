"""Reads the header of a GGUF file: metadata, and the offset of each tensor. Fast on large vocabularies.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and offset is checked against the file
size before use. Refuses big-endian files and GGUF version 1. The HTTP process imports it: no torch, no numpy.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.errors import WeightError
from headrace.models.weights.files import require_content

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Bounds on what a corrupt or hostile file can make the reader do; 4 dimensions and 65535 bytes are the format's own.
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_ARRAY_DEPTH = 4
MAX_CONSTANT_SIZE = 65536
DEFAULT_ALIGNMENT = 32

CONSTANT_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are configuration (divisors of the rotary frequencies), not weights."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_BOOL = "?"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: _BOOL, 10: "Q", 11: "q", 12: "d"}
"""Value type to the format letter of `struct`, which is also that of `array` (except bool)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's header entry. ``shape`` is row-major (the file's dimensions reversed), ``type_id`` a ggml type
    number, ``offset`` in bytes from the start of ``path``."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    path: Path
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """A parsed header. ``metadata`` has scalars and strings as Python values, arrays of strings as lists of str, arrays
    of numbers as `array.array`; ``tensors`` are in file order; ``file_bytes`` is the size of the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    file_bytes: int


def read_gguf_metadata(path: Path | str) -> dict[str, Any]:
    """The key-value pairs of a GGUF file, or of its first part; raises `WeightError` when they are not valid."""
    return _read(Path(path), _Reader.read_metadata)


def read_gguf_header(path: Path | str, *, most_bytes: int | None = None) -> GgufHeader:
    """Parse one GGUF file's header; raises `WeightError` (with the byte offset) when it is truncated or corrupt.
    ``most_bytes``: read so much of the file in place of mapping it, which ends the process if it gets shorter
    meanwhile."""
    return _read(Path(path), _Reader.read, most_bytes)


def _read(path: Path, read: Callable[[_Reader], T], most_bytes: int | None = None) -> T:
    require_content(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:  # magic and version, 4 bytes each; two counts of 8
                raise WeightError(f"{path} is not a GGUF file: it has {size} bytes")
            if most_bytes is not None:
                file.seek(0)
                return read(_Reader(path, file.read(most_bytes), size))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return read(_Reader(path, data, size))
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error


def read_floats(tensor: GgufTensor) -> list[float]:
    """The values of a small float32 or float16 tensor, in file order; raises `WeightError` for any other type."""
    letter = {0: "f", 1: "e"}.get(tensor.type_id)
    count = math.prod(tensor.shape)
    if letter is None or count > MAX_CONSTANT_SIZE:
        raise WeightError(
            f"{tensor.path}: {tensor.name} should be a small float tensor; it has type {tensor.type_id}, shape "
            f"{tensor.shape}"
        )
    layout = struct.Struct(f"<{count}{letter}")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(layout.size)
    if len(data) < layout.size:
        raise WeightError(f"{tensor.path} is truncated inside {tensor.name}; fetch the file again")
    return list(layout.unpack(data))


def _as_written(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05 was written, not 9.999999747378752e-06."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((f for f in shorter if struct.pack("<f", f) == struct.pack("<f", value)), value)


class _Reader:
    """A cursor over the mapped file, or over its first bytes. Every ``read_*`` method advances it."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, file_bytes: int):
        self._path, self._data, self._size, self._at = path, data, len(data), 0
        self._file_bytes = file_bytes

    def read(self) -> GgufHeader:
        num_tensors, num_keys = self._read_start()
        metadata = self._read_pairs(num_keys)
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        start = self._data_start(metadata)
        tensors = tuple(
            GgufTensor(name, shape, type_id, self._path, start + offset) for name, shape, type_id, offset in infos
        )
        self._check_tensors(tensors)
        return GgufHeader(self._path, metadata, tensors, self._file_bytes)

    def read_metadata(self) -> dict[str, Any]:
        return self._read_pairs(self._read_start()[1])

    def _read_start(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata keys."""
        magic, version = self._data[:4], _U32.unpack_from(self._data, 4)[0]
        if magic != MAGIC:
            raise WeightError(f"{self._path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        if version not in VERSIONS:
            # a small version read with the wrong byte order has its low half zero
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise WeightError(
                f"{self._path} is a {what} GGUF file; readable: little-endian, versions {VERSIONS}; convert it again"
            )
        self._at = 8
        # least bytes of an entry: a tensor's name length 8, dims 4, type 4, offset 8; a key's length 8, type 4, value 1
        return self._read_count("tensor count", 24), self._read_count("metadata count", 13)

    def _read_pairs(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_string("metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} appears twice")
            metadata[key] = self._read_value(key, self._read_u32(), 0)
        return metadata

    def _corrupt(self, what: str) -> WeightError:
        return WeightError(f"{self._path} is truncated or corrupt at byte {self._at}: {what}; fetch the file again")

    def _advance(self, num_bytes: int, what: str) -> int:
        """Skip ``num_bytes`` and return where they start; the one bounds check of all reads but strings in arrays."""
        start = self._at
        if num_bytes > self._size - start:
            raise self._corrupt(f"{what} needs {num_bytes} bytes, {self._size - start} are left")
        self._at = start + num_bytes
        return start

    def _read_u32(self) -> int:
        return _U32.unpack_from(self._data, self._advance(4, "a number"))[0]

    def _read_u64(self) -> int:
        return _U64.unpack_from(self._data, self._advance(8, "a number"))[0]

    def _read_count(self, what: str, min_bytes_each: int) -> int:
        """A count of things of at least that size; refused if they cannot fit, before a loop or buffer is sized by it.
        """
        count = self._read_u64()
        if count * min_bytes_each > self._size - self._at:
            raise self._corrupt(f"{what} {count} cannot fit the file")
        return count

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8") from error

    def _read_string(self, what: str, max_bytes: int | None = None) -> str:
        length = self._read_u64()
        if max_bytes is not None and length > max_bytes:
            raise self._corrupt(f"{what} of {length} bytes is longer than {max_bytes}")
        start = self._advance(length, what)
        return self._decode(self._data[start : start + length], what)

    def _read_value(self, key: str, type_id: int, depth: int) -> Any:
        if type_id == _STRING:
            return self._read_string(key)
        if type_id == _ARRAY:
            return self._read_array(key, depth)
        layout = struct.Struct("<" + self._letter(key, type_id))
        value = layout.unpack_from(self._data, self._advance(layout.size, key))[0]
        return _as_written(value) if type_id == _FLOAT32 else value

    def _letter(self, key: str, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise self._corrupt(f"{key} has unknown value type {type_id}")
        return _SCALARS[type_id]

    def _read_array(self, key: str, depth: int) -> Any:
        type_id = self._read_u32()
        if type_id == _STRING:
            return self._read_strings(key, self._read_count(key, 8))
        if type_id == _ARRAY:
            if depth >= MAX_ARRAY_DEPTH:
                raise self._corrupt(f"{key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
            # an inner array has at least a type, 4 bytes, and a count, 8
            return [self._read_array(key, depth + 1) for _ in range(self._read_count(key, 12))]
        letter = self._letter(key, type_id)
        item_bytes = struct.calcsize("<" + letter)
        count = self._read_count(key, item_bytes)
        start = self._advance(count * item_bytes, key)
        values = array("B" if letter == _BOOL else letter, self._data[start : self._at])
        if sys.byteorder == "big":
            values.byteswap()
        return [bool(value) for value in values] if letter == _BOOL else values

    def _read_strings(self, key: str, count: int) -> list[str]:
        # the hot loop: vocabularies have 10^5 strings; one bounds check per string, on local names
        data, at, size, unpack = self._data, self._at, self._size, _U64.unpack_from
        raw: list[bytes] = []
        append = raw.append
        for _ in range(count):
            end = at + 8
            if end > size or (stop := end + unpack(data, at)[0]) > size:
                self._at = at
                raise self._corrupt(f"{key} runs past the end of the file")
            append(data[end:stop])
            at = stop
        self._at = at
        try:
            return [item.decode() for item in raw]
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{key} is not UTF-8") from error

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._read_string("tensor name", MAX_KEY_BYTES)
        num_dims = self._read_u32()
        if num_dims > MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions, at most {MAX_DIMS} are possible")
        dims = [self._read_u64() for _ in range(num_dims)]
        type_id, offset = self._read_u32(), self._read_u64()
        return name, tuple(reversed(dims)), type_id, offset  # ggml stores the fastest dimension first

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        return -(-self._at // alignment) * alignment  # tensor data starts at the next multiple after the header

    def _check_tensors(self, tensors: tuple[GgufTensor, ...]) -> None:
        """Check that names are unique and each tensor starts inside the file. Its end is checked in `gguf_tensors`,
        which knows the sizes of ggml types."""
        seen: set[str] = set()
        for tensor in tensors:
            if tensor.name in seen:
                raise self._corrupt(f"tensor {tensor.name!r} appears twice")
            seen.add(tensor.name)
            if tensor.offset >= self._file_bytes and 0 not in tensor.shape:
                raise self._corrupt(
                    f"tensor {tensor.name!r} starts at byte {tensor.offset} of a file of {self._file_bytes}"
                )
