"""Products of a few to a few hundred rows on Hopper's tensor cores (Gluon: TMA, mbarriers, wgmma), with dependent
launch: the first weight tiles, which no kernel writes, are fetched into shared memory before the previous kernel has
ended.

M rows of x, N outputs (a gate and its up count once), K inputs, S splits of K. Sums are float32 in a fixed order: the
same input gives the same output. Refuses: many rows, where torch's GEMM is faster; one or two, where the GEMV is.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.linear import rows as few_rows
from headrace.kernels.linear import wave_product
from headrace.kernels.linear.triton import gemv_rows, linear_pdl, linear_sums_pdl

GATES = {"": 0, "silu": 1, "gelu_tanh": 2}
ELEMENTS = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.uint8: gl.uint8, torch.float8_e4m3fn: gl.float8e4nv,
}
_fetch_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in Triton 3.8


@dataclass(frozen=True)
class Tile:
    """A program computes ``rows`` of x by ``outputs`` (of gate and of up, if gated), ``inputs`` at a time. A ring of
    ``stages`` such tiles is in shared memory: stages * (rows + outputs, twice if gated) * inputs * 2 bytes, at most
    227 KiB. ``splits`` programs share the inputs (split-K) and store a partial sum each."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    splits: int = 1
    num_warps: int = 4


