"""Turns GGUF tensors into torch tensors: types torch knows are mapped without a copy, quantised ones are dequantised,
or passed on in their blocks.

Numerics of the quantised types are the gguf package's. Refuses: knowing who can keep blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.base.errors import WeightError
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, WeightBlocks
from headrace.layers.quantization.blocks import BlockTensor
from headrace.models.weights.ahead import map_ahead
from headrace.models.weights.gguf_blocks import READERS
from headrace.models.weights.gguf_file import GgufTensor
from headrace.models.weights.gguf_naming import NamedTensor
from headrace.models.weights.mapping import map_file, view_bytes

CHUNK_ELEMENTS = 1 << 17
"""Values dequantised at once: numpy's temporaries stay in the cache."""

AHEAD_BYTES = 64 << 20
MAX_ITEM_BYTES = 8

_NATIVE = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}


def read_tensors(
    tensors: Sequence[NamedTensor], *, dtype: torch.dtype | None, threads: int, keeps_blocks: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` on the CPU, matrices dequantised to ``dtype`` (None: float32), vectors to float32. With
    ``keeps_blocks``, matrices of the types known to packed products come as `BlockTensor`.

    Every tensor's bounds are checked before the first is read; raises `WeightError`.
    """
    files = {path: map_file(path) for path in {tensor.stored.path for tensor in tensors}}
    ends = {path: data.numel() for path, data in files.items()}
    sizes = [_check_bounds(tensor.stored, ends[tensor.stored.path]) for tensor in tensors]
    dtype = dtype or torch.float32

    def read(item: tuple[NamedTensor, int]) -> tuple[str, torch.Tensor]:
        tensor, num_bytes = item
        raw = view_bytes(files[tensor.stored.path], tensor.stored.offset, num_bytes, MAX_ITEM_BYTES)
        return tensor.name, _read_one(tensor, raw, dtype, keeps_blocks=keeps_blocks)

    def cost(item: tuple[NamedTensor, int]) -> int:
        return math.prod(item[0].stored.shape) * dtype.itemsize

    yield from map_ahead(read, zip(tensors, sizes, strict=True), cost=cost, budget=AHEAD_BYTES, threads=threads)


def _ggml_type(tensor: GgufTensor) -> Any:
    from gguf.constants import GGMLQuantizationType  # costs 0.1 s, and only quantised models need it

    try:
        return GGMLQuantizationType(tensor.type_id)
    except ValueError as error:
        raise WeightError(
            f"GGUF tensor {tensor.name} in {tensor.path} has type {tensor.type_id}, unknown to the gguf package; "
            "upgrade it"
        ) from error


def _check_bounds(tensor: GgufTensor, file_bytes: int) -> int:
    """Bytes the tensor takes; raises `WeightError` when they are not all in the file."""
    from gguf.constants import GGML_QUANT_SIZES

    kind = _ggml_type(tensor)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    width = tensor.shape[-1] if tensor.shape else 1
    if width % block:
        raise WeightError(
            f"GGUF tensor {tensor.name} in {tensor.path} has rows of {width}, not a multiple of {kind.name}'s {block}"
        )
    num_bytes = math.prod(tensor.shape) // block * block_bytes
    if tensor.offset + num_bytes > file_bytes:
        raise WeightError(
            f"{tensor.path} is truncated: tensor {tensor.name} needs bytes {tensor.offset} to "
            f"{tensor.offset + num_bytes}, "
            f"the file has {file_bytes}; fetch it again"
        )
    return num_bytes


def _read_one(
    tensor: NamedTensor, stored: torch.Tensor, dtype: torch.dtype, *, keeps_blocks: bool = False
) -> torch.Tensor:
    kind, shape, raw = _ggml_type(tensor.stored), tensor.stored.shape, stored
    native = _NATIVE.get(kind.name)
    if tensor.row_order is not None and raw.numel():
        rows = raw.view(shape[0], -1)
        raw = rows[torch.from_numpy(tensor.row_order)].flatten()
    if native is not None:
        values = raw.view(native).view(shape)
        return values.float() - tensor.offset if tensor.offset else values
    if keeps_blocks and len(shape) in (2, 3) and kind.name in BLOCK_TYPES and not tensor.offset:
        blocks = WeightBlocks(kind.name, raw.view(math.prod(shape[:-1]), -1))
        if blocks.can_be_packed:
            return BlockTensor(
                blocks, dtype, partial(_read_one, tensor, stored, dtype), num_stacked=shape[0] if len(shape) == 3 else 0
            )
    out = torch.empty(shape, dtype=dtype if len(shape) > 1 else torch.float32)
    _dequantise(tensor.stored, kind, raw.numpy(), out.view(-1))
    return out.sub_(tensor.offset) if tensor.offset else out


def _dequantise(tensor: GgufTensor, kind: Any, raw: np.ndarray, out: torch.Tensor) -> None:
    from gguf.constants import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[kind]
    step, read_blocks = CHUNK_ELEMENTS // block, READERS.get(kind.name)
    if read_blocks is not None:
        for blocks, part in zip(
            torch.from_numpy(raw).view(-1, block_bytes).split(step), out.view(-1, block).split(step), strict=True
        ):
            values = part if part.dtype == torch.float32 else torch.empty(part.shape)
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
