"""What follows the products with a layer's input, in one Triton kernel: programs of a token are the norm of its query,
its latent, and its windows of up to two compressors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.coded_linear.fp8_triton import store_rows
from headrace.kernels.compressor import Pool, RowNorm
from headrace.kernels.compressor.triton import ROWS, pool_window
from headrace.kernels.latents import GROUP, LatentRows
from headrace.kernels.latents.triton import scale_step, slot_arguments, write_latent
from headrace.kernels.launch import next_power_of_2, wait_for_previous

MOST_POOLS = 2


@triton.jit
def _store_row(
    token, projected_ptr, projected_stride, row, values_ptr, gates_ptr, WIDTH: tl.constexpr, STATE_ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr
):
    if row >= STATE_ROWS:  # of the null page nothing is read
        column = tl.arange(0, BLOCK_W)
        source = projected_ptr + token * projected_stride + column
        tl.store(values_ptr + row * WIDTH + column, tl.load(source, mask=column < WIDTH), mask=column < WIDTH)
        tl.store(gates_ptr + row * WIDTH + column, tl.load(source + WIDTH, mask=column < WIDTH), mask=column < WIDTH)


@triton.jit
def _pool_token(
    token, kv_lens_ptr, cos_sin_ptr, projected_ptr, rows_ptr, numbers_ptr, values_ptr, gates_ptr, state_table_ptr,
    ape_ptr, weight_ptr, entry_table_ptr, projected_stride, state_width, entry_width, eps, codes_ptr, wide_ptr,
    scales_ptr, R: tl.constexpr, E: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr,
    HOW: tl.constexpr, SCALES: tl.constexpr, RATIO: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, STATE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One of `Pool`: the token's projections are stored, and read as they are where its window ends."""
    row, number = tl.load(rows_ptr + token), tl.load(numbers_ptr + token)
    _store_row(token, projected_ptr, projected_stride, row, values_ptr, gates_ptr, WIDTH, STATE_ROWS, BLOCK_W)
    if number >= 0:
        begin = tl.load(kv_lens_ptr + token) - 1
        pool_window(
            token, number, token, begin, projected_ptr, projected_stride, values_ptr, gates_ptr, state_table_ptr,
            ape_ptr, weight_ptr, cos_sin_ptr, entry_table_ptr, state_width, entry_width, eps, codes_ptr, wide_ptr,
            scales_ptr, E, R, S, PAGE, SLOT, HOW, GROUP, SCALES, RATIO, REACH, WIDTH, BLOCK, RING, STATE_ROWS, ROWS
        )


