"""Low-rank additions on a GPU in two launches for all parts and adapters, whatever their ranks: *shrink* multiplies
rows with ``a``, *expand* the result with ``b`` and adds it to the output, or to gate and up before their activation.

A program has a block of rows of one adapter, so grids depend on numbers that the host knows when a step is captured;
how many blocks there are, only the device knows, and programs beyond end at once. Letters as in the package; K inputs,
N outputs, F gated outputs, M rows of a block.
"""

from functools import partial
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.linear import Norm
from headrace.kernels.lora import TILE_OUTPUTS, LowRankBank, Reduced, SlotRows
from headrace.kernels.rowwise.triton import GATES, apply_gate

RANK_CHUNK = 16
"""Ranks that a program of shrink computes, and that expand adds at a time."""
MOST_RANKS = 64
"""Of all parts, that a program of shrink computes at a time."""
STEP_INPUTS = {16: (256, 3), 32: (128, 4)}
"""Inputs that shrink multiplies at a time, and of these how many are being read, by rows of a block."""
MOST_SPLITS, PROGRAMS = 8, 256
"""Most partial sums of a row, and programs up to which there are more of them: one program alone takes longer to read
``a`` than a product of few rows takes in all."""
WARPS = {16: 4, 32: 8}
"""Of a program of expand, by rows of a block: with 60 to 100 registers, so that many programs run at a time. What
bounds it is how long a program takes, not bytes."""
GATED_ROWS, GATED_TILE = 16, 128
"""Rows and gated outputs of a tile, of which a program has gate and up. With 32 rows too few programs run at a time:
2,048 rows took 151 us, and 256 rows with 16 at a time 14 (H200)."""

NORM_ROWS = ((256, 1), (512, 2), (None, 4))
"""Most rows of a step, and rows of a program of `expand_add_norm`: measured on an H200."""


def norm_rows(count: int) -> int:
    """Rows of a program of `expand_add_norm`, which reads ``b`` once for all of them."""
    return next(m for most, m in NORM_ROWS if most is None or count <= most)


PLACED_COLUMNS = 256
"""Of a tile of `place_factors`, which has `RANK_CHUNK` ranks at a time."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


COUNTS = ["num_blocks", "num_places", "steps", "splits"]
"""Not compiled for by value: a step has any number of rows, and a first of its kind would wait for a compilation."""

# Hazard: with dependent launch, what is read before `wait_for_previous` must not come from the kernel in front. Blocks,
# order, ranks and additions are written when a step begins; several kernels lie between. Programs that end without
# waiting are safe as long as one of the grid waits, which those of the first block do: a grid has not ended before.


@triton.jit(do_not_specialize=COUNTS)
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, order_ptr, blocks_ptr, sums_ptr, owners_ptr, x_stride, num_blocks, num_places, steps,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, OWNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    # a program multiplies a block of rows with RANKS of the P * R rows of ``a``, which may be those of several parts.
    # OWNS: sums are those of rows, not of places, and beside them is whose each row is.
    block, chunk, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, count = tl.load(blocks_ptr + block), tl.load(blocks_ptr + 2 * num_blocks + block)
    first = tl.load(blocks_ptr + num_blocks + block)
    if OWNS:  # noqa: SIM102 (a constant)
        if chunk == 0:
            nth = tl.arange(0, M)
            own = tl.load(order_ptr + first + nth, mask=nth < count, other=0)
            tl.store(owners_ptr + own, slot.to(tl.int32) + tl.zeros([M], tl.int32), mask=nth < count)
    if (block == 0) | (slot >= 0):
        m, r, k = tl.arange(0, M), chunk * RANKS + tl.arange(0, RANKS), split * INPUTS * steps + tl.arange(0, INPUTS)
        rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
        # of a part's R rows those up to the adapter's rank are there, rounded up to what expand reads
        rank = tl.load(ranks_ptr + slot * P + r // R, mask=(slot >= 0) & (r < P * R), other=0)
        is_there = r % R < (rank + 15) // 16 * 16
        wait_for_previous(PDL)
        if tl.max(rank, axis=0) > 0:
            # int64 by slot: all adapters together may have more than 2**31 numbers
            a_at = a_ptr + (slot * (P * R) + r)[None, :] * K + k[:, None]
            x_at = x_ptr + rows[:, None] * x_stride + k[None, :]
            sums = tl.zeros([M, RANKS], tl.float32)
            for at in tl.range(0, INPUTS * steps, INPUTS, num_stages=STAGES):
                inside = at + k < K
                x = tl.load(x_at + at, mask=(m < count)[:, None] & inside[None, :], other=0.0)
                a = tl.load(a_at + at, mask=inside[:, None] & is_there[None, :], other=0.0)
                sums = tl.dot(x, a, sums, input_precision=PRECISION)
            to = rows if OWNS else split * num_places + first + m
            out = sums_ptr + to[:, None] * (P * R) + r[None, :]
            tl.store(out, sums.to(sums_ptr.dtype.element_ty), mask=(m < count)[:, None] & is_there[None, :])


@triton.jit
def _sums_at(sums_ptr, sums_stride, rows, places, slot, COLUMNS: tl.constexpr, DENSE: tl.constexpr):
    """[M, 1] pointers to the sums of `Reduced` of a block's rows, which are ``rows`` [M] and have these ``places``."""
    if DENSE:
        return sums_ptr + rows[:, None] * sums_stride + slot * COLUMNS
    else:
        return sums_ptr + places[:, None] * sums_stride


