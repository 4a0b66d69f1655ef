"""GGUF tensors as torch tensors: plain types are views of the mapped file, quantised ones are dequantised or yielded as
`BlockTensor`. Layers, not this module, decide whether they keep blocks.

B blocks of 32 values. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The commonest types are
dequantised here, with the same results as the gguf package, which dequantises the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.base.errors import WeightError
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, WeightBlocks
from headrace.layers.quantization.blocks import BlockTensor
from headrace.models.weights.ahead import map_ahead
from headrace.models.weights.files import map_file, view_bytes
from headrace.models.weights.gguf_file import GgufTensor
from headrace.models.weights.gguf_naming import NamedTensor
from headrace.parallel.cut import Cut
from headrace.parallel.share import Share

CHUNK_ELEMENTS = 1 << 17
"""Values dequantised at a time, so that temporaries stay in the CPU's cache."""

AHEAD_BYTES = 64 << 20
MAX_ITEM_BYTES = 8  # of one element of the widest plain type; the alignment asked of every tensor
BLOCK = 32

PLAIN_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}


def holds_blocks(tensors: Sequence[GgufTensor]) -> bool:
    """Whether some are of a type that `read_tensors` can yield as `BlockTensor`."""
    if not tensors:
        return False
    from gguf.constants import GGMLQuantizationType  # as in `_ggml_type`

    types = {kind.value for kind in GGMLQuantizationType if kind.name in BLOCK_TYPES}
    return any(tensor.type_id in types for tensor in tensors)


