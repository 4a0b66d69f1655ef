"""Products of tens of rows with integers in tiles by own CUDA C++ (``csrc/cuda/tiled_block.cu``, which says how they
work), also as partial sums.

M rows of x, N outputs, K inputs, S splits of K.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass, replace

import torch

from headrace.kernels.coded_linear.cuda import arrange
from headrace.kernels.coded_linear.device_codes import HALF, MATRIX_ROWS, TILE_ROWS, DeviceCodes
from headrace.kernels.coded_linear.tiles import Form, describe_form
from headrace.kernels.coded_linear.triton import add_splits
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    RESERVED_BYTES,
    SM_BYTES,
    CudaKernel,
    cache_compiled,
    count_sms,
    load_kernel,
)
from headrace.kernels.launch import ceil_div

STATIC_BYTES = 2 << 10
"""The sums of x take at most so much of a block's shared memory."""


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "bias", "out", "parts", "codes", "scales")), ("x_stride", c_int64),
        *((name, c_int) for name in ("rows", "outputs", "inputs", "columns", "units_each", "splits", "tiles")),
    )


@dataclass(frozen=True)
class Block:
    """Columns of 8 rows of x, warps of 16 outputs, units of 64 bytes of a row of the weight that are copied at a time,
    how many such chunks are kept, and blocks on a multiprocessor."""

    columns: int
    warps: int
    chunk: int
    stages: int
    room: int

    def count_bytes(self, form: Form) -> int:
        """Of shared memory, beside the sums of x."""
        words = max(1, form.count_words(self.chunk)) if form.group else 0
        own = self.chunk * HALF + 4 * words
        if form.super_form:
            # of a chunk of one unit, too, the scales of the whole super-block
            own = form.count_weight_bytes(2) * ceil_div(self.chunk, 2) - form.count_codes(2) * (self.chunk % 2) // 2
        weights = self.warps * 2 * TILE_ROWS * own
        return self.stages * (weights + 8 * self.columns * (self.chunk * form.unit * 2 + 16))


def choose_block(form: Form, rows: int) -> Block:
    """The fastest of those that were tried on an H200; with fewer stages where these take too much memory."""
    block = Block(2, 8, 2, 4, 2) if rows <= 16 else Block(4, 8, 2, 3, 2) if rows <= 32 else Block(8, 8, 1, 6, 1)
    while block.room * (block.count_bytes(form) + STATIC_BYTES + RESERVED_BYTES) > SM_BYTES:
        block = replace(block, stages=block.stages - 1)
    return block


@cache_compiled
def find_kernel(form: Form, block: Block, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    macros = form._asdict()
    del macros["tail_form"]
    return load_kernel(
        "tiled_block", device, MOST_BYTES - STATIC_BYTES, **macros, COLUMNS=block.columns, WARPS=block.warps,
        BLOCKS=block.room, CHUNK=block.chunk, STAGES=block.stages,
    )


def choose_splits(units: int, tiles: int, block: Block, num_sms: int) -> int:
    """How many blocks share the inputs of a tile: what fills the GPU once, with two chunks each at least."""
    return max(1, min(num_sms * block.room // tiles, units // (2 * block.chunk)))


def launch(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, *, block: Block | None = None,
    splits: int | None = None, keeps_sums: bool = False,
) -> torch.Tensor:
    """The product [M, N] of x [M, K] with its bias, or partial sums [S, M, N] float32 without; with ``keeps_sums``
    always these. Parts of a weight in several forms are multiplied one after the other."""
    form, (rows, inputs), parts = describe_form(weight), x.shape, weight.parts
    block = block or choose_block(form, rows)
    units, row_tiles = inputs // form.unit, ceil_div(rows, 8 * block.columns)
    tiles = [ceil_div(len(part.codes), MATRIX_ROWS * block.warps) for part in parts]
    splits = splits or choose_splits(units, max(tiles) * row_tiles, block, count_sms(x.device))
    units_each = ceil_div(ceil_div(units, splits), block.chunk) * block.chunk
    splits = ceil_div(units, units_each)
    keeps_sums = keeps_sums or splits > 1
    shape, dtype = (rows, weight.out_features), torch.float32 if keeps_sums else x.dtype
    out = torch.empty((splits, *shape) if keeps_sums else shape, dtype=dtype, device=x.device)
    first = 0
    for part, count in zip(parts, tiles, strict=True):
        to = out[..., first:]
        call = _Call(
            x=x.data_ptr(), bias=None if bias is None else bias[first:].data_ptr(), out=to.data_ptr(),
            parts=to.data_ptr() if keeps_sums else None, codes=part.codes.data_ptr(), scales=part.scales.data_ptr(),
            x_stride=x.stride(0), rows=rows, outputs=len(part.codes), inputs=inputs, columns=weight.out_features,
            units_each=units_each, splits=splits, tiles=count,
        )
        own = describe_form(part)
        find_kernel(own, block, x.device).launch(
            count * splits * row_tiles, 32 * block.warps, call, is_dependent=True, shared_bytes=block.count_bytes(own)
        )
        first += len(part.codes)
    return out


def multiply(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    if not len(x):
        return x.new_empty(0, weight.out_features)
    out = launch(arrange(x, weight), weight, bias)
    return out if out.dim() == 2 else add_splits(out, bias, x.dtype, pdl=True)


def multiply_sums(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_SUMS`."""
    return launch(arrange(x, weight), weight, None)


def multiply_float(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_FLOAT`."""
    sums = launch(arrange(x, weight), weight, None, keeps_sums=True)
    return sums[0] if len(sums) == 1 else add_splits(sums, None, torch.float32, pdl=True)
