"""Attention within spans in own CUDA C++ for Hopper, see ``csrc/cuda/span_attention.cu``, behind the rotation in place.
Spans that are all short take Triton's kernel; without a compiler all do what `triton` does.

T tokens, H heads, E head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from functools import lru_cache

import torch

from headrace.kernels.cuda_source import (
    MAP_BYTES,
    CudaKernel,
    cache_compiled,
    count_sms,
    encode_map,
    fallback,
    load_kernel,
)
from headrace.kernels.launch import ceil_div
from headrace.kernels.span_attention import Spans, triton

KEYS, SLOTS, SLOT_BYTES = 128, 8, 16
"""As in the sources: keys of a block, slots of tiles and their size."""
HALF = 64
"""Dims of a row of shared memory, which are 128 bytes."""
MOST_DIMS = 128
THREE_GROUPS_DIMS = 72
"""The most dims with which sums, logits and weights of a row fit the registers of three warpgroups."""
THREE_GROUPS_GAIN = 1.1
"""How much sooner three warpgroups of 64 rows have done the same work than two, where tiles come out even: 1.07 to 1.16
in ten shapes on an H200."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("starts", c_void_p), ("claims", c_void_p), ("out", c_void_p), ("spans", c_int), ("heads", c_int),
        ("scale", c_float),
    )


def list_groups(head_dim: int) -> tuple[int, ...]:
    """Numbers of warpgroups that there are kernels for; each has 64 rows of a tile."""
    return (2, 3) if head_dim <= THREE_GROUPS_DIMS else (2,)


def count_rest(head_dim: int) -> int:
    """Columns of the boxes of dims beyond `HALF`: 16, 32, `HALF`, or 0 if there are no such dims."""
    rest = max(0, head_dim - HALF)
    return rest and max(16, 1 << (rest - 1).bit_length())


def count_shared_bytes(head_dim: int, groups: int) -> int:
    """Queries of two tiles, rings of keys and values, slots of tiles, and barriers; 1024 to align what is swizzled."""
    row_bytes, stages = (256, 2) if head_dim > HALF else (128, 4)
    tiles = 2 * 64 * groups + 2 * stages * KEYS
    return 1024 + row_bytes * tiles + SLOT_BYTES * SLOTS + 8 * (4 + 4 * stages + SLOTS)


@cache_compiled
def find_kernel(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> CudaKernel | None:
    """The kernel, compiled (2 s) unless cached; None, with a warning, where that fails."""
    flags = {"FP16": 1} if dtype == torch.float16 else {}
    with fallback("attention of encoders takes torch's flash attention"):
        return load_kernel(
            "span_attention", device, count_shared_bytes(head_dim, groups), E=head_dim, GROUPS=groups,
            REST=count_rest(head_dim), **flags,
        )
    return None


def find_kernels(head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[int, CudaKernel]:
    """By the number of warpgroups; empty unless there are all, so that a dry run of any item compiles all."""
    found = {groups: find_kernel(head_dim, groups, dtype, device) for groups in list_groups(head_dim)}
    kernels = {groups: kernel for groups, kernel in found.items() if kernel is not None}
    return kernels if len(kernels) == len(found) else {}


def choose_groups(lengths: Sequence[int], heads: int, head_dim: int, num_sms: int) -> int:
    """Those whose programs have done all tiles first: each takes one after the other."""

    def estimate(groups: int) -> float:
        rows = 64 * groups
        tiles = heads * sum(ceil_div(length, rows) for length in lengths)
        return ceil_div(tiles, num_sms) * rows / (THREE_GROUPS_GAIN if groups == 3 else 1.0)

    return min(list_groups(head_dim), key=estimate)


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> bool:
    """Whether the kernel reads tensors of these strides."""
    return scale > 0 and q.shape[2] % 8 == 0 and q.shape[2] <= MOST_DIMS and all(
        x.dtype in (torch.bfloat16, torch.float16) and x.stride() == q.stride() and x.stride(2) == 1
        and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (q, k, v)
    )


@lru_cache(maxsize=1024)
def _describe(
    addresses: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> ctypes.Array[ctypes.c_char]:
    """``Maps`` of the source. Kept for the next layers, whose tensors come to the same addresses."""
    parts, rest = [], count_rest(shape[2])
    for address, own in zip(addresses, (rows, KEYS, KEYS), strict=True):
        first = encode_map(address, dtype, shape, strides, (own, 1, HALF))
        # rows as far apart as those of the first dims, and swizzled like them
        second = encode_map(address, dtype, shape, strides, (own, 1, rest), 2 * HALF) if rest else first
        parts += [first.raw, second.raw]
    return ctypes.create_string_buffer(b"".join(parts), 6 * MAP_BYTES)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float, kernel: CudaKernel, groups: int
) -> torch.Tensor:
    """`SPAN_ATTENTION` without rotation, of tensors that the kernel `takes`, by one of `find_kernels`."""
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    claims = spans.claims
    if claims is None:
        claims = torch.zeros(2, dtype=torch.int32, device=q.device)
    tiles = heads * sum(ceil_div(length, 64 * groups) for length in spans.lengths)
    maps = _describe(
        (q.data_ptr(), k.data_ptr(), v.data_ptr()), q.dtype, tuple(q.shape), q.stride(), 64 * groups
    )
    call = _Call(
        spans.starts.data_ptr(), claims.data_ptr(), out.data_ptr(), len(spans.lengths), heads, scale * triton.LOG2_E
    )
    kernel.launch(min(tiles, count_sms(q.device)), 128 * (groups + 1), maps, call, is_dependent=True)
    return out


def span_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float,
    cos_sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `SPAN_ATTENTION`."""
    heads, head_dim = q.shape[1:]
    is_short = max(spans.lengths) <= triton.MOST_SHORT
    kernels = {} if is_short or not takes(q, k, v, scale) else find_kernels(head_dim, q.dtype, q.device)
    if not kernels:
        return triton.span_attention(q, k, v, spans, scale, cos_sin)
    if cos_sin is not None:
        triton.rotate(q, k, cos_sin)
    groups = choose_groups(spans.lengths, heads, head_dim, count_sms(q.device))
    return attend(q, k, v, spans, scale, kernels[groups], groups)
