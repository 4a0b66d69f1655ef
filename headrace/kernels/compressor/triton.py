"""Compression in Triton: one program pools a window, whose entry stays in registers until it is written."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.compressor import EntryPages, Pooling, StatePages, Windows
from headrace.kernels.latents import GROUP, LatentNorm
from headrace.kernels.latents.triton import finish_latent, scale_step, slot_arguments, write_slot
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

ROWS = 8
"""Tokens of a window that a program reads at a time: all those of an entry of two windows of 4."""


@triton.jit
def pool_window(
    request, number, start, begin, projected_ptr, projected_stride, values_ptr, gates_ptr, state_table_ptr, ape_ptr,
    weight_ptr, cos_sin_ptr, entry_table_ptr, state_width, entry_width, eps, codes_ptr, wide_ptr, scales_ptr,
    E: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, RATIO: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, RING: tl.constexpr, STATE_ROWS: tl.constexpr, ROWS: tl.constexpr,
):
    """Pool and write window ``number`` of a request whose step has its tokens from position ``begin`` on in rows of
    ``projected`` from ``start`` on."""
    dim = tl.arange(0, E)
    most = tl.full([E], -float("inf"), tl.float32)
    total, pooled = tl.zeros([E], tl.float32), tl.zeros([E], tl.float32)
    for first in range(0, REACH, ROWS):
        row = first + tl.arange(0, ROWS)
        position = (number + 1) * RATIO - REACH + row
        is_new, is_old = position >= begin, (position >= 0) & (position < begin)
        # where windows overlap, the last RATIO tokens are the own window, for which a token has its last E dims
        column = dim[None, :]
        if REACH > RATIO:
            column += tl.where(row >= RATIO, E, 0)[:, None]
        own = position // BLOCK * RING + position % RING
        page = tl.load(state_table_ptr + request * state_width + own // STATE_ROWS, mask=is_old, other=0)
        kept = (page.to(tl.int64) * STATE_ROWS + own % STATE_ROWS)[:, None] * WIDTH + column
        fresh = (start + position - begin).to(tl.int64)[:, None] * projected_stride + column
        # each element is read from one of the two
        new, old = is_new[:, None] & (column >= 0), is_old[:, None] & (column >= 0)
        value = tl.load(projected_ptr + fresh, mask=new, other=0.0) + tl.load(values_ptr + kept, mask=old, other=0.0)
        gate = tl.load(projected_ptr + fresh + WIDTH, mask=new, other=0.0) + tl.load(
            gates_ptr + kept, mask=old, other=0.0
        )
        gate += tl.load(ape_ptr + (row % RATIO)[:, None] * WIDTH + column)
        gate = tl.where(new | old, gate, -float("inf"))
        higher = tl.maximum(most, tl.max(gate, axis=0))
        weight = tl.exp(gate - higher[None, :])
        shrink = tl.exp(most - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        pooled = pooled * shrink + tl.sum(weight * value, axis=0)
        most = higher
    x = finish_latent(
        pooled / total, weight_ptr, cos_sin_ptr, number * RATIO, eps, E, R, projected_ptr.dtype.element_ty
    )
    page = tl.load(entry_table_ptr + request * entry_width + number // S).to(tl.int64)
    write_slot(x, page * S + number % S, codes_ptr, wide_ptr, scales_ptr, E, S, PAGE, SLOT, HOW, GROUP, SCALES)


@triton.jit(do_not_specialize_on_alignment=["state_table_ptr", "entry_table_ptr"])  # of a cache group among others
def _compress_kernel(
    projected_ptr, requests_ptr, numbers_ptr, query_start_ptr, kv_lens_ptr, values_ptr, gates_ptr, state_table_ptr,
    ape_ptr, weight_ptr, cos_sin_ptr, entry_table_ptr, projected_stride, state_width, entry_width, eps, codes_ptr,
    wide_ptr, scales_ptr, E: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr,
    HOW: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, RATIO: tl.constexpr, REACH: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, STATE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    candidate = tl.program_id(0)
    wait_for_previous(PDL)
    number = tl.load(numbers_ptr + candidate)
    if number >= 0:
        request = tl.load(requests_ptr + candidate)
        start, end = tl.load(query_start_ptr + request), tl.load(query_start_ptr + request + 1)
        begin = tl.load(kv_lens_ptr + request) - (end - start)  # the step's first position
        pool_window(
            request, number, start, begin, projected_ptr, projected_stride, values_ptr, gates_ptr, state_table_ptr,
            ape_ptr, weight_ptr, cos_sin_ptr, entry_table_ptr, state_width, entry_width, eps, codes_ptr, wide_ptr,
            scales_ptr, E, R, S, PAGE, SLOT, HOW, GROUP, SCALES, RATIO, REACH, WIDTH, BLOCK, RING, STATE_ROWS, ROWS
        )


def compress(
    projected: torch.Tensor, windows: Windows, state: StatePages, pooling: Pooling, norm: LatentNorm,
    entries: EntryPages, *, pdl: bool = False,
) -> None:
    """See `COMPRESS`."""
    width, head_dim = pooling.ape.shape[1], norm.weight.shape[0]
    if len(windows.numbers):
        where = slot_arguments(entries.slots)
        assert projected.stride(1) == state.page_table.stride(1) == entries.page_table.stride(1) == 1
        _compress_kernel[(len(windows.numbers),)](
            projected, windows.requests, windows.numbers, windows.query_start, windows.kv_lens, state.values,
            state.gates, state.page_table, pooling.ape, norm.weight, norm.cos_sin, entries.page_table,
            projected.stride(0), state.page_table.stride(0), entries.page_table.stride(0), norm.eps, **where,
            E=head_dim, R=norm.cos_sin.shape[1], GROUP=GROUP, SCALES=scale_step(where["HOW"], head_dim),
            RATIO=pooling.ratio, REACH=width // head_dim * pooling.ratio, WIDTH=width, BLOCK=state.block,
            RING=state.ring, STATE_ROWS=state.values.shape[1], ROWS=ROWS, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])  # any number of tokens stands before those of a call
def _store_kernel(
    projected_ptr, rows_ptr, values_ptr, gates_ptr, projected_stride, WIDTH: tl.constexpr, STATE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + token)
    if row >= STATE_ROWS:  # of the null page nothing is read
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        source = projected_ptr + token * projected_stride + column
        tl.store(values_ptr + row * WIDTH + column, tl.load(source, mask=column < WIDTH), mask=column < WIDTH)
        tl.store(gates_ptr + row * WIDTH + column, tl.load(source + WIDTH, mask=column < WIDTH), mask=column < WIDTH)


def store_state(projected: torch.Tensor, state: StatePages, rows: torch.Tensor, *, pdl: bool = False) -> None:
    """See `STORE_STATE`."""
    width = projected.shape[1] // 2
    if len(rows):
        assert projected.stride(1) == 1
        block = min(1024, next_power_of_2(width))
        _store_kernel[(len(rows), ceil_div(width, block))](
            projected, rows, state.values, state.gates, projected.stride(0), WIDTH=width,
            STATE_ROWS=state.values.shape[1], BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )


compress_pdl = partial(compress, pdl=True)
store_state_pdl = partial(store_state, pdl=True)
