"""What adapters add to q, k and v, in the launch that rotates them and writes pages, by own CUDA C++ on Hopper: see
``expand_rope.cu``.

T rows, H heads, K kv heads, E head dim, half of it pairs that are rotated.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.launch import ceil_div
from headrace.kernels.lora import LowRankBank, Reduced, SlotRows, triton
from headrace.kernels.lora.additions import COLUMNS, RANKS, WARPS, Additions, begin_at, count_staged, describe


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("added", Additions), *((name, c_void_p) for name in (
            "x", "q", "k", "v", "cos_sin", "positions", "slots", "q_norm", "k_norm",
        )),
        ("k_stride", c_int64), ("v_stride", c_int64),
        *((name, c_int) for name in ("x_stride", "heads", "kv_heads", "page", "programs")), ("eps", c_float),
        ("offset", c_float),
    )


@cache_compiled
def _find_kernel(half: int, has_norm: bool, ranks: int, device: torch.device) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails."""
    with fallback("what adapters add to q, k and v takes a kernel of its own"):
        return load_kernel(
            "expand_rope", device, count_staged(2), HALF=half, NORM=int(has_norm), MANY=int(ranks > RANKS)
        )
    return None


def _takes(qkv: torch.Tensor, rotation: Rotation, pages: tuple[torch.Tensor, torch.Tensor]) -> bool:
    shape, norms = rotation.shape, rotation.norms or ()
    heads, kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    half, cos_sin = head_dim // 2, rotation.cos_sin
    return (
        cos_sin is not None and cos_sin.dtype == torch.float32 and begin_at(4, cos_sin)
        and rotation.positions.dim() == 1 and rotation.positions.dtype == torch.int64
        and shape["rotary_dim"] == head_dim and not shape["interleaved"] and head_dim % 16 == 0
        # a warp has columns of one part, and with norms all of its heads
        and heads * half % COLUMNS == 0 and kv_heads * half % COLUMNS == 0 and (not norms or COLUMNS % half == 0)
        and all(len(norm) == head_dim and norm.dtype == torch.bfloat16 and begin_at(8, norm) for norm in norms)
        and qkv.dtype == torch.bfloat16 and begin_at(8, qkv)
        and all(
            x.dtype == torch.bfloat16 and begin_at(8, x) and x.shape[2:] == (kv_heads, head_dim)
            and x.stride()[1:] == (kv_heads * head_dim, head_dim, 1) for x in pages
        )
    )


def expand_rope_write(
    reduced: Reduced, qkv: torch.Tensor, rotation: Rotation, k_pages: torch.Tensor, v_pages: torch.Tensor,
    bank: LowRankBank, rows: SlotRows,
) -> torch.Tensor | None:
    """See `EXPAND_ROPE_WRITE`. The step's positions and slots must have been written before the product that gives
    ``qkv`` began."""
    shape, added = rotation.shape, describe(reduced, bank, rows)
    heads, kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    ends = tuple(count * head_dim for count in (heads, heads + kv_heads, heads + 2 * kv_heads))
    if added is None or bank.ends != ends or not _takes(qkv, rotation, (k_pages, v_pages)):
        return None
    has_norm = rotation.norms is not None
    kernel = _find_kernel(head_dim // 2, has_norm, bank.most_ranks, qkv.device)
    if kernel is None:
        return None
    triton.join(rows, qkv.device)
    q = torch.empty((len(qkv), heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    programs = ceil_div(ends[-1] // 2, WARPS * COLUMNS)
    call = _Call(
        added, *(None if x is None else x.data_ptr() for x in (
            qkv, q, k_pages, v_pages, rotation.cos_sin, rotation.positions, rotation.slots,
            *(rotation.norms or (None, None)),
        )),
        k_pages.stride(0), v_pages.stride(0), qkv.stride(0), heads, kv_heads, k_pages.shape[1], programs,
        shape["norm_eps"], shape["norm_offset"],
    )
    kernel.launch(programs * added.num_blocks, 32 * WARPS, call, is_dependent=True)
    return q
