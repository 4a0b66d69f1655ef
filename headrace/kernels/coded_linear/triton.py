"""Triton's products with coded weights for few rows, with dependent launch where the device has it: a GEMV on CUDA
cores and a GEMM on tensor cores. M rows of x, N outputs, K inputs, S splits.

Sums are float32 in a fixed order. Codes become numbers of x's dtype or, in the GEMV, float32.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.decode import INTEGERS, decode_pairs, power_of, scale_pairs, subtract_pairs, widen
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, LIFT, POWER_GROUP, DeviceCodes
from headrace.kernels.coded_linear.pieces import find_constants, load_tables, multiply, point_at
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.linear.triton import _sum_splits_kernel

SKINNY_OUTPUTS = 64
LEAST_PROGRAMS = 264
"""Programs that fill a large GPU twice."""
GEMV_BYTES, GEMV_ROW_BYTES, LONG_ROW_BYTES = 16384, 4096, 2048
"""Of a tile of codes; of a row in it, where that is the whole row, and where it is not."""
_BLOCK, _HALF = tl.constexpr(BLOCK), tl.constexpr(HALF)
_ONE = tl.constexpr(127 + LIFT)
"""1, as powers of two are kept."""


@triton.jit
def _load_codes(codes_ptr, n, chunk, N, STRIDE, W: tl.constexpr, EVEN: tl.constexpr):
    """Bytes [outputs, chunks, W]; read once, hence evicted first."""
    byte = (chunk * W)[:, None] + tl.arange(0, W)[None, :]
    at = codes_ptr + n[:, None, None] * STRIDE + byte[None, :, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(
        at, mask=(n < N)[:, None, None] & (byte < STRIDE)[None, :, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _add_chunks(
    sums, numbers, weight_ptrs, x_ptr, x_stride, n, k, N, M: tl.constexpr, K, G, GROUP: tl.constexpr,
    SHARED: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr, W: tl.constexpr
):
    """``sums`` (one [outputs] per row of x) plus the products of ``numbers`` [outputs, chunks, W], inputs from each
    ``k`` on. A chunk shares a scale and a zero point: these multiply its sums."""
    row, is_row, first = n[:, None], (n < N)[:, None], k[None, :]
    if POWERS:
        words = tl.load(weight_ptrs[1] + (row // SHARED) * G + first // _BLOCK, mask=is_row & (first < K), other=0)
        scale = power_of((words >> (first % _BLOCK // W * 8)) & 255)
    else:
        scale, zero = load_tables(weight_ptrs, row, is_row, first, K, G, GROUP, SHARED, PAIRS, HAS_ZEROS, INTEGERS)
    inner = k[:, None] + tl.arange(0, W)[None, :]
    new_sums = ()
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * x_stride + inner, mask=inner < K, other=0.0).to(tl.float32)
        part = tl.sum(numbers * x[None, :, :], axis=2)
        if HAS_ZEROS:
            part -= zero * tl.sum(x, axis=1)[None, :]
        part = tl.where(is_row & (first < K), part * scale, 0.0)
        new_sums = new_sums + (sums[m] + tl.sum(part, axis=1),)  # noqa: RUF005 (no starred tuples in Triton)
    return new_sums


@triton.jit
def _add_tile(
    sums, codes, weight_ptrs, x_ptr, x_stride, n, chunk, N, M: tl.constexpr, K, G, GROUP: tl.constexpr,
    SHARED: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, FAST: tl.constexpr, W: tl.constexpr
):
    """``sums`` plus the products of a tile of bytes [outputs, chunks, W]."""
    if SHORT:
        if not FAST:
            low, high = decode_pairs(codes, weight_ptrs[3], KIND)
        elif POWERS:
            one = tl.full([1, 1, 1], _ONE, tl.int32)
            low, high = scale_pairs(codes, one, one, tl.bfloat16, True)
        else:
            zero = tl.zeros([1, 1, 1], tl.float32)
            low, high = subtract_pairs(codes, zero, zero, weight_ptrs[3], KIND, tl.bfloat16, True)
        k = chunk * W // _HALF * _BLOCK + chunk * W % _HALF
        sums = _add_chunks(
            sums, low.to(tl.float32), weight_ptrs, x_ptr, x_stride, n, k, N, M, K, G, GROUP, SHARED, POWERS, PAIRS,
            HAS_ZEROS, W
        )
        sums = _add_chunks(
            sums, high.to(tl.float32), weight_ptrs, x_ptr, x_stride, n, k + _HALF, N, M, K, G, GROUP, SHARED, POWERS,
            PAIRS, HAS_ZEROS, W
        )
    else:
        sums = _add_chunks(
            sums, widen(codes, tl.float32, FAST).to(tl.float32), weight_ptrs, x_ptr, x_stride, n, chunk * W, N, M, K, G,
            GROUP, SHARED, POWERS, PAIRS, HAS_ZEROS, W
        )
    return sums


@triton.jit
def _gemv_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, out_ptr, x_stride, N, M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, K, G,
    STRIDE, GROUP: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr, POWERS: tl.constexpr,
    PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr, FAST: tl.constexpr, WIDTH: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    weight_ptrs = (codes_ptr, scales_ptr, zeros_ptr, values_ptr)
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([BLOCK_N], tl.float32),)  # noqa: RUF005
    # codes, which no kernel writes, are asked for before the previous kernel has ended, and a tile ahead of their use
    codes = _load_codes(codes_ptr, n, chunk, N, STRIDE, WIDTH, EVEN)
    wait_for_previous(PDL)
    for _ in range(CHUNKS * WIDTH, STRIDE, CHUNKS * WIDTH):
        following = _load_codes(codes_ptr, n, chunk + CHUNKS, N, STRIDE, WIDTH, EVEN)
        sums = _add_tile(
            sums, codes, weight_ptrs, x_ptr, x_stride, n, chunk, N, M, K, G, GROUP, SHARED, KIND, SHORT, POWERS, PAIRS,
            HAS_ZEROS, FAST, WIDTH
        )
        codes = following
        chunk += CHUNKS
    sums = _add_tile(
        sums, codes, weight_ptrs, x_ptr, x_stride, n, chunk, N, M, K, G, GROUP, SHARED, KIND, SHORT, POWERS, PAIRS,
        HAS_ZEROS, FAST, WIDTH
    )
    for m in tl.static_range(M):
        total = sums[m]
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M", "each"])  # one compilation for all numbers of rows of a tile
def _skinny_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, values_ptr, bias_ptr, out_ptr, x_stride, M, N, each,
    IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, K, G, STRIDE, GROUP: tl.constexpr,
    SHARED: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr, POWERS: tl.constexpr, PAIRS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, WHOLE: tl.constexpr, SAME: tl.constexpr, FAST: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row, start = n.to(tl.int64), split * each * _BLOCK  # of blocks, so that Triton knows it is a multiple
    wait_for_previous(PDL)
    total, _ = multiply(
        x_ptr, m, x_stride, m < M, (codes_ptr, scales_ptr, zeros_ptr, values_ptr), row, row, n < N, start,
        tl.minimum(start + each * _BLOCK, K), False, K, G, STRIDE, GROUP, SHARED, KIND, SHORT, POWERS, PAIRS, HAS_ZEROS,
        WHOLE, SAME, FAST, WIDTH, ROWS, OUTPUTS
    )
    mask = (n < N)[:, None] & (m < M)[None, :]
    if not IS_SPLIT:
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # partial sums [S, M, N], to be added in order
        tl.store(out_ptr + (split * M + m).to(tl.int64)[None, :] * N + n[:, None], total, mask=mask)


def _order(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """x in the weight's order of inputs, which lie next to one another."""
    if weight.order is not None:
        return x.index_select(1, weight.order)
    return x if x.stride(1) == 1 else x.contiguous()


