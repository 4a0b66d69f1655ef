"""Rows in FP8, made in one pass by Triton: of plain rows, of the norm before a product, of a gated activation.

Values are rounded to the rows' dtype before they are rounded to FP8, as they would be if they were stored between."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.block_scaled import LARGEST
from headrace.kernels.coded_linear import reference
from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES, add_splits, apply_gate, count_warps

MOST_CODE, LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(reference.LEAST_SCALE)
GROUPS_AT_ONCE = 8


@triton.jit
def store_rows(
    x, codes_ptr, scales_ptr, row, block, num_rows, D, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Store ``x`` [BLOCK] float32, columns from ``block`` * BLOCK on, in FP8: with a scale per GROUP (0: one)."""
    NUM: tl.constexpr = BLOCK // GROUP if GROUP else 1
    groups = tl.reshape(x, [NUM, BLOCK // NUM])
    scale = tl.max(tl.abs(groups), axis=1) / MOST_CODE
    scale = tl.where(scale > LEAST_SCALE, scale, 1.0)
    codes = groups * tl.div_rn(1.0, scale)[:, None]  # rounded above the largest code by an ulp at most, and back by FP8
    column = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        codes_ptr + row.to(tl.int64) * D + column, tl.reshape(codes, [BLOCK]).to(codes_ptr.dtype.element_ty),
        mask=column < D
    )
    group = block * NUM + tl.arange(0, NUM)
    tl.store(scales_ptr + group.to(tl.int64) * num_rows + row, scale, mask=group * (BLOCK // NUM) < D)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, x_stride, num_rows, D, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
    store_rows(x, codes_ptr, scales_ptr, row, block, num_rows, D, GROUP, BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    x_ptr, codes_ptr, scales_ptr, x_stride, num_rows, D, limit, alpha, up_offset, GATE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    # x [T, 2 * D]: gate in the first half of a row, up in the second
    at = x_ptr + row.to(tl.int64) * x_stride + column
    gate = tl.load(at, mask=column < D, other=0.0).to(tl.float32)
    up = tl.load(at + D, mask=column < D, other=0.0).to(tl.float32)
    x = apply_gate(gate, up, limit, alpha, up_offset, GATE).to(x_ptr.dtype.element_ty).to(tl.float32)
    store_rows(x, codes_ptr, scales_ptr, row, block, num_rows, D, GROUP, BLOCK)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, codes_ptr, scales_ptr, x_stride, split_stride, residual_stride, num_splits,
    num_rows, eps, offset, D: tl.constexpr, HAS_X: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):
    """As `rowwise.triton._add_rms_norm_kernel`; without HAS_X there is nothing to add."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < D
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous(PDL)
    dtype = residual_ptr.dtype.element_ty
    residual_at = residual_ptr + row.to(tl.int64) * residual_stride + column
    total = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        x_at = x_ptr + row.to(tl.int64) * x_stride + column
        x = add_splits(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), x_at, split_stride, num_splits, inside)
        total += x.to(dtype).to(tl.float32)
        total = total.to(dtype)
        tl.store(residual_at, total, mask=inside)  # in place: this program alone reads and writes the row
        total = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / D + eps)
    normed = (total * rstd * weight).to(dtype).to(tl.float32)
    store_rows(normed, codes_ptr, scales_ptr, row, 0, num_rows, D, GROUP, BLOCK)


def _split_columns(width: int, group: int) -> tuple[int, int]:
    """Columns of a program, and programs of a row: a whole row where that has one scale."""
    block = min(group * GROUPS_AT_ONCE, max(group, next_power_of_2(width))) if group else next_power_of_2(width)
    return block, ceil_div(width, block)


def quantise_rows(x: torch.Tensor, group: int = 0, *, pdl: bool = False) -> Fp8Rows:
    """See `QUANTISE_ROWS`; ``group`` is a power of two."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    out, (block, blocks) = Fp8Rows.allocate(rows, width, group, x.device), _split_columns(width, group)
    if rows:
        _quantise_kernel[(rows, blocks)](
            x, *out, x.stride(0), rows, width, GROUP=group, BLOCK=block, PDL=pdl, num_warps=count_warps(block),
            launch_pdl=pdl
        )
    return out


def gate_rows(x: torch.Tensor, gate: Gate, group: int = 0, *, pdl: bool = False) -> Fp8Rows:
    """See `GATE_ROWS`; ``group`` is a power of two."""
    rows, width = x.shape[0], x.shape[1] // 2
    out, (block, blocks) = Fp8Rows.allocate(rows, width, group, x.device), _split_columns(width, group)
    if rows:
        _gate_kernel[(rows, blocks)](
            x, *out, x.stride(0), rows, width, *gate[1:], GATE=GATES[gate.kind], GROUP=group, BLOCK=block, PDL=pdl,
            num_warps=count_warps(block), launch_pdl=pdl
        )
    return out


def norm_rows(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, *,
    group: int = 0, pdl: bool = False,
) -> tuple[Fp8Rows, torch.Tensor]:
    """See `NORM_ROWS`; writes the new residual in place."""
    rows, width = residual.shape
    out, block = Fp8Rows.allocate(rows, width, group, residual.device), max(next_power_of_2(width), group)
    has_x, num_splits = x is not None, 1 if x is None or x.dim() == 2 else len(x)
    x = residual if x is None else x
    if rows:
        _norm_kernel[(rows,)](
            x, residual, weight, *out, x.stride(-2), x.stride(0), residual.stride(0), num_splits, rows, eps, offset,
            D=width, HAS_X=has_x, GROUP=group, BLOCK=block, PDL=pdl, num_warps=count_warps(block), launch_pdl=pdl,
        )
    return out, residual


quantise_rows_pdl, gate_rows_pdl = partial(quantise_rows, pdl=True), partial(gate_rows, pdl=True)
norm_rows_pdl = partial(norm_rows, pdl=True)
