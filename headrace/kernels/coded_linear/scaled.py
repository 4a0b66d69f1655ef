"""FP8 products of rows in FP8: torch's scaled GEMM, and Triton's for block scales.

M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.fp8_triton import quantise_rows, quantise_rows_pdl
from headrace.kernels.launch import ceil_div

LEAST_SQUARE_ROWS = 4
"""The library's FP8 GEMM with block scales takes rows in multiples of these."""


@triton.jit(do_not_specialize=["M"])  # one compilation for all numbers of rows
def _blocks_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, M, N, K, G, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Tensor cores sum over a block of inputs alone, which bounds their rounding; blocks are added in float32."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row, row = x_ptr + m.to(tl.int64)[:, None] * K, codes_ptr + n.to(tl.int64)[None, :] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(0, G):
        at = group * BLOCK_K + k
        x = tl.load(x_row + at[None, :], mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
        codes = tl.load(row + at[:, None], mask=(at < K)[:, None] & (n < N)[None, :], other=0.0)
        x_scale = tl.load(x_scales_ptr + group * M + m, mask=m < M, other=0.0)
        scale = tl.load(scales_ptr + (n // ROWS) * G + group, mask=n < N, other=0.0).to(tl.float32)
        acc += tl.dot(x, codes) * x_scale[:, None] * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :]
    )


def multiply_blocks(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See `FP8_LINEAR`, for scales of groups of 32, 64 or 128 inputs and any number of outputs."""
    (num_rows, width), outputs = rows.codes.shape, weight.out_features
    out = torch.empty((num_rows, outputs), dtype=dtype, device=rows.codes.device)
    block_m = 16 if num_rows <= 16 else 64 if num_rows <= 256 else 128
    block_n = 64 if num_rows <= 256 else 128
    _blocks_kernel[(ceil_div(outputs, block_n), ceil_div(num_rows, block_m))](
        rows.codes, rows.scales, weight.codes, weight.scales, weight.scales if bias is None else bias, out, num_rows,
        outputs, width, len(rows.scales), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=weight.group, ROWS=weight.rows,
        HAS_BIAS=bias is not None, num_warps=4 if block_m < 128 else 8, num_stages=4,
    )
    return out


def multiply_rows(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See `FP8_LINEAR`, for a scale per output and per row. Scales are applied in the GEMM's epilogue; its sums
    are the tensor cores' own, as in `hopper` (``use_fast_accum``), 3 to 10 % faster than promoted ones."""
    out = torch._scaled_mm(
        rows.codes, weight.codes.t(), scale_a=rows.scales[:, None], scale_b=weight.scales.t(), out_dtype=dtype,
        use_fast_accum=True
    )
    return out if bias is None else out + bias


def multiply_squares(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See `FP8_LINEAR`, for scales of blocks of 128 x 128, on Hopper."""
    (codes, scales), num_rows = rows, rows.num_rows
    if missing := -num_rows % LEAST_SQUARE_ROWS:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(torch.float8_e4m3fn)
        scales = F.pad(scales, (0, missing))
    # scales [M, K / 128] are read column by column; those of the weight as [K / 128 rounded up to 4, N / 128], likewise
    depth = weight.scales.shape[1]
    tables = F.pad(weight.scales, (0, -depth % 4))
    out = F.scaled_mm(
        codes, weight.codes.t(), scales.t(), F.ScalingType.BlockWise1x128, tables.t(),
        F.ScalingType.BlockWise128x128, output_dtype=dtype
    )[:num_rows]
    return out if bias is None else out + bias


Product = Callable[[Fp8Rows, DeviceCodes, torch.Tensor | None, torch.dtype], torch.Tensor]


def round_and_multiply(
    product: Product, x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `CODED_LINEAR`: by a product of `FP8_LINEAR`."""
    has_pdl = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    quantise = quantise_rows_pdl if has_pdl else quantise_rows
    return product(quantise(x, weight.group if weight.num_groups > 1 else 0), weight, bias, x.dtype)


linear_rows, linear_blocks, linear_squares = (
    partial(round_and_multiply, product) for product in (multiply_rows, multiply_blocks, multiply_squares)
)
