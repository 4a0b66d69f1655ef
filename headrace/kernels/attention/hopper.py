"""Paged causal attention of ragged chunks in own CUDA C++ for Hopper, see ``csrc/cuda/prefill.cu``; plans as those of
`prefill`. Head dims of 64 and 128, half precision, pages in the dtype of the queries.

T tokens, R requests, H heads, K kv heads, E head dim, P pages.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from itertools import product

import torch

from headrace.kernels.attention import HOPPER_LEAST_PAGE, HOPPER_ROWS
from headrace.kernels.attention.blocks import Head, Tile
from headrace.kernels.attention.prefill import PrefillPlan
from headrace.kernels.attention.splits import KEYS, NO_WINDOW
from headrace.kernels.cuda_source import (
    CudaKernel,
    cache_compiled,
    count_sms,
    describe_boxes,
    fallback,
    load_kernel,
)
from headrace.kernels.launch import ceil_div

SLOTS, SLOT_BYTES = 16, 32
"""As in the source, which has `KEYS` too: slots of tiles and their size."""
STAGES = {64: 4, 128: 2}
"""Of the rings of keys and of values, by head dim; as in the source."""
FEW_TILES = 2
"""For each multiprocessor: fewer of the largest, and smaller ones end sooner. On an H200, 64 dims with a window of 128:
512 tokens 11.7 us against 14.6, 2,048 tokens 35.8 against 35.2, 8,192 124.6 against 113.0."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "blocks", "claims", "query_start", "kv_lens", "table", "sinks", "out",
        )),
        ("table_stride", c_int64),
        *((name, c_int) for name in (
            "tiles", "kv_heads", "group", "tokens", "page_size", "window", "has_wide_sinks",
        )),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _SplitCall(_Call):
    """The same with SPLITS."""

    _fields_ = (("parts", c_void_p), ("stats", c_void_p))


def prefill_tile(head_dim: int, rows: int) -> Tile:
    """What a program takes at once, for `plan_prefill`; one of `HOPPER_ROWS`."""
    return Tile(rows, KEYS, rows // 16 + 4, STAGES[head_dim])


def choose_tile(head_dim: int, group: int, num_kv_heads: int, num_tokens: int, num_sms: int) -> Tile:
    """The tile that is best for chunks of so many tokens together."""
    few, many = HOPPER_ROWS[head_dim][0], HOPPER_ROWS[head_dim][-1]
    num_tiles = ceil_div(num_tokens, many // group) * num_kv_heads
    return prefill_tile(head_dim, few if num_tiles < FEW_TILES * num_sms else many)


def count_shared_bytes(head_dim: int, rows: int) -> int:
    """Queries of two tiles, rings of keys and values, slots of tiles, a number and barriers; 1024 to align what is
    swizzled."""
    stages = STAGES[head_dim]
    return 1024 + 4 * head_dim * (rows + stages * KEYS) + SLOT_BYTES * SLOTS + 8 * (5 + 4 * stages + SLOTS)


@cache_compiled
def find_kernel(
    head_dim: int, rows: int, dtype: torch.dtype, device: torch.device, *, has_softcap: bool, has_splits: bool
) -> CudaKernel | None:
    """The kernel, compiled (2 s) unless cached; None, with a warning, where that fails. ``has_splits``: for plans with
    a workspace."""
    flags = {"FP16": 1} if dtype == torch.float16 else {}
    flags |= {"SOFTCAP": 1} if has_softcap else {}
    flags |= {"SPLITS": 1} if has_splits else {}
    with fallback("attention of chunks takes Triton's kernel"):
        return load_kernel(
            "prefill", device, count_shared_bytes(head_dim, rows), E=head_dim, GROUPS=rows // 64, **flags
        )
    return None


def is_compiled(head_dim: int, dtype: torch.dtype, has_softcap: bool, device: torch.device) -> bool:
    """Whether there are kernels for all `HOPPER_ROWS` and plans: a dry run of any step then compiles all."""
    return all(
        find_kernel(head_dim, rows, dtype, device, has_softcap=has_softcap, has_splits=has_splits) is not None
        for rows, has_splits in product(HOPPER_ROWS[head_dim], (False, True))
    )


def takes(q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], head: Head) -> bool:
    """Whether `prefill` can read tensors of these types and strides, which have the shapes of its contract."""
    _, page_size, kv_heads, head_dim = pages[0].shape
    return (
        head_dim in HOPPER_ROWS and q.dtype in (torch.bfloat16, torch.float16) and q.is_contiguous() and head.scale > 0
        and page_size >= HOPPER_LEAST_PAGE and page_size & (page_size - 1) == 0
        and all(
            x.dtype == q.dtype and x.shape == pages[0].shape and x.stride()[1:] == (kv_heads * head_dim, head_dim, 1)
            and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in pages
        )
        and (head.sinks is None or head.sinks.dtype in (q.dtype, torch.float32))
    )


def describe_call(
    q: torch.Tensor, k_pages: torch.Tensor, out: torch.Tensor, plan: PrefillPlan, head: Head,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> _Call:
    """The kernel's argument."""
    query_start, kv_lens, page_table = step
    _, page_size, kv_heads, _ = k_pages.shape
    constants, workspace = head.constants(), plan.workspace
    more: tuple[int, ...] = ()
    if workspace is not None:
        assert plan.tile.rows <= workspace.parts.shape[1] and q.shape[2] == workspace.parts.shape[2]
        more = (workspace.parts.data_ptr(), workspace.stats.data_ptr())
    return (_SplitCall if more else _Call)(
        *(None if x is None else x.data_ptr() for x in (
            plan.blocks, plan.claims, query_start, kv_lens, page_table, head.sinks, out,
        )),
        page_table.stride(0), plan.blocks.shape[0] * kv_heads, kv_heads, q.shape[1] // kv_heads, plan.tokens, page_size,
        min(head.window or NO_WINDOW, NO_WINDOW), int(head.sinks is not None and head.sinks.dtype == torch.float32),
        constants["scale"], constants["softcap"], *more,
    )


def prefill(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, plan: PrefillPlan, head: Head,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, pdl: bool = True,
) -> None:
    """See `headrace.kernels.attention.prefill.prefill`; tensors are those that it `takes`, kernels `is_compiled`.
    ``plan`` is made with `choose_tile`. Calls with the same plan must be in turn: they share ``plan.claims``."""
    assert takes(q, pages, head), "see `takes`"
    if not plan.blocks.shape[0]:
        return
    k_pages, v_pages = pages
    page_size, kv_heads, head_dim = k_pages.shape[1:]
    rows = plan.tile.rows
    kernel = find_kernel(
        head_dim, rows, q.dtype, q.device, has_softcap=head.softcap > 0, has_splits=plan.workspace is not None
    )
    assert kernel is not None, "see `is_compiled`"
    grouped = q.unflatten(1, (kv_heads, -1))  # [T, K, G, E]
    box = (1, min(page_size, KEYS), 1, 64)
    maps = (
        describe_boxes(grouped, (plan.tokens, 1, grouped.shape[2], 64)), describe_boxes(k_pages, box),
        describe_boxes(v_pages, box),
    )
    call = describe_call(q, k_pages, out, plan, head, step)
    kernel.launch(min(call.tiles, count_sms(q.device)), 2 * rows + 128, *maps, call, is_dependent=pdl)