@gluon.jit
def _fetch_weight(weight_desc, bar, tile, n, k, pred, GATE: gl.constexpr):
    """Start the copy of outputs from ``n`` and inputs from ``k`` on to ``tile``, if ``pred``; it arrives at ``bar``."""
    if GATE > 0:  # see `_describe_gated`
        _fetch_tile(weight_desc, [n // 8, 0, 0, k], bar, tile, pred=pred)
    else:
        _fetch_tile(weight_desc, [n, k], bar, tile, pred=pred)


@gluon.jit
def _gate(gate, up, GATE: gl.constexpr):
    """``activation(gate) * up`` in float32, as `rowwise.triton.apply_gate`."""
    if GATE == 2:
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (gl.exp(2.0 * u) + 1.0)) * up
    else:
        return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit(do_not_specialize=["M", "K", "depth"])
def _product_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, M, N, K, depth, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, REFILL: gl.constexpr, GATE: gl.constexpr,
    HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    WIDE: gl.constexpr = 2 * BLOCK_N if GATE > 0 else BLOCK_N
    # what TMA delivers to a stage's barrier: a tile of x and one of the weight, in half precision
    stage_bytes: gl.constexpr = (BLOCK_M + WIDE) * BLOCK_K * 2
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    tiles = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005 (no starred lists in Gluon)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()  # TMA must see the initialised barriers
    # The last block overlaps the one before: TMA fills rows beyond the end slowly, so compute some rows twice instead.
    # Both programs store the same values there.
    # With fewer than BLOCK_M rows, TMA reads zeros and `_store` masks.
    m0 = gl.maximum(gl.minimum(gl.program_id(0) * BLOCK_M, M - BLOCK_M), 0)
    n0, split = gl.program_id(1) * BLOCK_N, gl.program_id(2)
    k0 = split * depth
    # 0 or less for a split beyond the inputs, which stores zeros
    steps = gl.cdiv(gl.minimum(depth, K - k0), BLOCK_K)
    # Both tiles of a stage arrive at one barrier, which expects their bytes together. Weights before the wait: no
    # kernel writes them. x after it: the previous kernel may still be writing.
    for stage in gl.static_range(STAGES):
        mbarrier.expect(bars.index(stage), stage_bytes, pred=stage < steps)
        _fetch_weight(weight_desc, bars.index(stage), tiles.index(stage), n0, k0 + stage * BLOCK_K, stage < steps, GATE)
    wait_for_previous(True)
    for stage in gl.static_range(STAGES):
        _fetch_tile(x_desc, [m0, k0 + stage * BLOCK_K], bars.index(stage), x_tiles.index(stage), pred=stage < steps)
    # the weight is the left operand (wgmma M is 64), so that few rows of x fill the instruction: acc is [WIDE, BLOCK_M]
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    acc = gl.zeros([WIDE, BLOCK_M], gl.float32, mma)
    for step in range(steps):
        at = step % STAGES
        # the parity of a barrier's phase flips each time its stage is filled
        mbarrier.wait(bars.index(at), (step // STAGES) & 1)
        tile, x_tile = tiles.index(at).reshape([WIDE, BLOCK_K]), x_tiles.index(at).permute((1, 0))
        acc = warpgroup_mma(tile, x_tile, acc, is_async=True)
        acc, tile, x_tile = warpgroup_mma_wait(num_outstanding=1, deps=(acc, tile, x_tile))
        if REFILL:  # num_outstanding=1: the previous step's wgmma has finished reading its stage, so refill that one
            later = step + (STAGES - 1)
            free, has_more = later % STAGES, (step > 0) & (later < steps)
            mbarrier.expect(bars.index(free), stage_bytes, pred=has_more)
            _fetch_weight(weight_desc, bars.index(free), tiles.index(free), n0, k0 + later * BLOCK_K, has_more, GATE)
            _fetch_tile(x_desc, [m0, k0 + later * BLOCK_K], bars.index(free), x_tiles.index(free), pred=has_more)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if GATE > 0:  # rows alternate 8 of gate, 8 of up (`_describe_gated`): a thread holds a gate and its up
        gate, up = gl.split(acc.reshape([BLOCK_N // 8, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
        gate, up = gate.reshape([BLOCK_N, BLOCK_M]), up.reshape([BLOCK_N, BLOCK_M])
        if HAS_BIAS:
            layout: gl.constexpr = gate.type.layout
            gate += _load_bias(bias_ptr, n0, N, BLOCK_N, layout)
            up += _load_bias(bias_ptr + N, n0, N, BLOCK_N, layout)
        acc = _gate(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), GATE)  # rounded as if stored
    elif HAS_BIAS:
        # of partial sums the first one has the bias
        acc += _load_bias(bias_ptr, n0, N * (split == 0).to(gl.int32), BLOCK_N, mma)
    # 16 bytes a thread and store: four float32 partial sums, or eight half-precision values
    _store(
        acc.to(out_ptr.dtype.element_ty), out_ptr, m0, n0, split, M, N, BLOCK_M, BLOCK_N, 4 if SPLIT else 8, num_warps
    )


@gluon.jit
def _load_bias(bias_ptr, n0, N, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    return gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _store(
    values, out_ptr, m0, n0, split, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDE: gl.constexpr,
    num_warps: gl.constexpr
):
    """Store ``values`` [outputs, rows] transposed, to out [M, N] or [S, M, N], so that stores along N coalesce."""
    lanes: gl.constexpr = min(32, BLOCK_N // WIDE)
    layout: gl.constexpr = gl.BlockedLayout([WIDE, 1], [lanes, 32 // lanes], [1, num_warps], [0, 1])
    values = gl.convert_layout(values, layout)
    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    at = (split * M + m).to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out_ptr + at, values, mask=(m < M)[None, :] & (n < N)[:, None])


@cache
def tile_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), ELEMENTS[dtype])


def describe_tiles(matrix: torch.Tensor, rows: int, inputs: int) -> TensorDescriptor:
    """A descriptor by which tiles of ``rows`` by ``inputs`` of a matrix are copied."""
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, inputs], tile_layout((rows, inputs), matrix.dtype)
    )


def _describe_gated(weight: torch.Tensor, outputs: int, inputs: int) -> TensorDescriptor:
    """A 4-D descriptor of a weight [2F, K] whose tiles alternate eight rows of gate with the same eight rows of up.
    Needs F to be a multiple of 8."""
    total, width = weight.shape
    block = (outputs // 8, 2, 8, inputs)
    shape, strides = [total // 16, 2, 8, width], [8 * width, total // 2 * width, width, 1]
    return TensorDescriptor(weight, shape, strides, list(block), tile_layout(block, weight.dtype))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, activation: str = ""
) -> torch.Tensor:
    """``x @ weight.T + bias`` [M, N] in x's dtype, followed by the gated ``activation`` if given; with splits, partial
    sums [S, M, N] float32. x and weight satisfy `is_describable`."""
    (rows, inputs), gated = x.shape, bool(activation)
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    # inputs of a split, in whole tiles: the last split may have fewer, or none
    depth = ceil_div(ceil_div(inputs, tile.inputs), tile.splits) * tile.inputs
    is_split = tile.splits > 1
    assert not (is_split and gated), "splits store plain partial sums"
    shape = (tile.splits, rows, outputs) if is_split else (rows, outputs)
    out = torch.empty(shape, dtype=torch.float32 if is_split else x.dtype, device=x.device)
    describe_weight = _describe_gated if gated else describe_tiles
    _product_kernel[(ceil_div(rows, tile.rows), ceil_div(outputs, tile.outputs), tile.splits)](
        describe_tiles(x, tile.rows, tile.inputs), describe_weight(weight, tile.outputs, tile.inputs),
        x if bias is None else bias, out, rows, outputs, inputs, depth, BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs, STAGES=tile.stages, SPLIT=is_split, REFILL=depth > tile.stages * tile.inputs,
        GATE=GATES[activation], HAS_BIAS=bias is not None, num_warps=tile.num_warps, launch_pdl=True,
    )
    return out


MOST_ROWS = 256
MOST_SPLITS = 4
LARGE_WEIGHT = 2**24
"""Above it another read of the weight costs more than computing padding rows."""
NUM_SMS = 132
"""Of an H100 or H200 (SXM)."""


def _tile_rows(rows: int, num_weights: int) -> int:
    """Rows of a tile for up to 64 rows."""
    if num_weights > LARGE_WEIGHT:
        return min(64, max(16, next_power_of_2(rows)))
    return 16 if rows < 32 else 32


@cache
def choose_tile(rows: int, outputs: int, inputs: int) -> Tile | None:
    """For a plain product; None where torch is as fast. This and the next two were measured on an H200, but for the
    tiles of 128 rows."""
    num_weights = outputs * inputs
    if rows > (64 if num_weights > LARGE_WEIGHT else MOST_ROWS):
        return None
    if rows <= 64:
        block = _tile_rows(rows, num_weights)
        return Tile(block, 64, 128, 8 if block <= 32 else 6)
    if rows <= 128:
        return Tile(64, 64, 128, 6)
    tile = Tile(64, 128, 64, 8)
    # of more programs than run at once the last ones take as long again
    is_one_wave = ceil_div(rows, tile.rows) * ceil_div(outputs, tile.outputs) <= NUM_SMS
    return tile if is_one_wave else Tile(128, 128, 64, 6, num_warps=8)


@cache
def choose_sums_tile(rows: int, outputs: int, inputs: int) -> Tile | None:
    """For `LINEAR_SUMS`: split-K where outputs alone do not fill the device. None as for `choose_tile`."""
    num_weights = outputs * inputs
    if rows > (128 if num_weights > LARGE_WEIGHT else MOST_ROWS):
        return None
    tile = Tile(min(32, _tile_rows(rows, num_weights)), 64, 128, 8) if rows <= 64 else Tile(64, 64, 128, 6)
    programs, splits = ceil_div(rows, tile.rows) * ceil_div(outputs, tile.outputs), 1
    # double the splits while all programs still run at once and each split has at least two tiles of inputs
    while splits < MOST_SPLITS and 2 * splits * programs <= NUM_SMS and 4 * splits * tile.inputs <= inputs:
        splits *= 2
    return replace(tile, splits=splits) if programs * splits <= NUM_SMS else None


@cache
def choose_gated_tile(rows: int, num_weights: int) -> Tile | None:
    """For `GATED_LINEAR`; None where two separate kernels are as fast."""
    is_large = num_weights > LARGE_WEIGHT
    if rows > (128 if is_large else MOST_ROWS):
        return None
    if rows <= 64:
        block = _tile_rows(rows, num_weights)
        return Tile(block, 64, 128, 5 if block <= 32 else 4)
    if is_large:
        return Tile(128, 128, 64, 4, num_warps=8)
    return Tile(64, 64, 128, 4) if rows <= 128 else Tile(64, 64, 64, 4)


def is_describable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether TMA can read both: rows must begin at multiples of 16 bytes, which are 8 half-precision values."""
    return (
        weight.is_contiguous() and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `LINEAR`."""
    out = few_rows.multiply(x, weight, bias)
    if out is not None:
        return out
    rows, num_weights = x.shape[0], weight.numel()
    takes_tiles = rows > gemv_rows(num_weights) and is_describable(x, weight)
    tile = choose_tile(rows, *weight.shape) if takes_tiles else None
    if tile is None:
        out = wave_product.linear(x, weight, bias)
        return linear_pdl(x, weight, bias) if out is None else out
    return multiply(x, weight, bias, tile)


def linear_sums(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    """See `LINEAR_SUMS`."""
    rows, num_weights = x.shape[0], weight.numel()
    # only this path adds to the residual; with fewer rows the norm does
    if rows > MOST_ROWS:
        return linear_sums_pdl(x, weight, bias, residual)
    takes_sums = rows > gemv_rows(num_weights) and is_describable(x, weight)
    tile = choose_sums_tile(rows, *weight.shape) if takes_sums else None
    return linear(x, weight, bias) if tile is None else multiply(x, weight, bias, tile)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """See `GATED_LINEAR`."""
    out = few_rows.multiply(x, weight, bias, activation)
    if out is not None:
        return out
    rows, num_weights = x.shape[0], weight.numel()
    tile = choose_gated_tile(rows, num_weights) if rows > gemv_rows(num_weights) and is_describable(x, weight) else None
    # `_describe_gated` takes gate and up in groups of eight rows
    return None if tile is None or weight.shape[0] % 16 else multiply(x, weight, bias, tile, activation)
