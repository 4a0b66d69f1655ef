"""Decodes of a few requests, from the product before: norms of queries and keys, rotation, page write and attention in
one launch of own CUDA C++, see ``csrc/cuda/few_decodes.cu``. Pages are of bfloat16 or e4m3.

T tokens, H heads, K kv heads, G = H / K, E head dim, P pages.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import DecodeStep
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.few_decodes import Rotation

WARPS, RING_BYTES, MOST_GROUP = 4, 16 << 10, 16
"""As in the source; a warp's ring depends neither on the head dim nor on what pages hold."""
MOST_ROWS = 16
"""Keys of the step are in two units of a request at most."""
SHORT_CONTEXTS = (8192, 4096)
"""By rows, from one on, for pages of either type: for how many keys steps are captured by themselves, see
`CacheBackend.short_context`."""


@dataclass(frozen=True)
class Division:
    """``cluster`` blocks share the keys of each of at most ``most_tiles`` (request, kv head) pairs; contexts of more
    than ``most_keys`` are read faster by `decode`, which divides them among all multiprocessors."""

    most_tiles: int
    cluster: int
    most_keys: int


DIVISIONS = {
    64: (Division(8, 16, 8192), Division(16, 16, 4096), Division(32, 8, 2048)),
    128: (Division(8, 16, 8192), Division(16, 8, 4096)),
}
"""By head dim, for pages of either type. Measured on an H200 with bfloat16 for 4 pairs and more; with more than these
it was not faster, or not measured. One or two pairs, as of a rank, take as long as 4: blocks have as many of a pair's
keys."""


def find_division(head_dim: int, tiles: int, most_keys: int) -> Division | None:
    """The division of so many pairs, none of which sees more than ``most_keys``; None where it is not faster."""
    found = next((each for each in DIVISIONS.get(head_dim, ()) if tiles <= each.most_tiles), None)
    return None if found is None or most_keys > found.most_keys else found


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "qkv", "q_norm", "k_norm", "cos_sin", "positions", "slots", "kv_lens", "table", "k", "v", "out", "sinks",
        )),
        *((name, c_int64) for name in ("qkv_stride", "table_stride", "k_stride", "v_stride")),
        *((name, c_int) for name in ("rows", "kv_heads", "window", "has_wide_sinks")),
        *((name, c_float) for name in ("scale", "softcap", "eps", "offset")),
    )


def count_shared_bytes(head_dim: int, group: int, cluster: int) -> int:
    """Of a block: rings, queries, sums of its warps and of the cluster's blocks, the barrier of these."""
    rows = 16 if group > 8 else 8
    return WARPS * RING_BYTES + 2 * rows * head_dim + 8 * group * (WARPS + cluster) + 4 * group * head_dim + 8


def list_macros(rotation: Rotation, pages: torch.Tensor, head: Head, cluster: int) -> dict[str, int]:
    """What the source is compiled with, for ``pages`` of keys."""
    shape = rotation.shape
    return dict(
        E=shape["head_dim"], G=shape["num_heads"] // shape["num_kv_heads"], PAGE=pages.shape[1], CLUSTER=cluster,
        ROTARY=0 if rotation.cos_sin is None else shape["rotary_dim"], INTERLEAVED=int(shape["interleaved"]),
        NORM=int(rotation.norms is not None), SOFTCAP=int(head.softcap > 0),
        FP8=int(pages.dtype == torch.float8_e4m3fn),
    )


@cache_compiled
def _find_kernel(shared_bytes: int, cluster: int, device: torch.device, **macros: int) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails, or where no cluster fits."""
    with fallback("rotation and attention of decodes take a kernel each"), torch.cuda.device(device):
        kernel = load_kernel("few_decodes", device, shared_bytes, **macros)
        return kernel if kernel.count_clusters(cluster, 32 * WARPS) else None
    return None


def _takes(
    qkv: torch.Tensor, rotation: Rotation, pages: tuple[torch.Tensor, torch.Tensor], head: Head, step: DecodeStep
) -> bool:
    shape, (k_pages, v_pages) = rotation.shape, pages
    rows, kv_heads, head_dim = len(qkv), shape["num_kv_heads"], shape["head_dim"]
    strides = (kv_heads * head_dim, head_dim, 1)
    return (
        0 < rows <= MOST_ROWS and rows == step.num_requests and step.query_start is None
        and shape["num_heads"] <= MOST_GROUP * kv_heads and qkv.dtype == torch.bfloat16 and qkv.stride(1) == 1
        and k_pages.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and all(
            x.dtype == k_pages.dtype and x.shape[2:] == (kv_heads, head_dim) and x.stride()[1:] == strides
            and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0 for x in (k_pages, v_pages)
        )
        and rotation.positions.dim() == 1
        and all(len(norm) == head_dim and norm.dtype == torch.bfloat16 for norm in rotation.norms or ())
        and (head.sinks is None or head.sinks.dtype in (torch.bfloat16, torch.float32))
    )


def describe_call(
    qkv: torch.Tensor, rotation: Rotation, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, head: Head,
    step: DecodeStep,
) -> _Call:
    """The kernel's argument; ``out`` [T, H, E] is contiguous."""
    shape, (k_pages, v_pages), constants = rotation.shape, pages, head.constants()
    return _Call(
        *(None if x is None else x.data_ptr() for x in (
            qkv, *(rotation.norms or (None, None)), rotation.cos_sin, rotation.positions, rotation.slots, step.kv_lens,
            step.page_table, k_pages, v_pages, out, head.sinks,
        )),
        qkv.stride(0), step.page_table.stride(0), k_pages.stride(0), v_pages.stride(0), len(qkv),
        shape["num_kv_heads"], head.window, int(head.sinks is not None and head.sinks.dtype == torch.float32),
        constants["scale"], constants["softcap"], shape["norm_eps"], shape["norm_offset"],
    )


def few_decodes(
    qkv: torch.Tensor, rotation: Rotation, pages: tuple[torch.Tensor, torch.Tensor], head: Head, step: DecodeStep
) -> torch.Tensor | None:
    """What `ROPE_WRITE` and `decode` do for T tokens that all are decodes: writes k and v and returns [T, H, E]. None,
    with nothing done, where the kernel does not take them. Tokens of one request must be at consecutive positions. For
    pages of e4m3, k and v are rounded once, larger ones to 448, and attention sees what pages then hold; queries are
    float16 instead of bfloat16.

    By programmatic dependent launch, and it reads pages, tables, lengths, positions and slots before the wait: those
    must have been written before the product that gives ``qkv`` began."""
    if not _takes(qkv, rotation, pages, head, step):
        return None
    shape = rotation.shape
    head_dim, kv_heads = shape["head_dim"], shape["num_kv_heads"]
    group, tiles = shape["num_heads"] // kv_heads, len(qkv) * kv_heads
    division = find_division(head_dim, tiles, min(step.max_kv_len, head.window or step.max_kv_len))
    if division is None:
        return None
    cluster, macros = division.cluster, list_macros(rotation, pages[0], head, division.cluster)
    kernel = _find_kernel(count_shared_bytes(head_dim, group, cluster), cluster, qkv.device, **macros)
    if kernel is None:
        return None
    out = torch.empty((len(qkv), shape["num_heads"], head_dim), dtype=qkv.dtype, device=qkv.device)
    call = describe_call(qkv, rotation, pages, out, head, step)
    kernel.launch(cluster * tiles, 32 * WARPS, call, is_dependent=True)
    return out