# alignment of pointers whose numbers are read one at a time, of a chunk or a cache group that begins anywhere
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=[
    "positions_ptr", "kv_lens_ptr", "a_state_table_ptr", "a_entry_table_ptr", "b_state_table_ptr", "b_entry_table_ptr",
])
def _finish_kernel(
    q_ptr, q_weight_ptr, q_out_ptr, q_scales_ptr, q_stride, num_tokens, q_eps, x_ptr, weight_ptr, cos_sin_ptr,
    positions_ptr, numbers_ptr, x_stride, eps, codes_ptr, wide_ptr, scales_ptr, kv_lens_ptr,
    a_projected_ptr, a_rows_ptr, a_numbers_ptr, a_values_ptr, a_gates_ptr, a_state_table_ptr, a_ape_ptr, a_weight_ptr,
    a_entry_table_ptr, a_projected_stride, a_state_width, a_entry_width, a_eps, a_codes_ptr, a_wide_ptr, a_scales_ptr,
    b_projected_ptr, b_rows_ptr, b_numbers_ptr, b_values_ptr, b_gates_ptr, b_state_table_ptr, b_ape_ptr, b_weight_ptr,
    b_entry_table_ptr, b_projected_stride, b_state_width, b_entry_width, b_eps, b_codes_ptr, b_wide_ptr, b_scales_ptr,
    L: tl.constexpr, BLOCK_L: tl.constexpr, ROUNDS: tl.constexpr, Q_GROUP: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr, SCALES: tl.constexpr,
    A_E: tl.constexpr, A_S: tl.constexpr, A_PAGE: tl.constexpr, A_SLOT: tl.constexpr, A_HOW: tl.constexpr,
    A_SCALES: tl.constexpr, A_RATIO: tl.constexpr, A_REACH: tl.constexpr, A_WIDTH: tl.constexpr,
    A_BLOCK_W: tl.constexpr, A_BLOCK: tl.constexpr, A_RING: tl.constexpr, A_STATE_ROWS: tl.constexpr,
    B_E: tl.constexpr, B_S: tl.constexpr, B_PAGE: tl.constexpr, B_SLOT: tl.constexpr, B_HOW: tl.constexpr,
    B_SCALES: tl.constexpr, B_RATIO: tl.constexpr, B_REACH: tl.constexpr, B_WIDTH: tl.constexpr,
    B_BLOCK_W: tl.constexpr, B_BLOCK: tl.constexpr, B_RING: tl.constexpr, B_STATE_ROWS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, POOLS: tl.constexpr, PDL: tl.constexpr,
):
    token, role = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(PDL)
    if role == POOLS:
        write_latent(
            token, x_ptr, weight_ptr, cos_sin_ptr, positions_ptr, numbers_ptr, x_stride, eps, codes_ptr, wide_ptr,
            scales_ptr, E, R, S, PAGE, SLOT, HOW, GROUP, SCALES
        )
    elif role == POOLS + 1:
        at = tl.arange(0, BLOCK_L)
        x = tl.load(q_ptr + token * q_stride + at, mask=at < L, other=0.0).to(tl.float32)
        weight = tl.load(q_weight_ptr + at, mask=at < L, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / L + q_eps) * weight
        x = x.to(q_ptr.dtype.element_ty)
        if ROUNDS:
            store_rows(x.to(tl.float32), q_out_ptr, q_scales_ptr, token, 0, num_tokens, L, Q_GROUP, BLOCK_L)
        else:
            tl.store(q_out_ptr + token * L + at, x, mask=at < L)
    if POOLS > 0:  # noqa: SIM102 (a constant: without pools nothing below is compiled)
        if role == 0:
            _pool_token(
                token, kv_lens_ptr, cos_sin_ptr, a_projected_ptr, a_rows_ptr, a_numbers_ptr, a_values_ptr, a_gates_ptr,
                a_state_table_ptr, a_ape_ptr, a_weight_ptr, a_entry_table_ptr, a_projected_stride, a_state_width,
                a_entry_width, a_eps, a_codes_ptr, a_wide_ptr, a_scales_ptr, R, A_E, A_S, A_PAGE, A_SLOT, A_HOW,
                A_SCALES, A_RATIO, A_REACH, A_WIDTH, A_BLOCK_W, A_BLOCK, A_RING, A_STATE_ROWS, GROUP, ROWS
            )
    if POOLS > 1:  # noqa: SIM102
        if role == 1:
            _pool_token(
                token, kv_lens_ptr, cos_sin_ptr, b_projected_ptr, b_rows_ptr, b_numbers_ptr, b_values_ptr, b_gates_ptr,
                b_state_table_ptr, b_ape_ptr, b_weight_ptr, b_entry_table_ptr, b_projected_stride, b_state_width,
                b_entry_width, b_eps, b_codes_ptr, b_wide_ptr, b_scales_ptr, R, B_E, B_S, B_PAGE, B_SLOT, B_HOW,
                B_SCALES, B_RATIO, B_REACH, B_WIDTH, B_BLOCK_W, B_BLOCK, B_RING, B_STATE_ROWS, GROUP, ROWS
            )


