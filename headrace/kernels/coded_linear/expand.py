"""Dequantise coded weights on a GPU in one pass: for products with many rows, which libraries do in half precision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from headrace.kernels.coded_linear.decode import decode_pairs, find_codes, power_of
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, POWER_GROUP, DeviceCodes
from headrace.kernels.coded_linear.pieces import find_constants, load_tables, point_at
from headrace.kernels.coded_linear.reference import multiply_plain
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import gated_product
from headrace.kernels.rowwise import Gate

ROWS, WIDTH = 16, 256
"""Outputs, and bytes of each, of a program."""
SUPER_UNITS = 4
"""Of 128 inputs, that a program expands of weights of super-blocks."""
MOST_EXPANDED = 1 << 26
"""Weights that a product with float32 outputs expands at a time: 128 MiB in half precision."""
_BLOCK, _HALF, _POWER_GROUP = tl.constexpr(BLOCK), tl.constexpr(HALF), tl.constexpr(POWER_GROUP)


@triton.jit
def _store(
    numbers, weight_ptrs, out_ptr, order_ptr, row, first, N, K, G, PIECE: tl.constexpr, GROUP: tl.constexpr,
    SHARED: tl.constexpr, KIND: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr
):
    """Store ``numbers`` [ROWS, PIECES, PIECE] float32, less zeros, times scales, at rows ``row`` and pieces of inputs
    that begin at ``first`` [PIECES]; those of a piece share a scale."""
    is_row = (row < N)[:, None]
    if POWERS:
        words = tl.load(
            weight_ptrs[1] + (row // SHARED)[:, None] * G + (first // _BLOCK)[None, :],
            mask=is_row & (first < K)[None, :], other=0
        )
        scale = power_of((words >> (first % _BLOCK // _POWER_GROUP * 8)[None, :]) & 255)
        numbers = numbers * scale[:, :, None]
    else:
        scale, zero = load_tables(
            weight_ptrs, row[:, None], is_row, first[None, :], K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, KIND
        )
        numbers = (numbers - zero[:, :, None]) * scale[:, :, None]
    k = first[:, None] + tl.arange(0, PIECE)[None, :]
    column = k
    if HAS_ORDER:
        column = tl.load(order_ptr + k, mask=k < K, other=0)
    tl.store(
        out_ptr + row[:, None, None] * K + column[None, :, :], numbers.to(out_ptr.dtype.element_ty),
        mask=is_row[:, :, None] & (k < K)[None, :, :]
    )


@triton.jit
def _expand_kernel(
    codes_ptr, scales_ptr, zeros_ptr, values_ptr, order_ptr, out_ptr, N, K, G, STRIDE, GROUP: tl.constexpr,
    SHARED: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH // PIECE) * PIECE
    byte = first[:, None] + tl.arange(0, PIECE)[None, :]
    weight_ptrs = (codes_ptr, scales_ptr, zeros_ptr, values_ptr)
    at = find_codes(row[:, None, None], first[None, :, None], tl.arange(0, PIECE)[None, None, :], STRIDE, KIND)
    codes = tl.load(codes_ptr + at, mask=(row < N)[:, None, None] & (byte < STRIDE)[None, :, :], other=0.0)
    if SHORT:
        low, high = decode_pairs(codes, values_ptr, KIND)
        first = first // _HALF * _BLOCK + first % _HALF
        _store(
            low, weight_ptrs, out_ptr, order_ptr, row, first, N, K, G, PIECE, GROUP, SHARED, KIND, POWERS, PAIRS,
            HAS_ZEROS, HAS_ORDER
        )
        _store(
            high, weight_ptrs, out_ptr, order_ptr, row, first + _HALF, N, K, G, PIECE, GROUP, SHARED, KIND, POWERS,
            PAIRS, HAS_ZEROS, HAS_ORDER
        )
    else:
        _store(
            codes.to(tl.float32), weight_ptrs, out_ptr, order_ptr, row, first, N, K, G, PIECE, GROUP, SHARED, KIND,
            POWERS, PAIRS, HAS_ZEROS, HAS_ORDER
        )


@triton.jit
def _load_half(ptr, at, mask):
    """The float16 at byte ``at``, as float32."""
    bits = tl.load(ptr + at, mask=mask, other=0).to(tl.int32)
    bits |= tl.load(ptr + at + 1, mask=mask, other=0).to(tl.int32) << 8
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _expand_supers_kernel(
    codes_ptr, scales_ptr, out_ptr, N, K, SIX: tl.constexpr, MINS: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr
):
    """Of super-blocks in tiles: pieces of 16 inputs, [ROWS, UNITS * 8, 16]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    nth = tl.program_id(1) * (UNITS * 8) + tl.arange(0, UNITS * 8)[None, :]
    unit, plane, part = nth // 8, nth // 4 % 2, nth % 4
    eight, r, is_there = row // 8, row % 8, (row < N) & (unit * _BLOCK < K)
    block, odd = eight * (K // (2 * _BLOCK)) + unit // 2, unit % 2
    if MINS:
        table = block * 128 + r * 16
        six = table + 4 + 3 * (2 * odd + part // 2)
        bits = tl.load(scales_ptr + six, mask=is_there, other=0).to(tl.int32)
        bits |= tl.load(scales_ptr + six + 1, mask=is_there, other=0).to(tl.int32) << 8
        bits |= tl.load(scales_ptr + six + 2, mask=is_there, other=0).to(tl.int32) << 16
        scale = ((bits >> 6 * plane) & 63).to(tl.float32) * _load_half(scales_ptr, table, is_there)
        least = ((bits >> 6 * plane + 12) & 63).to(tl.float32) * _load_half(scales_ptr, table + 2, is_there)
    else:
        at = block * 144 + r * 16 + odd * 8 + part * 2 + plane
        scale = tl.load(scales_ptr + at, mask=is_there, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        scale *= _load_half(scales_ptr, block * 144 + 128 + r * 2, is_there)
        least = tl.zeros_like(scale)
    j = tl.arange(0, 16)[None, None, :]
    mask, byte = is_there[:, :, None] & (j >= 0), j % 4
    if SIX:
        word = j // 4
        base = (eight * (K // _BLOCK) + unit) * 768
        # words 0 to 2 of plane 0 and word 0 of plane 1, then words 1 and 2 of plane 1
        near, far = base + r * 64 + part * 16, base + 512 + r * 32 + part * 8
        near, far, high = near[:, :, None], far[:, :, None], (plane == 1)[:, :, None]
        own = tl.where(word < 3, word, 0)
        at = tl.where(high, tl.where(own == 0, near + 12, far + 4 * own - 4), near + 4 * own) + byte
        code = tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32)
        is_last = mask & (word == 3)
        second = tl.load(codes_ptr + tl.where(high, far, near + 4) + byte, mask=is_last, other=0).to(tl.int32)
        third = tl.load(codes_ptr + tl.where(high, far + 4, near + 8) + byte, mask=is_last, other=0).to(tl.int32)
        last = (code & 3) << 4 | (second & 3) << 2 | (third & 3)
        code = tl.where(word < 3, code >> 2, last)
    else:
        at = ((eight * (K // _BLOCK) + unit) * 512 + r * 64 + part * 16)[:, :, None] + j
        code = (tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32) >> (4 * plane)[:, :, None]) & 15
    if not MINS:  # two's complement
        centre: tl.constexpr = 32 if SIX else 8
        code = (code ^ centre) - centre
    numbers = code.to(tl.float32) * scale[:, :, None] - least[:, :, None]
    k = (unit * _BLOCK + plane * _HALF + part * 16)[:, :, None] + j
    tl.store(out_ptr + row[:, :, None] * K + k, numbers.to(out_ptr.dtype.element_ty), mask=mask)


def _expand_supers(weight: DeviceCodes, dtype: torch.dtype) -> torch.Tensor:
    inputs = weight.in_features
    out = torch.empty((weight.out_features, inputs), dtype=dtype, device=weight.codes.device)
    first = 0
    for part in weight.parts:
        assert part.supers is not None and part.is_tiled
        rows = len(part.codes)
        _expand_supers_kernel[(ceil_div(rows, ROWS), ceil_div(inputs, SUPER_UNITS * BLOCK))](
            part.codes, part.scales, out[first:], rows, inputs, SIX=part.supers.bits == 6, MINS=part.supers.has_mins,
            ROWS=ROWS, UNITS=SUPER_UNITS, num_warps=4,
        )
        first += rows
    return out


def expand(weight: DeviceCodes, dtype: torch.dtype) -> torch.Tensor:
    """The plain weight [O, I], inputs in their own order; computed in float32, rounded once."""
    if weight.supers is not None:
        return _expand_supers(weight, dtype)
    constants = find_constants(weight, torch.float32)  # no fast path: bound by memory
    outputs = weight.out_features
    out = torch.empty((outputs, weight.in_features), dtype=dtype, device=weight.codes.device)
    group = constants["GROUP"]
    constants["PIECE"] = min(HALF if weight.is_short or weight.is_tiled else BLOCK, group & -group)
    constants |= dict(ROWS=ROWS, WIDTH=WIDTH)
    for unused in ("FAST", "WHOLE", "SAME"):
        del constants[unused]
    _expand_kernel[(ceil_div(outputs, ROWS), ceil_div(weight.codes.shape[1], WIDTH))](
        *point_at(weight, torch.float32), weight.scales if weight.order is None else weight.order, out, outputs,
        HAS_ORDER=weight.order is not None, num_warps=4, **constants,
    )
    return out


def expand_and_multiply(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    return F.linear(x, expand(weight, x.dtype), bias)


def expand_and_multiply_float(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_FLOAT`. Some outputs at a time, as vocabularies have many."""
    shares = weight.split(MOST_EXPANDED)
    if len(shares) == 1:
        return multiply_plain(x, expand(weight, x.dtype))
    out = torch.empty((len(x), weight.out_features), dtype=torch.float32, device=x.device)
    for part, share in zip(out.split([share.out_features for share in shares], dim=1), shares, strict=True):
        part.copy_(multiply_plain(x, expand(share, x.dtype)))
    return out


def expand_and_gate(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate
) -> torch.Tensor | None:
    """See `CODED_GATED`; None, and nothing expanded, where separate kernels are as fast."""
    if gate.is_clamped or torch.cuda.get_device_capability(x.device)[0] != 9:
        return None
    if weight.in_features % 8 or not gated_product.takes(x, weight.out_features // 2, bias):
        return None
    return gated_product.gated_linear(x, expand(weight, x.dtype), bias, gate.kind)
