"""Products of some hundred rows on Hopper in one wave of tiles, by own CUDA C++ (``csrc/cuda/wave_product.cu``), alone
or with the gated activation: half precision, or FP8 with a scale for each row of x and of the weight.

M rows of x, N rows of the weight, F outputs (half of N with an activation), K inputs. `waves` chooses tiles.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from typing import NamedTuple

import torch

from headrace.kernels.cuda_source import (
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    describe_boxes,
    fallback,
    load_kernel,
)
from headrace.kernels.linear.waves import (
    CLUSTER,
    ROW_BYTES,
    Size,
    Tile,
    choose_tile,
    count_copied_rows,
    find_all_fastest,
)
from headrace.kernels.rowwise.triton import GATES


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("x_scales", c_void_p), ("scales", c_void_p), ("out", c_void_p), ("rows", c_int), ("outputs", c_int),
        ("inputs", c_int), ("box", c_int),
    )


@cache_compiled
def find_kernel(tile: Tile, dtype: torch.dtype, activation: str, device: torch.device) -> CudaKernel | None:
    """The kernel, compiled (half a second) unless cached; None, with a warning, where that fails."""
    sums = tile.width // 2
    kind = {torch.float16: {"FP16": 1}, torch.float8_e4m3fn: {"FP8": 1}}.get(dtype, {})
    with fallback("products of some hundred rows are torch's"):
        return load_kernel(
            "wave_product", device, tile.shared_bytes, WARPGROUPS=tile.warpgroups, HIGH=tile.high, WIDTH=tile.width,
            SUMS=sums, SUMS_1=sums + 1, SUMS_2=sums + 2, STAGES=tile.stages, SHARES_X=int(tile.shares_x),
            GATE=GATES[activation] if activation else 0, **kind,
        )
    return None


def prepare(x: torch.Tensor, weight: torch.Tensor, activation: str, least_rows: int) -> None:
    """Compile and load kernels for any number of rows in x's dtype from ``least_rows`` on, so that none is compiled for
    a request that brings the first of its number."""
    size = measure_size(x, weight, is_gated=bool(activation))._replace(rows=least_rows)
    _prepare(size, x.dtype, activation, x.device)


@cache_compiled
def _prepare(size: Size, dtype: torch.dtype, activation: str, device: torch.device) -> None:
    for tile in find_all_fastest(size):
        find_kernel(tile, dtype, activation, device)


class Scales(NamedTuple):
    """Of FP8, float32: of each row of x [M], and of each row of the weight [N]."""

    rows: torch.Tensor
    weight: torch.Tensor


def measure_size(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> Size:
    """The size of a product."""
    return Size(x.shape[0], weight.shape[0], x.shape[1] * x.element_size(), is_gated, count_sms(x.device))


def can_describe(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> bool:
    """Whether TMA can read both, whose rows must begin at multiples of 16 bytes, and outputs come in whole eights."""
    return all(
        matrix.stride(1) == 1 and matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
        for matrix in (x, weight)
    ) and weight.shape[0] % (16 if is_gated else 8) == 0


def multiply(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile, activation: str = "", scales: Scales | None = None
) -> torch.Tensor | None:
    """``x @ weight.T`` [M, F], followed by the gated ``activation`` ("silu", "gelu_tanh") of its halves if given, of x
    [M, K] and a weight [N, K] that satisfy `can_describe`: in x's dtype, or, of FP8 times its ``scales``, bfloat16. M
    is at most ``tile.rows``, or without ``shares_x`` twice that. None, with a warning, where the kernel cannot be
    compiled."""
    (rows, inputs), is_gated = x.shape, bool(activation)
    outputs = weight.shape[0] // (2 if is_gated else 1)
    kernel = find_kernel(tile, x.dtype, activation, x.device)
    if kernel is None:
        return None
    box = count_copied_rows(rows)
    assert (CLUSTER if tile.shares_x else 1) * box <= tile.rows, "rows that the tile has no place for"
    out = torch.empty((rows, outputs), dtype=x.dtype if scales is None else torch.bfloat16, device=x.device)
    if not rows:
        return out
    call = _Call(
        x_scales=address_of(scales and scales.rows), scales=address_of(scales and scales.weight), out=out.data_ptr(),
        rows=rows, outputs=outputs, inputs=inputs, box=box,
    )
    depth = ROW_BYTES // x.element_size()
    maps = describe_boxes(x, (box, depth)), describe_boxes(weight, (tile.width // 2, depth))
    blocks = tile.count_blocks(measure_size(x, weight, is_gated=is_gated))
    kernel.launch(blocks, tile.threads, *maps, call, is_dependent=True)
    return out


LEAST_ROWS = 129
"""Of a product with a large weight in half precision: the Gluon kernel takes fewer."""
LEAST_WIDTH = 14336
"""Rows of the weight, the fewest of those that `waves.estimate` was fitted to."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """See `LINEAR`, such as of a weight that stacks gate and up with factors of adapters behind it; None where torch's
    GEMM is as fast."""
    if bias is not None or len(weight) < LEAST_WIDTH or not can_describe(x, weight, is_gated=False):
        return None
    prepare(x, weight, "", LEAST_ROWS)
    tile = choose_tile(measure_size(x, weight, is_gated=False)) if len(x) >= LEAST_ROWS else None
    return None if tile is None else multiply(x, weight, tile)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """See `GATED_LINEAR`."""
    if bias is not None or not can_describe(x, weight, is_gated=True):
        return None
    tile = choose_tile(measure_size(x, weight, is_gated=True))
    return None if tile is None or x.shape[0] < LEAST_ROWS else multiply(x, weight, tile, activation)
