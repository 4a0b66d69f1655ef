"""Triton's products with coded weights for few rows. M rows of x, N outputs, K inputs, S splits.

A code is made a number of x's dtype in registers: ``(value - zero) * scale`` in float32, rounded once. Sums are float32
in a fixed order.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import BLOCK, DeviceCodes
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear.triton import _sum_splits_kernel

INTEGERS, FLOATS, LOOKED_UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
GEMV_OUTPUTS, SKINNY_OUTPUTS = 8, 64
LEAST_PROGRAMS = 264
"""Programs that fill a large GPU twice."""


@triton.jit
def _table(table_ptr, n, k, first, N, G, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, mask):
    """Scales or zeros of outputs ``n`` and inputs ``k``, both two-dimensional; one per output where the ``WIDTH``
    inputs from ``first`` on, those of ``k``, share a group."""
    row = (n // ROWS).to(tl.int64) * G
    if GROUP % WIDTH == 0:
        values = tl.load(table_ptr + row + first // GROUP, mask=n < N, other=0.0).to(tl.float32)
    else:
        values = tl.load(table_ptr + row + k // GROUP, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _numbers(codes, values_ptr, KIND: tl.constexpr):
    """The values of codes, float32."""
    if KIND == LOOKED_UP:
        return tl.load(values_ptr + codes.to(tl.int32))
    return codes.to(tl.float32)


@triton.jit
def _scale(
    values, scales_ptr, zeros_ptr, n, k, first, N, K, G, GROUP: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, HAS_ZEROS: tl.constexpr,
):
    """Numbers [n, k] or [k, n] less zeros, times scales; 0 beyond the edges."""
    mask = (n < N) & (k < K)
    if HAS_ZEROS:
        values -= _table(zeros_ptr, n, k, first, N, G, GROUP, ROWS, WIDTH, mask)
    return tl.where(mask, values * _table(scales_ptr, n, k, first, N, G, GROUP, ROWS, WIDTH, mask), 0.0)


@triton.jit
def _store_sum(total, bias_ptr, out_ptr, m, n, N, HAS_BIAS: tl.constexpr):
    """Store ``total`` [BLOCK_N] float32, plus the bias, as part of row ``m`` of out [M, N]."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _gemv_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, out_ptr, x_stride, code_stride, N, K, G,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KIND: tl.constexpr, SHORT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    WIDTH: tl.constexpr = BLOCK_K // 2 if SHORT else BLOCK_K
    place = tl.arange(0, WIDTH)[None, :]
    row = codes_ptr + n.to(tl.int64) * code_stride
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([BLOCK_N], tl.float32),)  # noqa: RUF005 (no starred tuples in Triton)
    for at in tl.range(0, K, BLOCK_K):
        if SHORT:
            packed = tl.load(row + at // 2 + place, mask=n < N, other=0, eviction_policy="evict_first")
        else:
            packed = tl.load(row + at + place, mask=(n < N) & (at + place < K), other=0.0)
        for half in tl.static_range(2 if SHORT else 1):
            first = at + half * WIDTH
            k = first + place
            codes = ((packed >> (4 * half)) & 15) if SHORT else packed
            weight = _scale(
                _numbers(codes, values_ptr, KIND), scales_ptr, zeros_ptr, n, k, first, N, K, G, GROUP, ROWS,
                WIDTH, HAS_ZEROS
            ).to(x_ptr.dtype.element_ty).to(tl.float32)
            new_sums = ()
            for m in tl.static_range(M):
                x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
                new_sums = new_sums + (sums[m] + tl.sum(weight * x, axis=1),)  # noqa: RUF005
            sums = new_sums
    out_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for m in tl.static_range(M):
        _store_sum(sums[m], bias_ptr, out_ptr, m, out_n, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])  # one compilation for all numbers of rows
