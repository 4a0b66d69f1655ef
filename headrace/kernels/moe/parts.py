"""Experts in MXFP4 for five to some hundred tokens on Hopper, by own CUDA C++ (``csrc/cuda/mxfp4_parts.cu``, which says
how it multiplies): pairs sorted by expert, their rows gathered as two parts in e4m3, gate and up with the activation,
its rows in parts, down, the sum over a token's choices.

T tokens, k choices, M = T * k pairs, X experts, D hidden size, F expert intermediate size; N outputs of a product (a
gate and its up count once), K its inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes
from headrace.kernels.coded_linear.hopper import GATES, NOT_GATED, Gated
from headrace.kernels.coded_linear.wide import SLACK_BYTES, describe_weight
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    describe_boxes,
    fallback,
    load_kernel,
)
from headrace.kernels.launch import ceil_div, count_tiles, next_power_of_2, wait_for_previous
from headrace.kernels.moe import CodedStack, count_rows
from headrace.kernels.moe.triton import group_pairs, sum_pairs
from headrace.kernels.rowwise import Gate

MOST_TILES = 1024
"""Of rows, of a launch."""
MOST_STAGES = 12


@dataclass(frozen=True)
class Tile:
    """A block multiplies ``rows`` rows (8, 16 or 32) by 64 * ``groups`` rows of the weight (2 to 4), with as many
    warpgroups. ``is_beside``: the parts of at most 16 rows are columns of one product."""

    rows: int
    groups: int
    is_beside: bool

    @property
    def stages(self) -> int:
        """Of the ring in shared memory, with 128 inputs each."""
        stage = self.rows * 2 * BLOCK + 64 * self.groups * HALF
        return min(MOST_STAGES, (MOST_BYTES - SLACK_BYTES - 8 * (MOST_TILES + 1)) // stage)


TILES = (Tile(8, 4, True), Tile(16, 4, False), Tile(32, 4, False))
"""With 48 rows experts of gpt-oss-20b take 238 us on an H200, and 206 by `sorted_rows`."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x_scales", "scales", "bias", "ends", "out")),
        *((name, c_int) for name in ("outputs", "inputs", "words")),
        *((name, c_float) for name in ("limit", "alpha", "up_offset")),
    )