def _pool_arguments(pool: Pool) -> dict[str, Any]:
    """Arguments of `_finish_kernel` without the letter before them."""
    (pages, per_state), width, head_dim = pool.state.values.shape[:2], pool.pooling.ape.shape[1], len(pool.norm.weight)
    assert pages and pool.projected.stride(1) == pool.state.page_table.stride(1) == 1
    assert pool.entries.page_table.stride(1) == 1 and len(pool.windows.numbers) == len(pool.rows) == len(pool.projected)
    where = slot_arguments(pool.entries.slots)
    return dict(
        projected_ptr=pool.projected, rows_ptr=pool.rows, numbers_ptr=pool.windows.numbers,
        values_ptr=pool.state.values, gates_ptr=pool.state.gates, state_table_ptr=pool.state.page_table,
        ape_ptr=pool.pooling.ape, weight_ptr=pool.norm.weight, entry_table_ptr=pool.entries.page_table,
        projected_stride=pool.projected.stride(0), state_width=pool.state.page_table.stride(0),
        entry_width=pool.entries.page_table.stride(0), eps=pool.norm.eps, **where, E=head_dim,
        SCALES=scale_step(where["HOW"], head_dim), RATIO=pool.pooling.ratio,
        REACH=width // head_dim * pool.pooling.ratio, WIDTH=width, BLOCK_W=next_power_of_2(width),
        BLOCK=pool.state.block, RING=pool.state.ring, STATE_ROWS=per_state,
    )


def _no_pool(anything: torch.Tensor) -> dict[str, Any]:
    """The same of a pool that is not there: nothing of it is read."""
    pointers = (
        "projected", "rows", "numbers", "values", "gates", "state_table", "ape", "weight", "entry_table", "codes",
        "wide", "scales",
    )
    numbers = (
        "projected_stride", "state_width", "entry_width", "E", "S", "PAGE", "SLOT", "HOW", "SCALES", "RATIO", "REACH",
        "WIDTH", "BLOCK_W", "BLOCK", "RING", "STATE_ROWS",
    )
    return {f"{name}_ptr": anything for name in pointers} | dict.fromkeys(numbers, 1) | {"eps": 0.0}


def finish(
    query: RowNorm, latents: LatentRows, pools: tuple[Pool, ...], *, pdl: bool = False
) -> torch.Tensor | Fp8Rows:
    """See `FINISH_PROJECTIONS`; a group is a power of two."""
    (num_tokens, width), head_dim, table = query.x.shape, latents.x.shape[1], latents.norm.cos_sin
    out: torch.Tensor | Fp8Rows
    if query.group is None:
        out = torch.empty((num_tokens, width), dtype=query.x.dtype, device=query.x.device)
        written = out, out  # the latter not
    else:
        written = out = Fp8Rows.allocate(num_tokens, width, query.group, query.x.device)
    assert len(pools) <= MOST_POOLS and all(pool.norm.cos_sin is table for pool in pools)
    if not num_tokens:
        return out
    where, own = slot_arguments(latents.slots), [_pool_arguments(pool) for pool in pools]
    own += [_no_pool(query.x)] * (MOST_POOLS - len(own))
    named = {
        f"{letter.upper() if name.isupper() else letter}_{name}": value
        for letter, arguments in zip("ab", own, strict=True) for name, value in arguments.items()
    }
    _finish_kernel[(num_tokens, 2 + len(pools))](
        query.x, query.weight, *written, query.x.stride(0), num_tokens, query.eps, latents.x, latents.norm.weight,
        table, latents.positions, latents.numbers, latents.x.stride(0), latents.norm.eps, where.pop("codes_ptr"),
        where.pop("wide_ptr"), where.pop("scales_ptr"),
        pools[0].windows.kv_lens if pools else latents.positions, **named, **where, L=width,
        BLOCK_L=max(next_power_of_2(width), query.group or 0), ROUNDS=query.group is not None, Q_GROUP=query.group or 0,
        E=head_dim, R=table.shape[1], SCALES=scale_step(where["HOW"], head_dim),
        GROUP=GROUP, ROWS=ROWS, POOLS=len(pools), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    return out


finish_pdl = partial(finish, pdl=True)