@dataclass(frozen=True)
class GemvTile:
    """A program reads ``outputs`` rows, ``chunks`` of each at a time."""

    outputs: int
    chunks: int


def choose_gemv_tile(num_outputs: int, row_bytes: int, width: int) -> GemvTile:
    """Fewer outputs a program where there would be less than 512 programs, some four per SM of an H200."""
    bytes_each = min(GEMV_ROW_BYTES if row_bytes <= GEMV_ROW_BYTES else LONG_ROW_BYTES, next_power_of_2(row_bytes))
    outputs = GEMV_BYTES // bytes_each
    while outputs > 1 and ceil_div(num_outputs, outputs) < 512:
        outputs //= 2
    return GemvTile(outputs, max(1, bytes_each // width))


def gemv(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, *, pdl: bool = False,
    dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `CODED_LINEAR`; compiled for each number of rows. ``dtype`` of the result, x's by default."""
    x, outputs, stride = _order(x, weight), weight.out_features, weight.codes.shape[1]
    out = torch.empty((x.shape[0], outputs), dtype=dtype or x.dtype, device=x.device)
    constants = find_constants(weight, x.dtype)
    width = constants["WIDTH"] = min(HALF if weight.is_short else BLOCK, constants["GROUP"] & -constants["GROUP"])
    if weight.has_powers:
        width = constants["WIDTH"] = POWER_GROUP
    del constants["WHOLE"], constants["SAME"]
    tile = choose_gemv_tile(outputs, stride, width)
    _gemv_kernel[(ceil_div(outputs, tile.outputs),)](
        x, *point_at(weight, x.dtype), x if bias is None else bias, out, x.stride(0), outputs, M=x.shape[0],
        BLOCK_N=tile.outputs, CHUNKS=tile.chunks,
        EVEN=outputs % tile.outputs == 0 and stride % (tile.chunks * width) == 0, HAS_BIAS=bias is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl, **constants,
    )
    return out


def skinny(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, splits: int | None = None, *, pdl: bool = False,
    dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `CODED_LINEAR`. Inputs are split among programs where outputs give too few. ``dtype`` of the result, x's by
    default."""
    sums = _multiply_few(x, weight, bias, splits, pdl=pdl, dtype=dtype)
    return sums if sums.dim() == 2 else add_splits(sums, bias, dtype or x.dtype, pdl=pdl)


def gemv_float(x: torch.Tensor, weight: DeviceCodes, *, pdl: bool = False) -> torch.Tensor:
    """See `CODED_FLOAT`."""
    return gemv(x, weight, None, pdl=pdl, dtype=torch.float32)


def skinny_float(x: torch.Tensor, weight: DeviceCodes, *, pdl: bool = False) -> torch.Tensor:
    """See `CODED_FLOAT`."""
    return skinny(x, weight, None, pdl=pdl, dtype=torch.float32)


def add_splits(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, pdl: bool) -> torch.Tensor:
    """Partial sums [S, M, N] float32, and a bias [N], in order: [M, N] in ``dtype``."""
    num_splits, rows, outputs = sums.shape
    out = torch.empty((rows, outputs), dtype=dtype, device=sums.device)
    _sum_splits_kernel[(rows, ceil_div(outputs, 512))](
        sums, out if bias is None else bias, out, rows, N=outputs, SPLITS=num_splits, BLOCK=512,
        HAS_BIAS=bias is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    return out


def skinny_sums(x: torch.Tensor, weight: DeviceCodes, *, pdl: bool = False) -> torch.Tensor:
    """See `CODED_SUMS`."""
    return _multiply_few(x, weight, None, None, pdl=pdl)


def _multiply_few(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, splits: int | None, *, pdl: bool,
    dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The product [M, N] in ``dtype`` (x's by default) with its bias, or partial sums [S, M, N] float32 without."""
    x, outputs = _order(x, weight), weight.out_features
    rows, width = x.shape
    tile_rows = next(size for size in (16, 32, 64, 128) if rows <= size or size == 128)
    tiles = ceil_div(outputs, SKINNY_OUTPUTS) * ceil_div(rows, tile_rows)
    if splits is None:
        splits = 1
        while tiles * splits < LEAST_PROGRAMS and width // (2 * splits) >= 4 * BLOCK:
            splits *= 2
    shape, kept = ((splits, rows, outputs), torch.float32) if splits > 1 else ((rows, outputs), dtype or x.dtype)
    out = torch.empty(shape, dtype=kept, device=x.device)
    _skinny_kernel[(ceil_div(outputs, SKINNY_OUTPUTS), splits, ceil_div(rows, tile_rows))](
        x, *point_at(weight, x.dtype), x if bias is None else bias, out, x.stride(0), rows, outputs,
        ceil_div(width, splits * BLOCK), HAS_BIAS=bias is not None, IS_SPLIT=splits > 1, ROWS=tile_rows,
        OUTPUTS=SKINNY_OUTPUTS, PDL=pdl, num_stages={16: 5, 32: 5, 64: 4}.get(tile_rows, 3), num_warps=4,
        launch_pdl=pdl, **find_constants(weight, x.dtype),
    )
    return out


gemv_pdl, skinny_pdl = partial(gemv, pdl=True), partial(skinny, pdl=True)
skinny_sums_pdl = partial(skinny_sums, pdl=True)
gemv_float_pdl, skinny_float_pdl = partial(gemv_float, pdl=True), partial(skinny_float, pdl=True)
