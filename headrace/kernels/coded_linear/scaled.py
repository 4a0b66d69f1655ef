"""FP8 products of rows that are rounded to FP8: torch's scaled GEMM, and Triton's for block scales.

M rows of x, N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from headrace.kernels.block_scaled.reference import LARGEST
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.launch import ceil_div, next_power_of_2

MOST_CODE = tl.constexpr(LARGEST)
LEAST_SQUARE_ROWS = 4
"""The library's FP8 GEMM with block scales takes rows in multiples of these."""


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, x_stride, K, G, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, NUM_GROUPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    groups = tl.reshape(x, [NUM_GROUPS, BLOCK_K // NUM_GROUPS])
    scale = tl.max(tl.abs(groups), axis=1) / MOST_CODE
    scale = tl.where(scale > 0, scale, 1.0)
    codes = tl.minimum(tl.maximum(groups / scale[:, None], -MOST_CODE), MOST_CODE)
    tl.store(codes_ptr + row * K + k, tl.reshape(codes, [BLOCK_K]).to(codes_ptr.dtype.element_ty), mask=k < K)
    group = tl.program_id(1) * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    tl.store(scales_ptr + row * G + group, scale, mask=group < G)


def quantise_rows(x: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """See `QUANTISE_ROWS`; ``group`` is a power of two."""
    rows, width = x.shape
    num_groups = ceil_div(width, group) if group else 1
    block = group * min(8, next_power_of_2(num_groups)) if group else next_power_of_2(width)
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    _quantise_kernel[(rows, ceil_div(width, block))](
        x, codes, scales, x.stride(0), width, num_groups, GROUP=group, BLOCK_K=block,
        NUM_GROUPS=block // group if group else 1, num_warps=4 if block <= 4096 else 8,
    )
    return codes, scales


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
        x_scale = tl.load(x_scales_ptr + m * G + group, mask=m < M, other=0.0)
        scale = tl.load(scales_ptr + (n // ROWS) * G + group, mask=n < N, other=0.0).to(tl.float32)
        acc += tl.dot(x, codes) * x_scale[:, None] * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :]
    )


def multiply_blocks(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`, for scales of groups of 32, 64 or 128 inputs and any number of outputs."""
    (rows, width), outputs = x.shape, weight.out_features
    codes, scales = quantise_rows(x if x.stride(1) == 1 else x.contiguous(), weight.group)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    block_m = 16 if rows <= 16 else 64 if rows <= 256 else 128
    block_n = 64 if rows <= 256 else 128
    _blocks_kernel[(ceil_div(outputs, block_n), ceil_div(rows, block_m))](
        codes, scales, weight.codes, weight.scales, weight.scales if bias is None else bias, out, rows, outputs, width,
        scales.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=weight.group, ROWS=weight.rows,
        HAS_BIAS=bias is not None, num_warps=4 if block_m < 128 else 8, num_stages=4,
    )
    return out


def multiply_rows(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`, for a scale per output. Scales are applied in the GEMM's epilogue; its sums
    are not cut short (``use_fast_accum``)."""
    codes, scales = quantise_rows(x if x.stride(1) == 1 else x.contiguous())
    out = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=scales, scale_b=weight.scales.t(), out_dtype=x.dtype, use_fast_accum=False
    )
    return out if bias is None else out + bias


def multiply_squares(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`, for scales of blocks of 128 x 128, on Hopper."""
    rows = x.shape[0]
    if rows % LEAST_SQUARE_ROWS:
        x = F.pad(x, (0, 0, 0, -rows % LEAST_SQUARE_ROWS))
    codes, scales = quantise_rows(x if x.stride(1) == 1 else x.contiguous(), weight.group)
    # scales [M, K / 128] are read column by column; those of the weight as [K / 128 rounded up to 4, N / 128], likewise
    depth = weight.scales.shape[1]
    tables = F.pad(weight.scales, (0, -depth % 4))
    out = F.scaled_mm(
        codes, weight.codes.t(), scales.t().contiguous().t(), F.ScalingType.BlockWise1x128, tables.t(),
        F.ScalingType.BlockWise128x128, output_dtype=x.dtype
    )[:rows]
    return out if bias is None else out + bias
