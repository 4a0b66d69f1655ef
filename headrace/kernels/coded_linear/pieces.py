"""The inner loop of products with coded weights for few rows, which Triton kernels share: codes become the left operand
of `tl.dot` in registers and are read once.

The right operand is some rows of x, transposed. A weight is walked in pieces of inputs that share a scale, so that
scales multiply sums in float32; powers of two (MXFP4) multiply numbers instead, which is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.decode import (
    E2M1,
    FLOATS,
    INTEGERS,
    LOOKED_UP,
    TILE_ROWS,
    TILED,
    find_codes,
    scale_pairs,
    subtract_pairs,
    widen,
)
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, POWER_GROUP, DeviceCodes

MOST_PIECE = 32
"""Bytes with two codes that are multiplied at a time."""
_BLOCK, _HALF = tl.constexpr(BLOCK), tl.constexpr(HALF)


@triton.jit
def load_rows(x_ptr, at, x_stride, inner, is_there, is_inside):
    """Columns ``inner`` of the rows ``at`` of x, transposed: [columns, rows]; zeros where there is no row."""
    return tl.load(
        x_ptr + at[None, :].to(tl.int64) * x_stride + inner[:, None], mask=is_there[None, :] & is_inside[:, None],
        other=0.0
    )


@triton.jit
def load_tables(
    weight_ptrs, row, is_row, first, K, G, GROUP: tl.constexpr, SHARED: tl.constexpr, PAIRS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, KIND: tl.constexpr
):
    """Scales and zeros, float32, of inputs from ``first`` on, for rows of the weight. All of one shape that ``row``,
    ``is_row`` and ``first`` broadcast to."""
    _, scales_ptr, zeros_ptr, _ = weight_ptrs
    if KIND == TILED:
        at = row // TILE_ROWS * (TILE_ROWS * G) + first // GROUP * TILE_ROWS + row % TILE_ROWS
    else:
        at = (row // SHARED) * G + first // GROUP
    scale = tl.load(scales_ptr + at, mask=is_row & (first < K), other=0)
    if PAIRS:
        zero = (scale >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif HAS_ZEROS:
        zero = tl.load(zeros_ptr + at, mask=is_row & (first < K), other=0.0)
    else:
        zero = tl.zeros_like(scale)
    return scale, zero


@triton.jit
def _add_powers(
    total, weight_ptrs, row, is_row, block, words, x_low, x_high, part: tl.constexpr, WIDTH: tl.constexpr, STRIDE,
    FAST: tl.constexpr
):
    """As `_add_pairs`, of e2m1 codes; ``words`` [OUTPUTS] has the powers of two of the block's 4 groups."""
    at = row[:, None] * STRIDE + (block // 2 + part * WIDTH + tl.arange(0, WIDTH))[None, :]
    packed = tl.load(weight_ptrs[0] + at, mask=is_row[:, None], other=0)
    low_power, high_power = (words >> (8 * part)) & 255, (words >> (8 * part + 16)) & 255
    low, high = scale_pairs(packed, low_power[:, None], high_power[:, None], x_low.dtype, FAST)
    total = tl.dot(low, x_low, total, input_precision="ieee")
    return tl.dot(high, x_high, total, input_precision="ieee")


@triton.jit
def _add_pairs(
    total, weight_ptrs, row, is_row, block, x_low, x_high, part: tl.constexpr, WIDTH: tl.constexpr, K, G, STRIDE,
    GROUP: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    WHOLE: tl.constexpr, SAME: tl.constexpr, FAST: tl.constexpr,
):
    """``total`` [OUTPUTS, ROWS] plus the product of WIDTH bytes of each row, ``part`` of the block of inputs that
    begins at ``block``: low codes with ``x_low`` [WIDTH, ROWS], high codes, HALF inputs further, with ``x_high``."""
    low_first = block + part * WIDTH
    at = find_codes(row[:, None], block // 2 + part * WIDTH, tl.arange(0, WIDTH)[None, :], STRIDE, KIND)
    packed = tl.load(weight_ptrs[0] + at, mask=is_row[:, None], other=0)
    low_scale, low_zero = load_tables(
        weight_ptrs, row, is_row, low_first, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND
    )
    high_scale, high_zero = low_scale, low_zero
    if not SAME:
        high_scale, high_zero = load_tables(
            weight_ptrs, row, is_row, low_first + _HALF, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND
        )
    if not WHOLE:  # differences are not exact in x's dtype: zeros multiply sums of x instead
        total -= (low_zero * low_scale)[:, None] * tl.sum(x_low.to(tl.float32), axis=0)[None, :]
        total -= (high_zero * high_scale)[:, None] * tl.sum(x_high.to(tl.float32), axis=0)[None, :]
        low_zero = tl.zeros_like(low_zero)
        high_zero = tl.zeros_like(high_zero)
    low, high = subtract_pairs(
        packed, low_zero[:, None], high_zero[:, None], weight_ptrs[3], KIND, x_low.dtype, FAST
    )
    if SAME:
        both = tl.dot(low, x_low, input_precision="ieee")
        total += tl.dot(high, x_high, both, input_precision="ieee") * low_scale[:, None]
    else:
        total += tl.dot(low, x_low, input_precision="ieee") * low_scale[:, None]
        total += tl.dot(high, x_high, input_precision="ieee") * high_scale[:, None]
    return total


@triton.jit
def _add_bytes(
    total, codes_ptr, row, is_row, first, x, tables, WIDTH: tl.constexpr, K, STRIDE, HAS_ZEROS: tl.constexpr,
    KIND: tl.constexpr, FAST: tl.constexpr
):
    """``total`` [OUTPUTS, ROWS] plus the product of WIDTH codes of a byte each, from input ``first`` on, with ``x``
    [WIDTH, ROWS]; ``tables`` are of `load_tables`."""
    scale, zero = tables
    inner = first + tl.arange(0, WIDTH)
    at = find_codes(row[:, None], first, tl.arange(0, WIDTH)[None, :], STRIDE, KIND)
    codes = tl.load(codes_ptr + at, mask=is_row[:, None] & (inner < K)[None, :], other=0.0)
    if HAS_ZEROS:
        total -= (zero * scale)[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    return total + tl.dot(widen(codes, x.dtype, FAST), x, input_precision="ieee") * scale[:, None]


@triton.jit
def multiply(
    x_ptr, at, x_stride, is_there, weight_ptrs, row, other_row, is_row, start, stop, PAIR: tl.constexpr, K, G, STRIDE,
    GROUP: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr, POWERS: tl.constexpr,
    PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr, WHOLE: tl.constexpr, SAME: tl.constexpr, FAST: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):
    """Products [OUTPUTS, ROWS] float32, over inputs ``start`` to ``stop`` (``start`` a multiple of BLOCK), of rows
    ``at`` of x with rows ``row`` (int64) of the weight and, with PAIR, with rows ``other_row``; a tile of x is read
    once for both. ``weight_ptrs``: of `point_at`; from K to WIDTH: of `find_constants`."""
    one = tl.zeros([OUTPUTS, ROWS], tl.float32)
    other = tl.zeros([OUTPUTS, ROWS], tl.float32)
    inner = tl.arange(0, WIDTH)
    if SHORT:
        for block in range(start, stop, _BLOCK):
            if POWERS:
                words = tl.load(weight_ptrs[1] + (row // SHARED) * G + block // _BLOCK, mask=is_row, other=0)
                if PAIR:
                    other_words = tl.load(
                        weight_ptrs[1] + (other_row // SHARED) * G + block // _BLOCK, mask=is_row, other=0
                    )
            for part in tl.static_range(_HALF // WIDTH):
                low = block + part * WIDTH
                high = low + _HALF
                x_low = load_rows(x_ptr + low, at, x_stride, inner, is_there, inner < K - low)
                x_high = load_rows(x_ptr + high, at, x_stride, inner, is_there, inner < K - high)
                if POWERS:
                    one = _add_powers(
                        one, weight_ptrs, row, is_row, block, words, x_low, x_high, part, WIDTH, STRIDE, FAST
                    )
                    if PAIR:
                        other = _add_powers(
                            other, weight_ptrs, other_row, is_row, block, other_words, x_low, x_high, part, WIDTH,
                            STRIDE, FAST
                        )
                else:
                    one = _add_pairs(
                        one, weight_ptrs, row, is_row, block, x_low, x_high, part, WIDTH, K, G, STRIDE, GROUP, SHARED,
                        KIND, PAIRS, HAS_ZEROS, WHOLE, SAME, FAST
                    )
                    if PAIR:
                        other = _add_pairs(
                            other, weight_ptrs, other_row, is_row, block, x_low, x_high, part, WIDTH, K, G, STRIDE,
                            GROUP, SHARED, KIND, PAIRS, HAS_ZEROS, WHOLE, SAME, FAST
                        )
    else:
        # tables are asked for a step ahead: they multiply results, and so are not among the loads that Triton pipelines
        tables = load_tables(weight_ptrs, row, is_row, start, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND)
        other_tables = tables
        if PAIR:
            other_tables = load_tables(
                weight_ptrs, other_row, is_row, start, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND
            )
        for first in range(start, stop, WIDTH):
            following = load_tables(
                weight_ptrs, row, is_row, first + WIDTH, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND
            )
            other_following = following
            if PAIR:
                other_following = load_tables(
                    weight_ptrs, other_row, is_row, first + WIDTH, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND
                )
            x = load_rows(x_ptr + first, at, x_stride, inner, is_there, inner < K - first)
            one = _add_bytes(
                one, weight_ptrs[0], row, is_row, first, x, tables, WIDTH, K, STRIDE, HAS_ZEROS, KIND, FAST
            )
            if PAIR:
                other = _add_bytes(
                    other, weight_ptrs[0], other_row, is_row, first, x, other_tables, WIDTH, K, STRIDE, HAS_ZEROS, KIND,
                    FAST
                )
            tables, other_tables = following, other_following
    return one, other


def has_fast_path(weight: DeviceCodes, dtype: torch.dtype) -> bool:
    """Whether codes become inputs of products in ``dtype`` by the PTX of `decode`."""
    if not weight.codes.is_cuda or dtype != torch.bfloat16:
        return False
    if weight.code is Code.E2M1:
        return weight.has_powers
    return weight.code is Code.E4M3 or (weight.code is Code.INT and weight.is_short)


def point_at(weight: DeviceCodes, dtype: torch.dtype) -> list[torch.Tensor]:
    """Codes, scales, zeros and values, as kernels take them; absent ones are any tensor."""
    codes, scales = weight.codes, weight.scales
    if weight.code is Code.E4M3 and has_fast_path(weight, dtype):
        codes = codes.view(torch.uint8)
    if weight.has_powers:
        scales = scales.view(torch.int32)  # those of a block in a word
    return [codes, scales, *(scales if given is None else given for given in (weight.zeros, weight.values))]


def find_constants(weight: DeviceCodes, dtype: torch.dtype) -> dict[str, int]:
    """The arguments of `multiply` that describe a weight, by name."""
    # one group for all inputs is a multiple of any width
    group = weight.group if weight.num_groups > 1 or weight.has_powers else 1 << 30
    integers = TILED if weight.is_tiled else INTEGERS
    kind = {Code.E2M1: E2M1, Code.E4M3: FLOATS, Code.INT: integers}.get(weight.code, LOOKED_UP)
    piece = MOST_PIECE if weight.is_short else HALF if weight.is_tiled else BLOCK
    return dict(
        K=weight.in_features, G=weight.scales.shape[1] // (BLOCK // POWER_GROUP if weight.has_powers else 1),
        STRIDE=weight.codes.stride(0), GROUP=group, SHARED=weight.rows, KIND=kind.value, SHORT=weight.is_short,
        POWERS=weight.has_powers, PAIRS=weight.has_pairs, HAS_ZEROS=weight.has_zeros, WHOLE=weight.has_whole_zeros,
        SAME=group % BLOCK == 0, FAST=has_fast_path(weight, dtype),
        WIDTH=min(piece, group & -group),
    )
