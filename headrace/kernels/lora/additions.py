"""What adapters add, by own CUDA C++ on Hopper: see ``additions.cuh``, ``expand.cu``, ``expand_norm.cu`` and
``expand_norm_many.cu``. What these do not take, the kernels of Triton do.

T rows, N outputs, F gated outputs, D hidden size.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import partial

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.kernels.linear import Norm
from headrace.kernels.lora import TILE_OUTPUTS, LowRankBank, Reduced, SlotRows, triton
from headrace.kernels.rowwise.triton import GATES

ROWS, COLUMNS, RANKS = 8, 64, 16
"""As in the sources: of a warp, and ranks of a product."""
WARPS, STAGES = 4, 3
"""Of a block of ``expand.cu`` and ``expand_rope.cu``: warps, and how often it has room for eight rows."""
NORM_WARPS, CLUSTER = 16, 4
"""Of a block of ``expand_norm.cu`` and ``expand_norm_many.cu``, and the most blocks of their clusters."""
MOST_GROUPS, FEW_ROWS = 2, 512
"""Most columns of a warp with a norm, in 64, and most rows of ``expand_norm.cu``."""
NORM_STAGES = 2
"""How often ``expand_norm_many.cu`` has room for eight rows."""
MOST_BLOCK_ROWS = 32
"""Of `SlotRows.blocks`: a warp reads at once which rows a block has."""


class Additions(ctypes.Structure):
    """``Additions`` of the sources."""

    _fields_ = (
        *((name, c_void_p) for name in ("sums", "b", "ranks", "order", "blocks")), ("split_stride", c_int64),
        *((name, c_int) for name in (
            "sums_stride", "splits", "is_float", "is_dense", "num_blocks", "most_ranks", "parts", "width",
        )),
    )


class _Expand(ctypes.Structure):
    """``Call`` of ``expand.cu``."""

    _fields_ = (
        ("added", Additions), *((name, c_void_p) for name in ("x", "out", "tiles")),
        *((name, c_int) for name in ("x_stride", "out_stride", "outputs", "num_tiles", "programs")),
    )


class _ExpandNorm(ctypes.Structure):
    """``Call`` of ``expand_norm.cu``."""

    _fields_ = (
        ("added", Additions), *((name, c_void_p) for name in ("x", "residual", "weight", "out")),
        ("partial_stride", c_int64),
        *((name, c_int) for name in ("x_stride", "residual_stride", "partials")), ("eps", c_float),
        ("offset", c_float),
    )


class _ExpandNormMany(ctypes.Structure):
    """``Call`` of ``expand_norm_many.cu``."""

    _fields_ = (
        ("added", Additions), *((name, c_void_p) for name in ("x", "residual", "weight", "out")),
        *((name, c_int) for name in ("x_stride", "residual_stride")), ("eps", c_float), ("offset", c_float),
    )


def count_staged(parts: int) -> int:
    """Bytes of shared memory for rows on their way, of 64 columns of so many parts for each warp of a block."""
    return STAGES * parts * ROWS * WARPS * COLUMNS * 2


@cache_compiled
def _find_expand(gate: int, ranks: int, device: torch.device) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails."""
    staged = count_staged(2 if gate else 1)
    with fallback("what adapters add is added by Triton's kernels"):
        return load_kernel("expand", device, staged, GATE=gate, MANY=int(ranks > RANKS))
    return None


@cache_compiled
def _find_norm(groups: int, ranks: int, device: torch.device) -> CudaKernel | None:
    with fallback("what adapters add before a norm is added by Triton's kernels"):
        return load_kernel("expand_norm", device, GROUPS=groups, MANY=int(ranks > RANKS))
    return None


@cache_compiled
def _find_norm_many(groups: int, cluster: int, ranks: int, device: torch.device) -> CudaKernel | None:
    staged = NORM_STAGES * groups * 2 * ROWS * NORM_WARPS * COLUMNS * 2  # of x and the residual
    with fallback("what adapters add to many rows before a norm is added by Triton's kernels"):
        return load_kernel(
            "expand_norm_many", device, staged, GROUPS=groups, CLUSTER=cluster, MANY=int(ranks > RANKS)
        )
    return None


def begin_at(numbers: int, *tensors: torch.Tensor) -> bool:
    """Whether rows of all begin at multiples of so many numbers, which are neighbours in memory."""
    return all(
        tensor.stride(-1) == 1 and tensor.data_ptr() % (numbers * tensor.itemsize) == 0
        and all(stride % numbers == 0 for stride in tensor.stride()[:-1]) for tensor in tensors
    )