@triton.jit
def _add_up(sums_at, has_row, split_stride, splits, ROOM: tl.constexpr):
    """[M, RANKS] float32: the partial sums at ``sums_at`` [M, RANKS] and every ``split_stride`` values, in order, all
    loaded at once; ``splits`` of ``ROOM`` at most."""
    split = tl.arange(0, ROOM)[:, None, None]
    mask = (split < splits) & has_row[None, :, None]
    sums = tl.load(sums_at[None, :, :] + split * split_stride, mask=mask, other=0.0)
    return tl.sum(sums.to(tl.float32), axis=0)


@triton.jit
def _expand_part(
    sums_at, b_at, b, rank, has_row, own, split_stride, splits, N: tl.constexpr, RANKS: tl.constexpr,
    ROOM: tl.constexpr, PRECISION: tl.constexpr,
):
    """What a block [M, OUTPUTS] gets, float32: the sums of shrink at ``sums_at`` [M, RANKS] and beyond, times ``b``
    [RANKS, OUTPUTS] and what follows at ``b_at``. ``has_row`` [M], ``own`` [OUTPUTS]: which there are."""
    reduced = _add_up(sums_at, has_row, split_stride, splits, ROOM).to(b.dtype)
    added = tl.dot(reduced, b, input_precision=PRECISION)
    for first_rank in range(RANKS, rank, RANKS):
        reduced = _add_up(sums_at + first_rank, has_row, split_stride, splits, ROOM).to(b.dtype)
        more = tl.load(b_at + first_rank * N, mask=own[None, :], other=0.0)
        added = tl.dot(reduced, more, added, input_precision=PRECISION)
    return added