def _skinny_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, out_ptr, partial_ptr, x_stride, code_stride, M, N, K,
    G, each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):
    split = tl.program_id(1)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    m = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    WIDTH: tl.constexpr = BLOCK_K // 2 if SHORT else BLOCK_K
    place = tl.arange(0, WIDTH)
    row = codes_ptr + n.to(tl.int64) * code_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(split * each, tl.minimum((split + 1) * each, K), BLOCK_K):
        if SHORT:
            packed = tl.load(row + at // 2 + place[:, None], mask=n < N, other=0, eviction_policy="evict_first")
        else:
            packed = tl.load(row + at + place[:, None], mask=(n < N) & (at + place[:, None] < K), other=0.0)
        for half in tl.static_range(2 if SHORT else 1):
            first = at + half * WIDTH
            k = first + place
            codes = ((packed >> (4 * half)) & 15) if SHORT else packed
            weight = _scale(
                _numbers(codes, values_ptr, KIND), scales_ptr, zeros_ptr, n, k[:, None], first, N, K, G, GROUP,
                ROWS, WIDTH, HAS_ZEROS
            ).to(x_ptr.dtype.element_ty)
            x = tl.load(x_ptr + m.to(tl.int64) * x_stride + k[None, :], mask=(m < M) & (k < K)[None, :], other=0.0)
            acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    mask = (m < M) & (n < N)
    if SPLITS == 1:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + m.to(tl.int64) * N + n, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # partial sums [S, M, N]; `_sum_splits_kernel` adds them in order
        tl.store(partial_ptr + (split * M + m).to(tl.int64) * N + n, acc, mask=mask)


def _operands(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x in the weight's order of inputs, and the pointers that kernels take; absent ones are any tensor."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    elif x.stride(1) != 1:
        x = x.contiguous()
    others = (weight.zeros, weight.values, bias)
    return x, [weight.codes, weight.scales, *(weight.scales if other is None else other for other in others)]


def _constants(weight: DeviceCodes, bias: torch.Tensor | None) -> dict[str, object]:
    is_float = weight.code is Code.E4M3
    return {
        # one group for all inputs is a multiple of any width
        "GROUP": weight.group if weight.scales.shape[1] > 1 else 1 << 30, "ROWS": weight.rows,
        "SHORT": weight.is_short, "HAS_ZEROS": weight.zeros is not None, "HAS_BIAS": bias is not None,
        "KIND": FLOATS.value if is_float else INTEGERS.value if weight.values is None else LOOKED_UP.value,
    }


def gemv(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`; compiled for each number of rows."""
    x, pointers = _operands(x, weight, bias)
    (rows, width), outputs = x.shape, weight.out_features
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _gemv_kernel[(ceil_div(outputs, GEMV_OUTPUTS),)](
        x, *pointers, out, x.stride(0), weight.codes.stride(0), outputs, width, weight.scales.shape[1], M=rows,
        BLOCK_N=GEMV_OUTPUTS, BLOCK_K=BLOCK if weight.is_short else 4 * BLOCK, num_warps=4,
        **_constants(weight, bias),
    )
    return out


def skinny(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, splits: int | None = None
) -> torch.Tensor:
    """See `CODED_LINEAR`. Inputs are split among programs where outputs give too few."""
    x, pointers = _operands(x, weight, bias)
    (rows, width), outputs = x.shape, weight.out_features
    block_m = next(size for size in (16, 32, 64) if rows <= size or size == 64)
    tiles = ceil_div(outputs, SKINNY_OUTPUTS) * ceil_div(rows, block_m)
    if splits is None:
        splits = 1
        while tiles * splits < LEAST_PROGRAMS and width // (2 * splits) >= 4 * BLOCK:
            splits *= 2
    each = ceil_div(width, splits * BLOCK) * BLOCK
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    partial_sums = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device) if splits > 1 else out
    _skinny_kernel[(ceil_div(outputs, SKINNY_OUTPUTS), splits, ceil_div(rows, block_m))](
        x, *pointers, out, partial_sums, x.stride(0), weight.codes.stride(0), rows, outputs, width,
        weight.scales.shape[1], each, BLOCK_M=block_m, BLOCK_N=SKINNY_OUTPUTS, BLOCK_K=BLOCK, SPLITS=splits,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
        **_constants(weight, bias),
    )
    if splits > 1:
        _sum_splits_kernel[(rows, ceil_div(outputs, 512))](
            partial_sums, x if bias is None else bias, out, rows, N=outputs, SPLITS=splits, BLOCK=512,
            HAS_BIAS=bias is not None, PDL=False
        )
    return out