def describe(reduced: Reduced, bank: LowRankBank, rows: SlotRows) -> Additions | None:
    """None where the kernels do not take these."""
    sums, (_, parts, ranks, _), width = reduced.sums, bank.a.shape, bank.b.shape[2]
    is_float = sums.dtype == torch.float32
    takes_sums = is_float or (sums.dtype == torch.bfloat16 and len(sums) == 1 and reduced.is_dense)
    if not takes_sums or ranks % RANKS or any(end % 8 for end in bank.ends) or rows.block_rows > MOST_BLOCK_ROWS:
        return None
    if bank.b.dtype != torch.bfloat16 or not (begin_at(8, bank.b) and begin_at(2, sums)):
        return None
    return Additions(
        *(tensor.data_ptr() for tensor in (sums, bank.b, bank.ranks, rows.order, rows.blocks)), sums.stride(0),
        sums.stride(1), len(sums), is_float, reduced.is_dense, rows.blocks.shape[1], ranks, parts, width,
    )


def expand(reduced: Reduced, out: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> None:
    """See `EXPAND`."""
    triton.join(rows, out.device)
    added = describe(reduced, bank, rows)
    takes = added is not None and out.dtype == torch.bfloat16 and begin_at(8, out)
    kernel = _find_expand(0, bank.most_ranks, out.device) if takes else None
    if added is None or kernel is None:
        return triton.expand(reduced, out, bank, rows, pdl=True)
    num_tiles = bank.tiles.shape[1]
    programs = ceil_div(num_tiles * (TILE_OUTPUTS // COLUMNS), WARPS)
    call = _Expand(
        added, out.data_ptr(), out.data_ptr(), bank.tiles.data_ptr(), out.stride(0), out.stride(0), 0, num_tiles,
        programs,
    )
    kernel.launch(programs * added.num_blocks, 32 * WARPS, call, is_dependent=True)


def expand_gated(
    reduced: Reduced, x: torch.Tensor, bank: LowRankBank, rows: SlotRows, activation: str
) -> torch.Tensor:
    """See `EXPAND_GATED`."""
    triton.join(rows, x.device)
    added, size = describe(reduced, bank, rows), x.shape[1] // 2
    takes = added is not None and x.dtype == torch.bfloat16 and begin_at(8, x)
    kernel = _find_expand(GATES[activation], bank.most_ranks, x.device) if takes else None
    if added is None or kernel is None:
        return triton.expand_gated(reduced, x, bank, rows, activation, pdl=True)
    out, programs = torch.empty((len(x), size), dtype=x.dtype, device=x.device), ceil_div(size, WARPS * COLUMNS)
    call = _Expand(added, x.data_ptr(), out.data_ptr(), None, x.stride(0), size, size, 0, programs)
    kernel.launch(programs * added.num_blocks, 32 * WARPS, call, is_dependent=True)
    return out


def expand_add_norm(
    reduced: Reduced, x: torch.Tensor, residual: torch.Tensor, norm: Norm, bank: LowRankBank, rows: SlotRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `EXPAND_ADD_NORM`; writes the new residual in place."""
    triton.join(rows, x.device)
    count, width = residual.shape
    added, is_few = describe(reduced, bank, rows), count <= FEW_ROWS
    # what a warp finds out of a row takes as long as eight of its columns: of many rows it has more columns
    cluster = CLUSTER if is_few else min(CLUSTER, next_power_of_2(ceil_div(width, COLUMNS * NORM_WARPS * MOST_GROUPS)))
    groups = ceil_div(width, COLUMNS * NORM_WARPS * cluster)
    fits = is_few or x.dim() == 2
    takes = (
        added is not None and groups <= MOST_GROUPS and fits
        and all(tensor.dtype == torch.bfloat16 for tensor in (residual, norm.weight))
        and x.dtype == (torch.bfloat16 if x.dim() == 2 else torch.float32)
        and begin_at(8, residual, norm.weight) and begin_at(8 if x.dim() == 2 else 2, x)
    )
    find = partial(_find_norm, groups) if is_few else partial(_find_norm_many, groups, cluster)
    kernel = find(bank.most_ranks, x.device) if takes else None
    if added is None or kernel is None:
        return triton.expand_add_norm(reduced, x, residual, norm, bank, rows, pdl=True)
    out = torch.empty((count, width), dtype=residual.dtype, device=x.device)
    places = (tensor.data_ptr() for tensor in (x, residual, norm.weight, out))
    if not is_few:
        many = _ExpandNormMany(added, *places, x.stride(0), residual.stride(0), norm.eps, norm.offset)
        kernel.launch(cluster * added.num_blocks, 32 * NORM_WARPS, many, is_dependent=True)
        return out, residual
    per_block = ceil_div(min(rows.block_rows, count), ROWS)
    call = _ExpandNorm(
        added, *places, x.stride(0) if x.dim() == 3 else 0, x.stride(-2), residual.stride(0),
        0 if x.dim() == 2 else len(x), norm.eps, norm.offset,
    )
    kernel.launch(CLUSTER * per_block * added.num_blocks, 32 * NORM_WARPS, call, is_dependent=True)
    return out, residual
