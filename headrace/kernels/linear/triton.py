"""Matrix products with few rows, bound by reading the weight once: a GEMV for 1 or 2 rows, a skinny GEMM for up to 8.

M rows of x, N outputs, K inputs, S splits. Sums are float32 in a fixed order: the same input gives the same output.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.linear.reference import linear_into_float

SKINNY_ROWS = 8
MOST_GEMV_WEIGHTS = 2**24
"""Above it a GEMV of two rows is bound by arithmetic."""
MOST_SKINNY_WEIGHTS = 2**26
"""Above it torch's GEMM already reads at memory bandwidth for two rows and more."""
MOST_FLOAT_OUTPUTS = 2**13
"""Of products stored as float32: routers and compressors, no LM heads, which torch's GEMM reads as fast."""

LEAST_ADDED_ROWS, LEAST_ADDED_INPUTS = 1024, 4096
"""From so many rows and inputs on, the GEMM's epilogue adds the product to the residual; with fewer inputs reading the
residual there costs more than the norm saves."""


def gemv_rows(num_weights: int) -> int:
    """The most rows for which the GEMV is fastest; measured on an H200."""
    return 2 if num_weights <= MOST_GEMV_WEIGHTS else 1


@dataclass(frozen=True)
class Tile:
    """A program reads ``outputs`` by ``inputs`` of the weight at a time; ``splits`` programs share the inputs
    (split-K)."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1
    splits: int = 1


def gemv_tile(num_outputs: int, num_inputs: int) -> Tile:
    """Up to 16,384 values of the weight (32 KiB in half precision) in flight per program; fewer outputs where there
    would be less than 512 programs, some four per SM of an H200."""
    inputs = min(4096 if num_inputs <= 4096 else 2048, next_power_of_2(num_inputs))
    outputs = max(1, 16384 // inputs)
    while outputs > 1 and ceil_div(num_outputs, outputs) < 512:
        outputs //= 2
    return Tile(outputs, inputs, 4 if outputs * inputs <= 8192 else 8)


def skinny_tile(num_outputs: int, num_inputs: int) -> Tile:
    """Split the inputs where outputs alone give too few programs to fill the device."""
    programs = ceil_div(num_outputs, 32)
    splits = 1
    while programs * splits < 256 and num_inputs // (2 * splits) >= 512:
        splits *= 2
    return Tile(32, 256, 4, num_stages=4, splits=splits)


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    multiply_rows(
        tl.program_id(0), x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, N, K, M, BLOCK_N, BLOCK_K, STAGES, HAS_BIAS,
        PDL,
    )


@triton.jit
def multiply_rows(
    block, x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    """A block of outputs of a GEMV; waits for the kernel before."""
    # The weight is loaded with "evict_first": it is read once, and must not push activations out of L2. Products are
    # multiplied and summed on CUDA cores: tensor cores would pad 1 or 2 rows to 16.
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + n.to(tl.int64)[:, None] * K  # int64: a weight may have more than 2**31 values
    # [BLOCK_N] float32 for each of the M rows; a tuple, since Triton cannot index a tensor in registers
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([BLOCK_N], tl.float32),)  # noqa: RUF005 (no starred tuples in Triton)
    if K <= BLOCK_K:
        # the whole row fits: load the weight before the previous kernel has ended (no kernel writes it, so no race)
        weight = tl.load(
            weight_row + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
        wait_for_previous(PDL)
        for m in tl.static_range(M):
            x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
            total = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
            _store_sum(total, bias_ptr, out_ptr, m, n, N, HAS_BIAS)
    else:
        wait_for_previous(PDL)
        # x is read after the wait; M rows share each weight tile
        for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = at + k < K
            mask = (n < N)[:, None] & inside[None, :]
            weight = tl.load(
                weight_row + (at + k)[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            new_sums = ()
            for m in tl.static_range(M):
                x = tl.load(x_ptr + m * x_stride + at + k, mask=inside, other=0.0).to(tl.float32)
                new_sums = new_sums + (sums[m] + tl.sum(weight * x[None, :], axis=1),)  # noqa: RUF005
            sums = new_sums
        for m in tl.static_range(M):
            _store_sum(sums[m], bias_ptr, out_ptr, m, n, N, HAS_BIAS)


@triton.jit
def _store_sum(total, bias_ptr, out_ptr, m, n, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store ``total`` [BLOCK_N] float32, plus the bias, as part of row ``m`` of out [M, N]."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _skinny_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, x_stride, M, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + n.to(tl.int64)[None, :] * K  # read as [BLOCK_K, BLOCK_N], transposed
    # inputs per split, a multiple of BLOCK_K; the last split may have fewer, even none
    each = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_previous(PDL)
    for at in tl.range(split * each, tl.minimum((split + 1) * each, K), BLOCK_K):
        inside = at + k < K
        x = tl.load(
            x_ptr + m[:, None] * x_stride + (at + k)[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0
        )
        weight = tl.load(
            weight_row + (at + k)[:, None], mask=inside[:, None] & (n < N)[None, :], other=0.0,
            eviction_policy="evict_first"
        )
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    mask = (m < M)[:, None] & (n < N)[None, :]
    if SPLITS == 1:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + m[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # partial sums [S, M, N] float32; `_sum_splits_kernel` adds them in order
        tl.store(partial_ptr + (split * M + m)[:, None] * N + n[None, :], acc, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["M"])  # its rows are addressed one by one
def _sum_splits_kernel(
    partial_ptr, bias_ptr, out_ptr, M, N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr
):
    m = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    # not atomics: the order of additions, and so the result, is fixed
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + (split * M + m) * N + n, mask=n < N, other=0.0)
    _store_sum(total, bias_ptr, out_ptr, m, n, N, HAS_BIAS)


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None, *,
    dtype: torch.dtype | None = None, pdl: bool = False
) -> torch.Tensor:
    """`LINEAR` for few rows, see `gemv_rows`: compiled for each number of them. ``dtype``: of the output, x's if
    None."""
    (rows, width), outputs = x.shape, weight.shape[0]
    tile = tile or gemv_tile(outputs, width)
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    _gemv_kernel[(ceil_div(outputs, tile.outputs),)](
        x, weight, x if bias is None else bias, out, x.stride(0), N=outputs, K=width, M=rows, BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        STAGES=tile.num_stages, HAS_BIAS=bias is not None, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )
    return out


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None, *,
    dtype: torch.dtype | None = None, pdl: bool = False
) -> torch.Tensor:
    """`LINEAR` for up to 16 rows, the least of a tensor-core tile; fewer are padded with zeros."""
    (rows, width), outputs = x.shape, weight.shape[0]
    tile = tile or skinny_tile(outputs, width)
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    partial_sums = (
        torch.empty((tile.splits, rows, outputs), dtype=torch.float32, device=x.device) if tile.splits > 1 else out
    )
    extra = dict(HAS_BIAS=bias is not None, PDL=pdl, launch_pdl=pdl)
    _skinny_kernel[(ceil_div(outputs, tile.outputs), tile.splits)](
        x, weight, x if bias is None else bias, out, partial_sums, x.stride(0), rows, N=outputs, K=width, BLOCK_M=16,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs, SPLITS=tile.splits, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **extra,
    )
    if tile.splits > 1:
        _sum_splits_kernel[(rows, ceil_div(outputs, 512))](
            partial_sums, x if bias is None else bias, out, rows, N=outputs, SPLITS=tile.splits, BLOCK=512, **extra
        )
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, pdl: bool = False) -> torch.Tensor:
    """See `LINEAR`. More rows than the skinny GEMM takes, and operands that it cannot read, go to torch."""
    rows = x.shape[0]
    for_gemv = gemv_rows(weight.numel())
    most = for_gemv if weight.numel() > MOST_SKINNY_WEIGHTS else SKINNY_ROWS
    if rows > most or rows == 0 or not weight.is_contiguous() or x.stride(1) != 1:
        return F.linear(x, weight, bias)
    return (gemv if rows <= for_gemv else skinny)(x, weight, bias, pdl=pdl)


def linear_sums(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None, *,
    pdl: bool = False
) -> torch.Tensor | None:
    """See `LINEAR_SUMS`."""
    if residual is None or bias is not None or x.shape[0] < LEAST_ADDED_ROWS or x.shape[1] < LEAST_ADDED_INPUTS:
        return linear(x, weight, bias, pdl=pdl)
    # in place: the sum is formed in the GEMM's float32 accumulator and rounded once
    residual.addmm_(x, weight.t())
    return None


def linear_float(x: torch.Tensor, weight: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """See `LINEAR_FLOAT`. More rows than the skinny GEMM takes, and operands that it cannot read, go to torch."""
    rows, width = x.shape
    can_read = width % 8 == 0 and weight.is_contiguous() and x.stride(1) == 1
    if not 0 < rows <= SKINNY_ROWS or weight.shape[0] > MOST_FLOAT_OUTPUTS or not can_read:
        return linear_into_float(x, weight)
    multiply = gemv if rows <= gemv_rows(weight.numel()) else skinny
    return multiply(x, weight, None, dtype=torch.float32, pdl=pdl)


linear_float_pdl = partial(linear_float, pdl=True)
linear_pdl, linear_sums_pdl = partial(linear, pdl=True), partial(linear_sums, pdl=True)