class Parts(NamedTuple):
    """Rows as sums of two numbers in e4m3: ``codes`` [2, M, K] float8_e4m3fn, ``scales`` [M] float32, powers of two. A
    value is ``(codes[0] + codes[1]) * scales``."""

    codes: torch.Tensor
    scales: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _part_kernel(
    x_ptr, order_ptr, ends_ptr, codes_ptr, scales_ptr, x_stride, num_rows, D: tl.constexpr, TOP_K: tl.constexpr,
    X: tl.constexpr, BLOCK: tl.constexpr, GATHERS: tl.constexpr, PDL: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    if GATHERS:  # both on their way at once
        wait_for_previous(PDL)
        end = tl.load(ends_ptr + X - 1)
        source = (tl.load(order_ptr + row) // TOP_K).to(tl.int64)
    else:  # kernels before the one that made the rows have made the ends
        end = tl.load(ends_ptr + X - 1)
        source = row.to(tl.int64)
        wait_for_previous(PDL)
    if row < end:  # entries of pairs without an expert are arbitrary
        x = tl.load(x_ptr + source * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
        # The least power of two that makes the largest number at most 448 = 1.75 * 2**8, by its exponent; of zeros one
        # whose inverse is a float as well.
        bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) + 0x1FFFFF
        bits = tl.maximum((bits & 0x7F800000) - (8 << 23), 1 << 23)
        x *= ((254 << 23) - bits).to(tl.float32, bitcast=True)
        # Four bits, below 2**-6 multiples of 2**-9, both exact in e4m3; and what is left: of a bfloat16 number four
        # bits more, so that nothing is rounded. Codes are not converted back: Triton 3.6 exchanges numbers of a thread
        # there.
        short = (x * 512.0).to(tl.int32).to(tl.float32) * (1.0 / 512.0)
        four = (x.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
        high = tl.where(tl.abs(x) < 1.0 / 64.0, short, four)
        low = (x - high).to(codes_ptr.dtype.element_ty)
        at = codes_ptr + row.to(tl.int64) * D + column
        tl.store(at, high.to(codes_ptr.dtype.element_ty), mask=column < D)
        tl.store(at + num_rows.to(tl.int64) * D, low, mask=column < D)
        tl.store(scales_ptr + row, bits.to(tl.float32, bitcast=True))


def take_apart(
    x: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None = None, top_k: int = 1, *, pdl: bool = True
) -> Parts:
    """Rows x [M, K] bfloat16 in parts; with ``order`` [M] of `GROUP_PAIRS`, which with ``ends`` [X] is of tokens'
    ``top_k`` choices, rows of x [T, K] in the order of pairs. Those from the last end on are not written."""
    num_rows, width = len(x) if order is None else len(order), x.shape[1]
    codes = torch.empty((2, num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        _part_kernel[(num_rows,)](
            x, ends if order is None else order, ends, codes, scales, x.stride(0), num_rows, D=width, TOP_K=top_k,
            X=len(ends), BLOCK=next_power_of_2(width), GATHERS=order is not None, PDL=pdl, num_warps=8, launch_pdl=pdl,
        )
    return Parts(codes, scales)


@cache_compiled
def find_kernel(tile: Tile, gate: str, num_experts: int, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel(
        "mxfp4_parts", device, MOST_BYTES, ROWS=tile.rows, GROUPS=tile.groups, STAGES=tile.stages,
        BESIDE=int(tile.is_beside), GATE=GATES[gate], EXPERTS=num_experts, TILES=MOST_TILES,
    )


def multiply(
    x: Parts, weight: DeviceCodes, bias: torch.Tensor | None, ends: torch.Tensor, tile: Tile, gated: Gated = NOT_GATED
) -> torch.Tensor:
    """Rows x [M, K] times those experts of the stacked weight [X * N, K] whose they are (``ends`` [X] of
    `GROUP_PAIRS`), plus their bias, followed by the activation ``gated`` if it has a kind: [M, N] bfloat16. Rows from
    the last end on are not written. K is a multiple of 16, N of 8; at most `MOST_TILES` tiles."""
    num_rows, num_experts = x.codes.shape[1], len(ends)
    outputs = weight.out_features // num_experts // (2 if gated.kind else 1)
    out = torch.empty((num_rows, outputs), dtype=torch.bfloat16, device=ends.device)
    if not num_rows:
        return out
    call = _Call(
        x_scales=x.scales.data_ptr(), scales=weight.scales.data_ptr(), bias=address_of(bias), ends=ends.data_ptr(),
        out=out.data_ptr(), outputs=outputs, inputs=x.codes.shape[2], words=weight.scales.shape[1] // 4,
        limit=gated.limit, alpha=gated.alpha, up_offset=gated.up_offset,
    )
    width, tiles = 64 * tile.groups, count_tiles(num_rows, tile.rows, num_experts)
    assert tiles <= MOST_TILES, "they have no room"
    find_kernel(tile, gated.kind, num_experts, ends.device).launch(
        min(tiles * ceil_div(outputs, width // 2 if gated.kind else width), count_sms(ends.device)),
        128 * (tile.groups + 1), describe_boxes(x.codes, (2, tile.rows, BLOCK)),
        describe_weight(weight.codes, width, HALF, outputs if gated.kind else 0), call, is_dependent=True,
    )
    return out


def choose_tile(num_tokens: int, top_k: int, num_experts: int) -> Tile | None:
    """Enough rows for all pairs of nearly every expert, so that few matrices are read twice; None where other products
    are faster."""
    most = count_rows(num_tokens, top_k, num_experts)
    tile = next((tile for tile in TILES if most <= tile.rows), None)
    if tile is None or count_tiles(num_tokens * top_k, tile.rows, num_experts) > MOST_TILES:
        return None
    return tile


def takes(gate_up: DeviceCodes, down: DeviceCodes) -> bool:
    """Whether the products here take these stacked codes."""
    return all(
        codes.code is Code.E2M1 and codes.has_powers and codes.rows == 1 and codes.order is None
        and not codes.has_zeros and codes.in_features % 16 == 0
        for codes in (gate_up, down)
    )


@cache_compiled
def _can_compile(device: torch.device, num_experts: int, gate: str) -> bool:
    """Whether the kernels of all tiles can be compiled and loaded; if not, with a warning. All are, as no request may
    wait for a compiler."""
    with fallback("experts of some tokens are multiplied in bfloat16"):
        for tile, kind in product(TILES, ("", gate)):
            find_kernel(tile, kind, num_experts, device)
        return True
    return False


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate,
    tile: Tile | None = None,
) -> torch.Tensor | None:
    """See `CODED_EXPERTS`; None where the products do not take it. ``tile``: in place of the chosen one."""
    (num_tokens, top_k), width = ids.shape, x.shape[1]
    num_experts, gated = down[0].out_features // width, Gated(*gate)
    tile = tile or choose_tile(num_tokens, top_k, num_experts)
    if tile is None or not takes(gate_up[0], down[0]) or not _can_compile(x.device, num_experts, gated.kind):
        return None
    order, place, ends = group_pairs(ids, num_experts, pdl=True)
    inner = multiply(take_apart(x, ends, order, top_k), *gate_up, ends, tile, gated)
    out = multiply(take_apart(inner, ends), *down, ends, tile)
    return sum_pairs(out, place, weights, ids, None, pdl=True)
