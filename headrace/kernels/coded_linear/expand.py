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


def expand(weight: DeviceCodes, dtype: torch.dtype) -> torch.Tensor:
    """The plain weight [O, I], inputs in their own order; computed in float32, rounded once."""
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