def read_tensors(
    tensors: Sequence[NamedTensor], *, dtype: torch.dtype | None, threads: int, keeps_blocks: bool = False,
    find_cut: Callable[[str], Cut | None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` on the CPU: plain types as stored, quantised matrices in ``dtype`` (None: float32),
    quantised vectors in float32. With ``keeps_blocks``, matrices of types that packed layout supports are
    `BlockTensor`. ``find_cut`` says what is needed of the tensor of a name: of matrices that are no `BlockTensor`
    only that is read, and yielded.

    All bounds are checked before the first tensor is read; raises `WeightError`.
    """
    files = {path: map_file(path) for path in {tensor.stored.path for tensor in tensors}}
    ends = {path: data.numel() for path, data in files.items()}
    sizes = [_check_bounds(tensor.stored, ends[tensor.stored.path]) for tensor in tensors]
    wanted = dtype or torch.float32

    def read(item: tuple[NamedTensor, int]) -> tuple[str, torch.Tensor]:
        tensor, num_bytes = item
        raw = view_bytes(files[tensor.stored.path], tensor.stored.offset, num_bytes, MAX_ITEM_BYTES)
        cut = None if find_cut is None else find_cut(tensor.name)
        return tensor.name, _read_one(tensor, raw, wanted, keeps_blocks=keeps_blocks, cut=cut)

    # an estimate, as if every tensor were dequantised; plain ones are mostly views
    def cost(item: tuple[NamedTensor, int]) -> int:
        return math.prod(item[0].stored.shape) * wanted.itemsize

    yield from map_ahead(read, zip(tensors, sizes, strict=True), cost=cost, budget=AHEAD_BYTES, threads=threads)


def read_copies(
    tensors: Sequence[NamedTensor], path: Path, *, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, of one file that is read and not mapped: others may write it meanwhile. Every tensor owns its
    memory."""
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        for tensor in tensors:
            data = bytearray(_check_bounds(tensor.stored, size))
            file.seek(tensor.stored.offset)
            rest = memoryview(data)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise WeightError(f"{path} became shorter while {tensor.name} was read; read it again")
                rest = rest[count:]
            raw = torch.frombuffer(data, dtype=torch.uint8)
            yield tensor.name, _read_one(tensor, raw, dtype, keeps_blocks=False, cut=None)


def is_mostly_blocks(tensors: Sequence[GgufTensor]) -> bool:
    """Whether most numbers of a file are in quantised blocks."""
    sizes = {True: 0, False: 0}
    for tensor in tensors:
        sizes[_ggml_type(tensor).name in PLAIN_TYPES] += math.prod(tensor.shape)
    return sizes[False] > sizes[True]


def _ggml_type(tensor: GgufTensor) -> Any:
    from gguf.constants import GGMLQuantizationType  # 0.1 s to import, and only GGUF files need it

    try:
        return GGMLQuantizationType(tensor.type_id)
    except ValueError as error:
        raise WeightError(
            f"GGUF tensor {tensor.name} in {tensor.path} has type {tensor.type_id}, unknown to the gguf package; "
            "upgrade it"
        ) from error


def _check_bounds(tensor: GgufTensor, file_bytes: int) -> int:
    """The tensor's size in bytes; raises `WeightError` when it exceeds the file."""
    from gguf.constants import GGML_QUANT_SIZES

    kind = _ggml_type(tensor)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_len = tensor.shape[-1] if tensor.shape else 1
    if row_len % block:
        raise WeightError(
            f"GGUF tensor {tensor.name} in {tensor.path} has rows of {row_len}, not a multiple of {kind.name}'s {block}"
        )
    num_bytes = math.prod(tensor.shape) // block * block_bytes
    if tensor.offset + num_bytes > file_bytes:
        raise WeightError(
            f"{tensor.path} is truncated: tensor {tensor.name} needs bytes {tensor.offset} to "
            f"{tensor.offset + num_bytes}, the file has {file_bytes}; fetch it again"
        )
    return num_bytes


def _read_one(
    tensor: NamedTensor, stored: torch.Tensor, dtype: torch.dtype, *, keeps_blocks: bool = False,
    cut: Cut | None = None
) -> torch.Tensor:
    """The tensor's values from its bytes ``stored`` uint8: a view, a `BlockTensor`, or a dequantised copy."""
    kind, shape, raw = _ggml_type(tensor.stored), tensor.stored.shape, stored
    plain = PLAIN_TYPES.get(kind.name)
    can_keep = keeps_blocks and len(shape) in (2, 3) and kind.name in BLOCK_TYPES and not tensor.offset
    if cut is not None and len(shape) == 2 and tuple(shape) == cut.full_shape and not can_keep:
        return _read_part(tensor, stored, dtype, cut)
    if tensor.row_order is not None and raw.numel():
        rows = raw.view(shape[0], -1)  # blocks never cross rows
        raw = rows[torch.from_numpy(tensor.row_order)].flatten()
    if plain is not None:
        values = raw.view(plain).view(shape)
        return values.float() - tensor.offset if tensor.offset else values
    if can_keep:
        blocks = WeightBlocks(kind.name, raw.view(math.prod(shape[:-1]), -1))
        if blocks.can_be_packed:
            # `make_plain` starts from the bytes as stored: it reorders the rows itself
            return BlockTensor(
                blocks, dtype, partial(_read_one, tensor, stored, dtype), num_stacked=shape[0] if len(shape) == 3 else 0
            )
    out = torch.empty(shape, dtype=dtype if len(shape) > 1 else torch.float32)
    _dequantise(tensor.stored, kind, raw.numpy(), out.view(-1))
    return out.sub_(tensor.offset) if tensor.offset else out


def _read_part(tensor: NamedTensor, stored: torch.Tensor, dtype: torch.dtype, cut: Cut) -> torch.Tensor:
    """What ``cut`` keeps of a matrix, of which nothing but its rows and the blocks that it touches are read."""
    from gguf.constants import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[_ggml_type(tensor.stored)]
    first, *more = cut.dims[1]
    low, high = (0, cut.full_shape[1] // block) if more else (first.start // block, -(-first.stop // block))
    rows = stored.view(tensor.stored.shape[0], -1)[:, low * block_bytes : high * block_bytes]
    of_rows = Cut(cut.dims[:1])
    rows = of_rows.keep(rows) if tensor.row_order is None else rows[of_rows.keep(torch.from_numpy(tensor.row_order))]
    part = replace(tensor, row_order=None, stored=replace(tensor.stored, shape=(len(rows), (high - low) * block)))
    values = _read_one(part, rows.contiguous().flatten(), dtype)
    kept = cut.dims[1] if more else (Share((high - low) * block, first.start - low * block, first.stop - low * block),)
    return Cut(((Share.whole(len(rows)),), kept)).keep(values)


def _dequantise(tensor: GgufTensor, kind: Any, raw: np.ndarray, out: torch.Tensor) -> None:
    """``raw`` uint8 to ``out`` [values], a chunk at a time."""
    from gguf.constants import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[kind]
    step, read_blocks = CHUNK_ELEMENTS // block, BLOCK_READERS.get(kind.name)
    if read_blocks is not None:
        for blocks, part in zip(
            torch.from_numpy(raw).view(-1, block_bytes).split(step), out.view(-1, block).split(step), strict=True
        ):
            values = part if part.dtype == torch.float32 else torch.empty(part.shape)  # readers write float32
            read_blocks(blocks, values)
            if values is not part:
                part.copy_(values)
        return
    from gguf.quants import dequantize

    for first in range(0, out.numel() // block, step):
        chunk = raw[first * block_bytes : (first + step) * block_bytes]
        try:
            values = dequantize(chunk[None], kind)[0]
        except NotImplementedError as error:
            raise WeightError(
                f"GGUF tensor {tensor.name} in {tensor.path} has type {kind.name}, which cannot be dequantised"
            ) from error
        out[first * block : first * block + len(values)] = torch.from_numpy(values)


def _read_halves(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """``count`` float16 from byte ``start`` of each block, as float32 [B, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _write_nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """``packed`` [B, 16] to ``out`` [B, 32]: the low nibbles are values 0 to 15, the high nibbles 16 to 31."""
    packed, pairs = packed.contiguous(), out.view(-1, 2, BLOCK // 2)
    pairs[:, 0] = packed & 15
    pairs[:, 1] = packed >> 4


def _read_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks [B, 18] to out [B, 32]: ``d * (q - 8)``."""
    _write_nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_read_halves(blocks, 0, 1))


def _read_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks [B, 20] to out [B, 32]: ``d * q + m``."""
    factors = _read_halves(blocks, 0, 2)
    _write_nibbles(blocks[:, 4:], out)
    out.mul_(factors[:, :1]).add_(factors[:, 1:])


def _read_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks [B, 34] to out [B, 32]: ``d * q`` with signed q."""
    torch.mul(blocks[:, 2:].contiguous().view(torch.int8), _read_halves(blocks, 0, 1), out=out)


BLOCK_READERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q8_0": _read_q8_0
}
"""Types read in torch, two to three times as fast as by the gguf package: ``(blocks [B, bytes] uint8, out [B, 32]
float32)``."""
