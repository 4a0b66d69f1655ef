"""Products of coded weights and 17 to a few thousand rows on Hopper's tensor cores (Gluon: TMA, mbarriers, wgmma), with
dependent launch: FP8 weights with rows in FP8, and codes of 4 bits with plain rows. One weight for all rows, or experts
stacked, each with the rows sorted to it.

M rows, N outputs of a weight (a gate and its up count once), K inputs, X experts, S splits of K, G groups of `DEPTH`
inputs. Sums are float32 in a fixed order: the same input gives the same output, whatever the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

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

from headrace.kernels.coded_linear.decode import _SPREAD_E2M1, TWO_EXPONENTS
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.fp8_triton import quantise_rows
from headrace.kernels.coded_linear.scaled import round_and_multiply
from headrace.kernels.launch import ceil_div, count_tiles, next_power_of_2, wait_for_previous
from headrace.kernels.linear.hopper import describe_tiles, tile_layout

GATES = {"": 0, "silu": 1, "gelu_tanh": 2, "clamped": 3}
DEPTH = 128
"""Inputs of a tile, and of a group that shares a scale."""
_DEPTH = gl.constexpr(DEPTH)
LARGEST_CODE = gl.constexpr(448.0)
_fetch_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in Triton 3.8


@dataclass(frozen=True)
class Tile:
    """A program computes ``rows`` by ``outputs`` (of gate and of up, if gated). In shared memory, at most 227 KiB, is a
    ring of ``stages`` tiles of `DEPTH` inputs. ``splits`` programs share the inputs and store a partial sum each."""

    rows: int
    outputs: int
    stages: int
    splits: int = 1
    num_warps: int = 4


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find_group(ends_ptr, tile, X: gl.constexpr, BLOCK_X: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr):
    """As `moe.triton.find_tile`: ``(expert, first row, one past the expert's last row)`` of a tile of rows; beyond the
    last tile expert 0 and no rows."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    at = gl.arange(0, BLOCK_X, layout)
    end = gl.load(ends_ptr + at, mask=at < X, other=0)
    start = gl.load(ends_ptr + at - 1, mask=(at > 0) & (at < X), other=0)
    tiles = gl.where(at < X, (end - start + ROWS - 1) // ROWS, 0)
    expert = gl.sum(((gl.associative_scan(tiles, 0, _add) <= tile) & (at < X)).to(gl.int32), 0)
    tiles_before = gl.sum(gl.where(at < expert, tiles, 0), 0)
    first = gl.sum(gl.where(at == expert, start, 0), 0) + (tile - tiles_before) * ROWS
    last = gl.sum(gl.where(at == expert, end, 0), 0)
    is_there = expert < X
    return gl.where(is_there, expert, 0), gl.where(is_there, first, 0), gl.where(is_there, last, 0)


@gluon.jit
def _fetch_weight(weight_desc, bar, tile, row, k, pred, GATE: gl.constexpr):
    """Start to copy outputs from ``row`` and bytes from ``k`` on to ``tile``, if ``pred``. ``bar`` tells its end."""
    if GATE > 0:  # see `_describe_weight`
        _fetch_tile(weight_desc, [row // 8, 0, 0, k], bar, tile, pred=pred)
    else:
        _fetch_tile(weight_desc, [row, k], bar, tile, pred=pred)


@gluon.jit
def _fetch_rows(x_desc, bar, x_tiles, stage, m, k, pred, WIDTH: gl.constexpr, PIECES: gl.constexpr):
    """The same of rows: PIECES tiles of WIDTH inputs; two for a block of codes of 4 bits."""
    for piece in gl.static_range(PIECES):
        _fetch_tile(x_desc, [m, k + piece * WIDTH], bar, x_tiles.index(stage * PIECES + piece), pred=pred)


@gluon.jit
def _spread_powers(packed, low_power, high_power):
    """Bytes of two e2m1 codes times powers of two, as `decode.scale_pairs`."""
    low_power = gl.broadcast(low_power * TWO_EXPONENTS, packed)[0]
    high_power = gl.broadcast(high_power * TWO_EXPONENTS, packed)[0]
    return gl.inline_asm_elementwise(
        _SPREAD_E2M1, "=r,=r,h,r,r,r,r", [packed, low_power, high_power], dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2
    )


@gluon.jit
def _decode(tile, words, operand: gl.constexpr, WIDE: gl.constexpr):
    """Numbers of the low and the high codes of a block of e2m1, [WIDE, 64] each, as operands of products; ``words``
    [WIDE] have the powers of two of its 4 groups."""
    packed = tile.reshape([WIDE, _DEPTH // 2]).load(operand)
    words = gl.convert_layout(words, gl.SliceLayout(1, operand))[:, None]
    is_first = (gl.arange(0, _DEPTH // 2, gl.SliceLayout(0, operand)) < 32)[None, :]
    low_power = gl.where(is_first, words & 255, (words >> 8) & 255)
    high_power = gl.where(is_first, (words >> 16) & 255, (words >> 24) & 255)
    return _spread_powers(packed, low_power, high_power)


@gluon.jit
def _add_codes(acc, tile, x_tiles, at, words, mma: gl.constexpr, WIDE: gl.constexpr):
    """``acc`` [WIDE, ROWS] plus the product of a stage of e2m1 codes, decoded in registers, and plain rows."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    low, high = _decode(tile, words, operand, WIDE)
    acc = warpgroup_mma(low, x_tiles.index(2 * at).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(high, x_tiles.index(2 * at + 1).permute((1, 0)), acc, is_async=True)
    acc, low, high = warpgroup_mma_wait(num_outstanding=0, deps=(acc, low, high))
    return acc


@gluon.jit
def _gate(gate, up, limit, alpha, up_offset, GATE: gl.constexpr):
    """``activation(gate) * up`` in float32, as `rowwise.triton.apply_gate`."""
    if GATE == 3:
        gate = gl.minimum(gate, limit)
        return gate / (1.0 + gl.exp(-alpha * gate)) * (gl.minimum(gl.maximum(up, -limit), limit) + up_offset)
    elif GATE == 2:
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (gl.exp(2.0 * u) + 1.0)) * up
    else:
        return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _finish(
    acc, bias_ptr, out_ptr, out_scales_ptr, order_ptr, factors_ptr, n, is_output, m0, first, last, n0, split, M, N,
    limit, alpha, up_offset, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, GATE: gl.constexpr, SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_FACTORS: gl.constexpr, IS_FP8: gl.constexpr, num_warps: gl.constexpr,
):
    """Apply bias, activation and routing weights to ``acc`` [WIDE, ROWS], of the weight's rows ``n``, and store it."""
    if HAS_BIAS:
        acc += gl.load(bias_ptr + n, mask=is_output, other=0.0).to(gl.float32)[:, None]
    if GATE > 0:  # rows alternate 8 of gate, 8 of up (`_describe_weight`): a thread holds a gate and its up
        gate, up = gl.split(acc.reshape([OUTPUTS // 8, 2, 8, ROWS]).permute((0, 2, 3, 1)))
        acc = _gate(
            gate.reshape([OUTPUTS, ROWS]), up.reshape([OUTPUTS, ROWS]), limit, alpha, up_offset, GATE
        )
    if IS_FP8:  # a group of outputs is a tile
        largest = gl.max(gl.abs(acc), 0)
        scale = gl.where(largest > 0, largest / LARGEST_CODE, 1.0)
        acc = acc / scale[None, :]
        m = m0 + gl.arange(0, ROWS, scale.type.layout)
        gl.store(out_scales_ptr + (n0 // OUTPUTS) * M + m, scale, mask=(m >= first) & (m < last))
    values = acc.to(out_ptr.dtype.element_ty)
    # 16 bytes a thread and store
    WIDTH: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    lanes: gl.constexpr = min(32, OUTPUTS // WIDTH)
    layout: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [lanes, 32 // lanes], [1, num_warps], [0, 1])
    values = gl.convert_layout(values, layout)
    m = m0 + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    column = n0 + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    is_there = (m >= first) & (m < last)
    if HAS_FACTORS:  # rows are pairs in sorted order: each is stored in its own place, times its routing weight
        m = gl.load(order_ptr + m, mask=is_there, other=0)
        values = values * gl.load(factors_ptr + m, mask=is_there, other=0.0)[None, :]
    if SPLIT:
        m += split * M
    gl.store(
        out_ptr + m.to(gl.int64)[None, :] * N + column[:, None], values, mask=is_there[None, :] & (column < N)[:, None]
    )


@gluon.jit(do_not_specialize=["M", "depth"])
def _product_kernel(
    x_desc, x_scales_ptr, weight_desc, scales_ptr, bias_ptr, ends_ptr, order_ptr, factors_ptr, out_ptr, out_scales_ptr,
    M, N, K, G, depth, limit, alpha, up_offset, X: gl.constexpr, BLOCK_X: gl.constexpr, ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr, CODED: gl.constexpr, X_GROUPS: gl.constexpr, W_GROUPS: gl.constexpr,
    SHARED: gl.constexpr, SPLIT: gl.constexpr, GATE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_FACTORS: gl.constexpr,
    IS_FP8: gl.constexpr, EACH: gl.constexpr, num_warps: gl.constexpr,
):
    PROMOTES: gl.constexpr = X_GROUPS or W_GROUPS
    WIDE: gl.constexpr = 2 * OUTPUTS if GATE > 0 else OUTPUTS
    # codes of 4 bits take half a byte an input, plain rows two, in two pieces; all of a stage arrives at one barrier
    PIECES: gl.constexpr = 2 if CODED else 1
    WIDTH: gl.constexpr = _DEPTH // PIECES
    stage_bytes: gl.constexpr = WIDE * WIDTH + ROWS * _DEPTH * PIECES
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PIECES, ROWS, WIDTH], x_desc.layout)
    tiles = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005 (no starred lists in Gluon)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()  # TMA must see the initialised barriers
    n0, split = gl.program_id(0) * OUTPUTS, gl.program_id(2)
    k0 = split * depth
    x0 = k0  # of a row of x; EACH outputs have inputs of their own in it
    if EACH > 0:
        x0 += n0 // EACH * K
    steps = gl.cdiv(gl.minimum(depth, K - k0), _DEPTH)
    if X == 0:
        # The last block of rows overlaps the one before, as TMA fills rows beyond the end slowly. Weights are asked for
        # before the wait: no kernel writes them; x after it.
        m0 = gl.maximum(gl.minimum(gl.program_id(1) * ROWS, M - ROWS), 0)
        expert, first, last = 0, 0, M
        for stage in gl.static_range(STAGES):
            mbarrier.expect(bars.index(stage), stage_bytes, pred=stage < steps)
            _fetch_weight(
                weight_desc, bars.index(stage), tiles.index(stage), n0, k0 // PIECES + stage * WIDTH, stage < steps,
                GATE
            )
        wait_for_previous(True)
    else:
        wait_for_previous(True)
        expert, first, last = _find_group(ends_ptr, gl.program_id(1), X, BLOCK_X, ROWS, num_warps)
        m0 = first
        steps = gl.where(first < last, steps, 0)
    ROWS_EACH: gl.constexpr = 2 if GATE > 0 else 1
    row0 = expert * (ROWS_EACH * N)
    for stage in gl.static_range(STAGES):
        if X > 0:
            mbarrier.expect(bars.index(stage), stage_bytes, pred=stage < steps)
            _fetch_weight(
                weight_desc, bars.index(stage), tiles.index(stage), row0 + n0, k0 // PIECES + stage * WIDTH,
                stage < steps, GATE
            )
        _fetch_rows(x_desc, bars.index(stage), x_tiles, stage, m0, x0 + stage * _DEPTH, stage < steps, WIDTH, PIECES)
    # the weight is the left operand (wgmma M is 64), so that few rows of x fill the instruction
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 32 // PIECES]
    )
    r = gl.arange(0, WIDE, gl.SliceLayout(1, mma))
    m = m0 + gl.arange(0, ROWS, gl.SliceLayout(0, mma))
    column = n0 + r
    n = row0 + column
    if GATE > 0:
        column = n0 + r // 16 * 8 + r % 8
        n = row0 + column + r // 8 % 2 * N
    is_output, is_row = column < N, (m >= first) & (m < last)
    scale_at = scales_ptr + (n // SHARED).to(gl.int64) * G
    acc = gl.zeros([WIDE, ROWS], gl.float32, mma)
    zeros = gl.zeros([WIDE, ROWS], gl.float32, mma)
    group0, x_group0 = k0 // _DEPTH, x0 // _DEPTH
    # scales in FP8 are asked for a step ahead, as those of x are elsewhere for each: a trip to the L2 takes a step
    if X_GROUPS:
        next_x_scale = gl.load(x_scales_ptr + x_group0 * M + m, mask=is_row & (steps > 0), other=0.0)
    if W_GROUPS:
        next_scale = gl.load(scale_at + group0, mask=is_output & (steps > 0), other=0.0)
    for step in range(steps):
        at = step % STAGES
        has_next = step + 1 < steps
        if X_GROUPS:
            x_scale = next_x_scale
            next_x_scale = gl.load(x_scales_ptr + (x_group0 + step + 1) * M + m, mask=is_row & has_next, other=0.0)
        if W_GROUPS:
            scale = next_scale
            next_scale = gl.load(scale_at + group0 + step + 1, mask=is_output & has_next, other=0.0)
        if CODED:
            scale = gl.load(scale_at + group0 + step, mask=is_output, other=0)  # before the tile is waited for
        mbarrier.wait(bars.index(at), (step // STAGES) & 1)
        later = step + STAGES
        if CODED:
            acc = _add_codes(acc, tiles.index(at), x_tiles, at, scale, mma, WIDE)
        elif PROMOTES:
            part = warpgroup_mma(
                tiles.index(at).reshape([WIDE, _DEPTH]), x_tiles.index(at).permute((1, 0)), zeros, use_acc=False,
                is_async=True
            )
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            if W_GROUPS:
                part = part * scale[:, None]
            if X_GROUPS:
                part = part * x_scale[None, :]
            acc += part
        else:
            later = step + STAGES - 1  # of the step before, which has ended
            acc = warpgroup_mma(
                tiles.index(at).reshape([WIDE, _DEPTH]), x_tiles.index(at).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        free, has_more = later % STAGES, (later >= STAGES) & (later < steps)
        mbarrier.expect(bars.index(free), stage_bytes, pred=has_more)
        _fetch_weight(
            weight_desc, bars.index(free), tiles.index(free), row0 + n0, k0 // PIECES + later * WIDTH, has_more, GATE
        )
        _fetch_rows(x_desc, bars.index(free), x_tiles, free, m0, x0 + later * _DEPTH, has_more, WIDTH, PIECES)
    if not CODED:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if not W_GROUPS:
            acc = acc * gl.load(scale_at, mask=is_output, other=0.0)[:, None]
        if not X_GROUPS:
            acc = acc * gl.load(x_scales_ptr + m, mask=is_row, other=0.0)[None, :]
    _finish(
        acc, bias_ptr, out_ptr, out_scales_ptr, order_ptr, factors_ptr, n, is_output, m0, first, last, n0, split, M, N,
        limit, alpha, up_offset, ROWS, OUTPUTS, GATE, SPLIT, HAS_BIAS, HAS_FACTORS, IS_FP8, num_warps
    )


class Gated(NamedTuple):
    """The activation of a product's two halves: a kind of `GATES`, and the numbers of a clamped one."""

    kind: str = ""
    limit: float = 0.0
    alpha: float = 0.0
    up_offset: float = 0.0


class Sorted(NamedTuple):
    """Rows that are sorted by expert: ``ends`` [X] int32 as of `GROUP_PAIRS`. With ``order`` [M] and ``factors`` [M]
    float32, row m is stored at ``order[m]``, times the factor there."""

    ends: torch.Tensor
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None


NOT_GATED = Gated()


def _describe_weight(codes: torch.Tensor, outputs: int, inputs: int, gated_outputs: int) -> TensorDescriptor:
    """A descriptor of a weight's bytes [rows, bytes]. Where gated, its tiles alternate eight rows of gate with the same
    eight of up, ``gated_outputs`` further on; that is a multiple of 8."""
    if not gated_outputs:
        return describe_tiles(codes, outputs, inputs)
    total, width = codes.shape
    block = (outputs // 8, 2, 8, inputs)
    shape, strides = [(total - gated_outputs) // 8, 2, 8, width], [8 * width, gated_outputs * width, width, 1]
    return TensorDescriptor(codes, shape, strides, list(block), tile_layout(block, codes.dtype))


def multiply(
    x: torch.Tensor | Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, tile: Tile, *,
    gated: Gated = NOT_GATED, groups: Sorted | None = None, is_fp8: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | Fp8Rows:
    """``x @ weight.T + bias`` [M, N], followed by the activation ``gated`` if it has a kind; with splits, partial sums
    [S, M, N] float32; ``is_fp8``: in FP8, with a scale for each ``tile.outputs`` of a row. FP8 weights take `Fp8Rows`,
    e2m1 codes plain rows. Rows with the inputs of several groups [M, G * K] give each group its share of the outputs.
    With ``groups`` the weight has X experts, stacked: row m is multiplied by its expert's."""
    rows, x_scales = x if isinstance(x, Fp8Rows) else (x, x)
    (num_rows, inputs), codes, scales = rows.shape, weight.codes, weight.scales
    input_groups, inputs = inputs // weight.in_features, weight.in_features
    coded = codes.dtype == torch.uint8
    width = DEPTH // 2 if coded else DEPTH
    num_experts, tiles = 0, ceil_div(num_rows, tile.rows)
    ends = order = factors = None
    if groups:
        ends, order, factors = groups
        num_experts = len(ends)
        tiles = count_tiles(num_rows, tile.rows, num_experts)
    outputs = weight.out_features // max(1, num_experts) // (2 if gated.kind else 1)
    out, out_scales = _allocate(
        (num_rows, outputs), tile, torch.float32 if factors is not None else dtype, rows.device, is_fp8=is_fp8
    )
    scales = scales.view(torch.int32) if weight.has_powers else scales

    def given(tensor: torch.Tensor | None) -> torch.Tensor:
        return out if tensor is None else tensor  # the kernel does not read stand-ins

    _product_kernel[(ceil_div(outputs, tile.outputs), tiles, tile.splits)](
        describe_tiles(rows, tile.rows, width), x_scales,
        _describe_weight(codes, tile.outputs, width, outputs if gated.kind else 0), scales, given(bias), given(ends),
        given(order), given(factors), out, given(out_scales), num_rows, outputs, inputs, scales.shape[1],
        ceil_div(ceil_div(inputs, DEPTH), tile.splits) * DEPTH, *gated[1:], X=num_experts,
        BLOCK_X=next_power_of_2(max(1, num_experts)), ROWS=tile.rows, OUTPUTS=tile.outputs, STAGES=tile.stages,
        CODED=coded, X_GROUPS=not coded and x_scales.dim() == 2, W_GROUPS=not coded and scales.shape[1] > 1,
        SHARED=weight.rows, SPLIT=tile.splits > 1, GATE=GATES[gated.kind], HAS_BIAS=bias is not None,
        HAS_FACTORS=factors is not None, IS_FP8=is_fp8, EACH=outputs // input_groups if input_groups > 1 else 0,
        num_warps=tile.num_warps, launch_pdl=True,
    )
    return out if out_scales is None else Fp8Rows(out, out_scales)


def _allocate(
    shape: tuple[int, int], tile: Tile, dtype: torch.dtype, device: torch.device, *, is_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `multiply` fills: its output, and scales of FP8."""
    rows, outputs = shape
    if is_fp8:
        scales = torch.empty((ceil_div(outputs, tile.outputs), rows), dtype=torch.float32, device=device)
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), scales
    if tile.splits > 1:
        return torch.empty((tile.splits, *shape), dtype=torch.float32, device=device), None
    return torch.empty(shape, dtype=dtype, device=device), None


NUM_SMS = 132
"""Of an H100 or H200 (SXM)."""
SHARED_BYTES = 227 * 1024
"""Of an SM there, for the tiles of all its programs."""
MOST_SPLITS = 4
LARGE_OUTPUTS = 8192


@cache
def choose_tile(rows: int, outputs: int) -> Tile:
    """For a plain product. This and the next two were measured on an H200, at 32, 64 and 256 rows."""
    is_large = outputs >= LARGE_OUTPUTS
    if rows <= 64:
        block = 32 if rows <= 32 else 64
        return Tile(block, 128, 6) if is_large else Tile(block, 64, 8)
    return Tile(128, 64, 6) if outputs <= LARGE_OUTPUTS // 2 else Tile(128, 128, 4, num_warps=8)


@cache
def choose_sums_tile(rows: int, outputs: int, inputs: int) -> Tile:
    """For `FP8_SUMS`: split-K while all programs run at once and each has at least four tiles of inputs."""
    tile = choose_tile(rows, outputs)
    programs, splits = ceil_div(rows, tile.rows) * ceil_div(outputs, tile.outputs), 1
    resident = NUM_SMS * (SHARED_BYTES // ((tile.rows + tile.outputs) * DEPTH * tile.stages))
    while splits < MOST_SPLITS and 2 * splits * programs <= resident and 8 * splits * DEPTH <= inputs:
        splits *= 2
    return replace(tile, splits=splits)


@cache
def choose_gated_tile(rows: int, *, has_groups: bool) -> Tile:
    """For `FP8_GATED`. With groups, sums of 128 x 128 outputs would need more registers than there are."""
    if rows > 64 and not has_groups:
        return Tile(128, 128, 3, num_warps=8)
    return Tile(32 if rows <= 32 else 64, 128, 4, num_warps=8)


def multiply_rows(rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `FP8_LINEAR`."""
    tile = choose_tile(rows.num_rows, weight.out_features)
    out = multiply(rows, weight, bias, tile, dtype=dtype)
    assert isinstance(out, torch.Tensor)
    return out


def multiply_groups(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `GROUPED_CODED`; rows are rounded to FP8 with a scale for each 128 inputs."""
    rows = quantise_rows(x.flatten(1), DEPTH, pdl=True)
    out = multiply(rows, weight, None, Tile(32 if len(x) <= 32 else 64, 64, 8), dtype=x.dtype)
    assert isinstance(out, torch.Tensor)
    return out


def multiply_row_sums(rows: Fp8Rows, weight: DeviceCodes, dtype: torch.dtype) -> torch.Tensor:
    """See `FP8_SUMS`."""
    out = multiply(rows, weight, None, choose_sums_tile(rows.num_rows, *weight.codes.shape), dtype=dtype)
    assert isinstance(out, torch.Tensor)
    return out


def multiply_gated_rows(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype, activation: str
) -> torch.Tensor:
    """See `FP8_GATED`."""
    tile = choose_gated_tile(rows.num_rows, has_groups=weight.num_groups > 1)
    out = multiply(rows, weight, bias, tile, gated=Gated(activation), dtype=dtype)
    assert isinstance(out, torch.Tensor)
    return out


linear_rows = partial(round_and_multiply, multiply_rows)