@triton.jit(do_not_specialize=COUNTS)
def _expand_kernel(
    sums_ptr, b_ptr, ranks_ptr, order_ptr, blocks_ptr, tiles_ptr, out_ptr, out_stride, num_blocks, split_stride,
    splits, sums_stride, num_tiles, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    RANKS: tl.constexpr, OUTPUTS: tl.constexpr, ALIGN: tl.constexpr, ROOM: tl.constexpr, DENSE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    # outputs begin and end at multiples of ALIGN: only then does a thread read several at a time
    block, tile = tl.program_id(1), tl.program_id(0)
    slot, count = tl.load(blocks_ptr + block), tl.load(blocks_ptr + 2 * num_blocks + block)
    first = tl.load(blocks_ptr + num_blocks + block)
    part, begin = tl.load(tiles_ptr + tile), tl.multiple_of(tl.load(tiles_ptr + num_tiles + tile), ALIGN)
    end = tl.multiple_of(tl.load(tiles_ptr + 2 * num_tiles + tile), ALIGN)
    m, r, n = tl.arange(0, M), tl.arange(0, RANKS), begin + tl.arange(0, OUTPUTS)
    if (block == 0) | (slot >= 0):
        rank = tl.load(ranks_ptr + slot * P + part, mask=slot >= 0, other=0)
        rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
        b_at = b_ptr + (slot * R + r)[:, None] * N + n[None, :]
        b = tl.load(b_at, mask=((n < end) & (slot >= 0))[None, :], other=0.0)  # before it is known if there is a rank
        wait_for_previous(PDL)
        if rank > 0:
            own = out_ptr + rows[:, None] * out_stride + n[None, :]
            own_mask = (m < count)[:, None] & (n < end)[None, :]
            before = tl.load(own, mask=own_mask, other=0.0)
            sums_at = _sums_at(sums_ptr, sums_stride, rows, first + m, slot, P * R, DENSE) + part * R + r[None, :]
            added = _expand_part(
                sums_at, b_at, b, rank, m < count, n < end, split_stride, splits, N, RANKS, ROOM, PRECISION
            )
            tl.store(own, (before.to(tl.float32) + added).to(before.dtype), mask=own_mask)


@triton.jit(do_not_specialize=COUNTS)
def _expand_gated_kernel(
    sums_ptr, b_ptr, ranks_ptr, order_ptr, blocks_ptr, x_ptr, out_ptr, x_stride, num_blocks, split_stride,
    splits, sums_stride, F: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
    GATE: tl.constexpr, ROOM: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    # gate is part 0 and up part 1 of x [T, 2F]; rows without an adapter are activated, too
    block, begin = tl.program_id(1), tl.program_id(2) * M  # M rows of a block, which may have more
    slot, count = tl.load(blocks_ptr + block), tl.load(blocks_ptr + 2 * num_blocks + block) - begin
    first = tl.load(blocks_ptr + num_blocks + block) + begin
    m, r, n = tl.arange(0, M), tl.arange(0, RANKS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n < F
    if (block == 0) | (count > 0):
        gate_rank = tl.load(ranks_ptr + slot * 2, mask=slot >= 0, other=0)
        up_rank = tl.load(ranks_ptr + slot * 2 + 1, mask=slot >= 0, other=0)
        rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
        b_at = b_ptr + (slot * R + r)[:, None] * (2 * F) + n[None, :]
        has_b = (inside & (slot >= 0))[None, :]
        gate_b, up_b = tl.load(b_at, mask=has_b, other=0.0), tl.load(b_at + F, mask=has_b, other=0.0)
        wait_for_previous(PDL)
        own = x_ptr + rows[:, None] * x_stride + n[None, :]
        mask = (m < count)[:, None] & inside[None, :]
        gate = tl.load(own, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(own + F, mask=mask, other=0.0).to(tl.float32)
        sums_at = _sums_at(sums_ptr, sums_stride, rows, first + m, slot, 2 * R, DENSE) + r[None, :]
        if gate_rank > 0:
            gate += _expand_part(
                sums_at, b_at, gate_b, gate_rank, m < count, inside, split_stride, splits, 2 * F, RANKS, ROOM,
                PRECISION
            )
        if up_rank > 0:
            up += _expand_part(
                sums_at + R, b_at + F, up_b, up_rank, m < count, inside, split_stride, splits, 2 * F, RANKS, ROOM,
                PRECISION
            )
        dtype = x_ptr.dtype.element_ty
        # rounded as if stored
        gated = apply_gate(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), 0.0, 0.0, 0.0, GATE)
        tl.store(out_ptr + rows[:, None] * F + n[None, :], gated.to(dtype), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _expand_add_norm_kernel(
    sums_ptr, x_ptr, residual_ptr, weight_ptr, b_ptr, ranks_ptr, order_ptr, blocks_ptr, out_ptr, x_stride,
    partial_stride, residual_stride, split_stride, splits, sums_stride, num_blocks, eps, offset, D: tl.constexpr,
    BLOCK: tl.constexpr, PARTIALS: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr,
    DENSE: tl.constexpr, PDL: tl.constexpr,
):
    # A program has M rows of a block, whole, as in `rowwise.triton._add_rms_norm_kernel`.
    block, begin = tl.program_id(0), tl.program_id(1) * M
    slot, count = tl.load(blocks_ptr + block), tl.load(blocks_ptr + 2 * num_blocks + block) - begin
    first = tl.load(blocks_ptr + num_blocks + block) + begin
    if (block == 0) | (count > 0):
        m, cols = tl.arange(0, M), tl.arange(0, BLOCK)
        inside = cols < D
        mask = (m < count)[:, None] & inside[None, :]
        rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
        rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
        b_at = b_ptr + slot * R * D + cols
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
        wait_for_previous(PDL)
        x_at = x_ptr + rows[:, None] * x_stride + cols[None, :]
        residual_at = residual_ptr + rows[:, None] * residual_stride + cols[None, :]
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(residual_at, mask=mask, other=0.0)
        for split in tl.static_range(1, PARTIALS):
            x += tl.load(x_at + split * partial_stride, mask=mask, other=0.0)
        sums_at = _sums_at(sums_ptr, sums_stride, rows, first + m, slot, R, DENSE)
        for first_rank in range(0, rank, RANKS):
            for r in tl.static_range(RANKS):
                b = tl.load(b_at + (first_rank + r) * D, mask=inside, other=0.0)
                reduced = tl.zeros([M, 1], tl.float32)
                for split in range(splits):
                    at = sums_at + split * split_stride + first_rank + r
                    reduced += tl.load(at, mask=(m < count)[:, None], other=0.0).to(tl.float32)
                x += reduced.to(b.dtype).to(tl.float32) * b.to(tl.float32)[None, :]
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)  # as a product of its own would have stored it
        total = (x + before.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, total, mask=mask)
        total = total.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(total * total, axis=1) / D + eps)[:, None]
        out_at = out_ptr + rows[:, None] * D + cols[None, :]
        tl.store(out_at, (total * rstd * weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


def _options(bank: LowRankBank, rows: SlotRows, *, pdl: bool) -> dict[str, Any]:
    precision = "ieee" if bank.a.dtype == torch.float32 else "tf32"
    return {"M": rows.block_rows, "RANKS": RANK_CHUNK, "PRECISION": precision, "PDL": pdl, "launch_pdl": pdl}


def _room(reduced: Reduced) -> dict[str, int]:
    """For partial sums: one, or the most, as the number of rows decides how many there are."""
    assert len(reduced.sums) <= MOST_SPLITS, f"{len(reduced.sums)} partial sums"
    is_whole = reduced.is_dense and len(reduced.sums) == 1
    return {"ROOM": 1 if is_whole else MOST_SPLITS, "DENSE": reduced.is_dense}


def shrink(x: torch.Tensor, bank: LowRankBank, rows: SlotRows, *, pdl: bool = False) -> Reduced:
    """See `SHRINK`. On ``rows.side`` it runs beside the product: `expand` waits for it."""
    if rows.side is None:
        return _shrink(x, bank, rows, pdl=pdl)
    rows.side.wait_stream(torch.cuda.current_stream(x.device))
    # what is allocated here is used again only on this stream, behind the next wait
    rows.is_forked = True
    with torch.cuda.stream(rows.side):
        return _shrink(x, bank, rows, pdl=False)


def join(rows: SlotRows, device: torch.device) -> None:
    """Let the current stream wait for what `shrink` began beside it."""
    if rows.is_forked and rows.side is not None:
        torch.cuda.current_stream(device).wait_stream(rows.side)
        rows.is_forked = False


def _shrink(x: torch.Tensor, bank: LowRankBank, rows: SlotRows, *, pdl: bool) -> Reduced:
    _, num_parts, most_ranks, num_inputs = bank.a.shape
    chunks = ceil_div(bank.slot_rows, _chunk_ranks(bank))
    inputs, tiles = STEP_INPUTS[rows.block_rows][0], ceil_div(rows.num_rows, rows.block_rows) * chunks
    most = max(1, min(MOST_SPLITS, PROGRAMS // tiles))
    steps = ceil_div(ceil_div(num_inputs, inputs), most)  # of a partial sum
    splits = ceil_div(num_inputs, inputs * steps)
    sums = torch.empty((splits, rows.num_rows, num_parts * most_ranks), dtype=torch.float32, device=x.device)
    _launch_shrink(x, bank, rows, sums, None, steps, splits, pdl=pdl)
    return Reduced(sums)


def shrink_owned(x: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> tuple[torch.Tensor, torch.Tensor]:
    """``a[s] x[t]`` [T, P, R] of each row t that has the adapter in slot s, in the bank's dtype and by rows, for the
    parts and ranks that there are, others undefined; and the slots [T] int32, -1 for none. For many rows."""
    shape = rows.num_rows, *bank.a.shape[1:3]
    sums = torch.empty(shape, dtype=bank.a.dtype, device=x.device)
    owners = torch.empty(rows.num_rows, dtype=torch.int32, device=x.device)
    steps = ceil_div(bank.inputs, STEP_INPUTS[rows.block_rows][0])
    # not dependent: slots of rows are written at once, to memory that the kernel in front may still read
    _launch_shrink(x, bank, rows, sums, owners, steps, 1, pdl=False)
    return sums, owners


def _chunk_ranks(bank: LowRankBank) -> int:
    """Of all parts, that a program of shrink computes."""
    return min(MOST_RANKS, next_power_of_2(bank.slot_rows))


def _launch_shrink(
    x: torch.Tensor, bank: LowRankBank, rows: SlotRows, sums: torch.Tensor, owners: torch.Tensor | None, steps: int,
    splits: int, *, pdl: bool
) -> None:
    _, num_parts, most_ranks, num_inputs = bank.a.shape
    inputs, stages = STEP_INPUTS[rows.block_rows]
    num_blocks = rows.blocks.shape[1]
    x = x if x.dtype == bank.a.dtype else x.to(bank.a.dtype)
    ranks = _chunk_ranks(bank)
    options = _options(bank, rows, pdl=pdl) | {"RANKS": ranks}
    _shrink_kernel[(num_blocks, ceil_div(bank.slot_rows, ranks), splits)](
        x, bank.a, bank.ranks, rows.order, rows.blocks, sums, sums if owners is None else owners, x.stride(0),
        num_blocks, rows.num_rows, steps, K=num_inputs, P=num_parts, R=most_ranks, INPUTS=inputs, num_warps=4,
        OWNS=owners is not None, STAGES=min(stages, ceil_div(num_inputs, inputs * MOST_SPLITS)), **options,
    )


def expand(reduced: Reduced, out: torch.Tensor, bank: LowRankBank, rows: SlotRows, *, pdl: bool = False) -> None:
    """See `EXPAND`."""
    join(rows, out.device)
    num_blocks, num_tiles = rows.blocks.shape[1], bank.tiles.shape[1]
    sums = reduced.sums
    _expand_kernel[(num_tiles, num_blocks)](
        sums, bank.b, bank.ranks, rows.order, rows.blocks, bank.tiles, out, out.stride(0), num_blocks, sums.stride(0),
        len(sums), sums.stride(1), num_tiles, N=bank.b.shape[2], P=len(bank.ends), R=bank.b.shape[1],
        OUTPUTS=TILE_OUTPUTS, **_room(reduced),
        ALIGN=gcd(TILE_OUTPUTS, *bank.ends), num_warps=WARPS[rows.block_rows], **_options(bank, rows, pdl=pdl),
    )


def expand_gated(
    reduced: Reduced, x: torch.Tensor, bank: LowRankBank, rows: SlotRows, activation: str, *, pdl: bool = False
) -> torch.Tensor:
    """See `EXPAND_GATED`."""
    join(rows, x.device)
    size, num_blocks, sums = x.shape[1] // 2, rows.blocks.shape[1], reduced.sums
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    options = _options(bank, rows, pdl=pdl) | {"M": GATED_ROWS}
    _expand_gated_kernel[(ceil_div(size, GATED_TILE), num_blocks, rows.block_rows // GATED_ROWS)](
        sums, bank.b, bank.ranks, rows.order, rows.blocks, x, out, x.stride(0), num_blocks, sums.stride(0),
        len(sums), sums.stride(1), F=size, R=bank.b.shape[1], OUTPUTS=GATED_TILE, GATE=GATES[activation],
        num_warps=WARPS[GATED_ROWS], **_room(reduced), **options,
    )
    return out


def expand_add_norm(
    reduced: Reduced, x: torch.Tensor, residual: torch.Tensor, norm: Norm, bank: LowRankBank, rows: SlotRows, *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `EXPAND_ADD_NORM`; writes the new residual in place."""
    join(rows, x.device)
    (count, width), sums, num_blocks = residual.shape, reduced.sums, rows.blocks.shape[1]
    out = torch.empty((count, width), dtype=residual.dtype, device=x.device)
    block, m = next_power_of_2(width), norm_rows(count)
    _expand_add_norm_kernel[(num_blocks, ceil_div(min(rows.block_rows, count), m))](
        sums, x, residual, norm.weight, bank.b, bank.ranks, rows.order, rows.blocks, out, x.stride(-2), x.stride(0),
        residual.stride(0), sums.stride(0), len(sums), sums.stride(1), num_blocks, norm.eps, norm.offset, D=width,
        BLOCK=block, PARTIALS=1 if x.dim() == 2 else len(x), R=bank.b.shape[1], M=m, RANKS=RANK_CHUNK,
        DENSE=reduced.is_dense, PDL=pdl, num_warps=min(16, max(1, block // 256)), launch_pdl=pdl,
    )
    return out, residual


expand_add_norm_pdl = partial(expand_add_norm, pdl=True)
shrink_pdl, expand_pdl = partial(shrink, pdl=True), partial(expand, pdl=True)
expand_gated_pdl = partial(expand_gated, pdl=True)


@triton.jit
def _place_kernel(
    source_ptr, table_ptr, SOURCE: tl.constexpr, TARGET: tl.constexpr, FIELDS: tl.constexpr, STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # fields are those of `headrace.kernels.lora.PLACE_FACTORS`, in their order
    block, at = tl.program_id(0), table_ptr + tl.program_id(1) * FIELDS
    rank, padded, width = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    ranks = tl.load(at + 9)
    if (block == 0) & (ranks != 0):
        tl.store(ranks.to(tl.pointer_type(tl.int64)), rank)
    if block * COLUMNS < width:
        row_stride, column_stride = tl.load(at + 4), tl.load(at + 5)
        scale = tl.load(at + 6).to(tl.int32).to(tl.float32, bitcast=True)
        target, target_stride = tl.load(at + 7).to(tl.pointer_type(TARGET)), tl.load(at + 8)
        source = (source_ptr + tl.load(at)).to(tl.pointer_type(SOURCE))
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        for first in range(0, padded, STEP):
            row = first + tl.arange(0, STEP)
            is_inside = (row < rank)[:, None] & (column < width)[None, :]
            stored = source + row[:, None] * row_stride + column[None, :] * column_stride
            factor = tl.load(stored, mask=is_inside, other=0.0).to(tl.float32) * scale
            is_written = (row < padded)[:, None] & (column < width)[None, :]
            tl.store(target + row[:, None] * target_stride + column[None, :], factor.to(TARGET), mask=is_written)


def place_factors(
    source: torch.Tensor, table: torch.Tensor, most_columns: int, dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    """See `headrace.kernels.lora.PLACE_FACTORS`."""
    grid = (max(1, ceil_div(most_columns, PLACED_COLUMNS)), len(table))
    _place_kernel[grid](
        source, table, SOURCE=TYPES[dtype], TARGET=TYPES[target_dtype], FIELDS=table.shape[1], STEP=RANK_CHUNK,
        COLUMNS=PLACED_COLUMNS, num_warps=4,
    )
