"""What is between two products with additions, in one launch of own CUDA C++ on Hopper: see ``adapted_norm.cu``.

T rows, D hidden size, I inputs of the first product, C ranks of all parts of the second one.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.lora import LowRankBank, Reduced, SlotRows

WARPS, CLUSTER, ROWS, WIDTH = 8, 8, 16, 64
"""As in the source: warps of a program, programs and rows of a cluster, columns of a group."""
MOST_RANKS, MOST_COLUMNS, MOST_GROUPS = 32, 96, 2


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "x", "a", "b", "ranks", "pending", "residual", "weight", "out", "next_a", "next_ranks", "next_sums",
            "order", "blocks",
        )),
        *((name, c_int64) for name in ("x_stride", "pending_stride", "partial_stride", "residual_stride")),
        *((name, c_int) for name in ("inputs", "width", "num_blocks", "partials")), ("eps", c_float),
        ("offset", c_float),
    )


@cache_compiled
def _find_kernel(ranks: int, columns: int, groups: int, device: torch.device) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails."""
    numbers = WARPS * ROWS * max(columns, ranks) + ROWS * (ranks + columns + WARPS + 2) + ROWS * ranks // 2
    with fallback("adapters take more kernels between products"):
        return load_kernel("adapted_norm", device, 4 * numbers, RANKS=ranks, COLUMNS=columns, GROUPS=groups)
    return None


def adapted_norm(
    x: torch.Tensor, pending: torch.Tensor, residual: torch.Tensor, norm: Norm, bank: LowRankBank,
    following: LowRankBank | None, rows: SlotRows,
) -> tuple[torch.Tensor, torch.Tensor, Reduced | None] | None:
    """See `ADAPTED_NORM`."""
    (count, width), inputs, ranks = residual.shape, x.shape[1], bank.a.shape[2]
    columns = 0 if following is None else following.a.shape[1] * ranks
    groups = ceil_div(width, WIDTH * WARPS * CLUSTER)
    fits = (
        rows.block_rows == ROWS and inputs % WIDTH == 0 and width % WIDTH == 0 and ranks <= MOST_RANKS
        and columns <= MOST_COLUMNS and groups <= MOST_GROUPS and len(bank.ends) == 1
        and (following is None or following.a.shape[2] == ranks)
    )
    tensors = (x, residual, bank.a, norm.weight)
    if not fits or any(tensor.dtype != torch.bfloat16 or tensor.data_ptr() % 16 for tensor in tensors):
        return None
    if any(tensor.stride(-1) != 1 or tensor.stride(-2) % 8 for tensor in (x, pending, residual)):
        return None
    if pending.dtype != (torch.bfloat16 if pending.dim() == 2 else torch.float32) or pending.data_ptr() % 16:
        return None
    kernel = _find_kernel(ranks, columns, groups, x.device)
    if kernel is None:
        return None
    out = torch.empty((count, width), dtype=residual.dtype, device=x.device)
    sums = torch.empty((1, count, columns), dtype=torch.float32, device=x.device) if columns else None
    other, num_blocks = following or bank, rows.blocks.shape[1]
    arguments = _Arguments(
        *(c_void_p(tensor.data_ptr()) for tensor in (
            x, bank.a, bank.b, bank.ranks, pending, residual, norm.weight, out, other.a, other.ranks,
            out if sums is None else sums, rows.order, rows.blocks,
        )),
        x.stride(0), pending.stride(-2), pending.stride(0), residual.stride(0), inputs, width, num_blocks,
        0 if pending.dim() == 2 else len(pending), norm.eps, norm.offset,
    )
    kernel.launch(CLUSTER * num_blocks, 32 * WARPS, arguments, is_dependent=True)
    return out, residual, None if sums is None else Reduced(sums)
