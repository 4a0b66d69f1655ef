"""Paged attention of decodes over pages of e4m3 in own CUDA C++ for Hopper, see ``csrc/cuda/fp8_decodes.cu``. Head dims
of 64 and 128, queries in half precision.

T tokens, R requests, H heads, K kv heads, G = H / K, E head dim, P pages.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint32, c_void_p
from dataclasses import dataclass

import torch

from headrace.base.step import MAX_DRAFTS
from headrace.kernels.attention import LONG_CONTEXT
from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import MANY_REQUESTS, DecodeStep, DecodeWorkspace
from headrace.kernels.cuda_source import CudaKernel, address_of, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div

MOST_GROUP, PAGE_STEP = 16, 16
"""Query heads of a kv head, at most; pages are multiples of so many tokens."""
FRESH = MAX_DRAFTS + 1
"""Keys of a request that a step writes, at most: the kernel asks for the others before these are written."""


@dataclass(frozen=True)
class Shape:
    """Of a block: each of ``warps`` has ``depth`` tiles of ``keys`` keys on their way, and ``blocks`` are on a
    multiprocessor."""

    keys: int
    warps: int
    depth: int
    blocks: int

    def count_shared_bytes(self, head_dim: int) -> int:
        """Rings of keys and values."""
        return 2 * self.warps * self.depth * self.keys * head_dim


SHAPES = {64: Shape(32, 4, 4, 3), 128: Shape(32, 4, 2, 3)}
"""By head dim; measured on an H200."""


@dataclass(frozen=True)
class SplitRule:
    """At most ``most_tiles`` (request, kv head) pairs for each multiprocessor have ``programs`` blocks on each."""

    most_tiles: float
    programs: int


SPLIT_RULES = (SplitRule(2, 3),)
LONG_RULES = (SplitRule(3.5, 4), SplitRule(7.5, 8))
"""For more than `MANY_REQUESTS` of which one may have more than `LONG_CONTEXT` keys. ``programs`` are at most
`decodes.MOST_PROGRAMS`."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "q", "k", "v", "out", "partial", "stats", "counters", "query_start", "kv_lens", "table", "sinks",
        )),
        *((name, c_uint32) for name in ("k_stride", "v_stride")),
        *((name, c_int) for name in ("table_stride", "requests", "slots", "window", "has_wide_sinks")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


def plan_slots(
    num_requests: int, num_kv_heads: int, max_kv_len: int, *, head_dim: int, group: int, processors: int
) -> int:
    """How many blocks of each kv head share the keys of all requests, none of which sees more than ``max_kv_len``; 0:
    each request has one. Depends only on what a captured graph fixes."""
    shape = SHAPES[head_dim]
    is_long = num_requests > MANY_REQUESTS and max_kv_len > LONG_CONTEXT
    for rule in (*SPLIT_RULES, *(LONG_RULES if is_long else ())):
        if num_requests * num_kv_heads <= rule.most_tiles * processors:
            # no more than there are units of shares, nor than those of one request have room for in shared memory
            slots = min(
                rule.programs * processors // num_kv_heads,
                num_requests * ceil_div(max_kv_len, shape.keys * shape.warps),
                shape.count_shared_bytes(head_dim) // (8 * group),
            )
            return slots if slots > num_requests else 0
    return 0


def list_macros(head_dim: int, group: int, num_kv_heads: int, page_size: int) -> dict[str, int]:
    """What the source is compiled with, beside the type of queries and whether there is a soft-cap."""
    shape = SHAPES[head_dim]
    return dict(
        E=head_dim, G=group, KV_HEADS=num_kv_heads, PAGE=page_size, KEYS=shape.keys, WARPS=shape.warps,
        DEPTH=shape.depth, BLOCKS=shape.blocks, FRESH=FRESH,
    )


@cache_compiled
def _find_kernel(
    head_dim: int, dtype: torch.dtype, has_softcap: bool, device: torch.device, **macros: int
) -> CudaKernel | None:
    """The kernel, compiled (1 s) unless cached; None, with a warning, where that fails."""
    flags = {"FP16": 1} if dtype == torch.float16 else {}
    flags["SOFTCAP"] = int(has_softcap)
    with fallback("attention of decodes over FP8 pages takes Triton's kernel"):
        return load_kernel("fp8_decodes", device, SHAPES[head_dim].count_shared_bytes(head_dim), **macros, **flags)
    return None


def takes(q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], head: Head) -> bool:
    """Whether the kernel can read tensors of these types and strides, which have the shapes of `decodes.decode`."""
    _, page_size, kv_heads, head_dim = pages[0].shape
    return (
        head_dim in SHAPES and q.dtype in (torch.bfloat16, torch.float16) and q.is_contiguous()
        and q.data_ptr() % 16 == 0 and q.shape[1] <= MOST_GROUP * kv_heads and page_size % PAGE_STEP == 0
        and page_size & (page_size - 1) == 0
        and all(
            x.dtype == torch.float8_e4m3fn and x.shape == pages[0].shape
            and x.stride()[1:] == (kv_heads * head_dim, head_dim, 1) and x.stride(0) % 16 == 0
            and x.data_ptr() % 16 == 0 for x in pages
        )
        and (head.sinks is None or head.sinks.dtype in (q.dtype, torch.float32))
    )


def describe_call(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, workspace: DecodeWorkspace,
    head: Head, step: DecodeStep, slots: int,
) -> _Call:
    """The kernel's argument."""
    constants = head.constants()
    return _Call(
        *map(address_of, (
            q, *pages, out, workspace.partial, workspace.stats, workspace.counters, step.query_start, step.kv_lens,
            step.page_table, head.sinks,
        )),
        *(x.stride(0) // 16 for x in pages), step.page_table.stride(0), step.num_requests, slots, head.window,
        int(head.sinks is not None and head.sinks.dtype == torch.float32), constants["scale"], constants["softcap"],
    )


def fp8_decodes(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, workspace: DecodeWorkspace,
    head: Head, step: DecodeStep, *, pdl: bool = False,
) -> bool:
    """What `decodes.decode` does; False, with nothing done, where the kernel does not take it.

    With ``pdl`` it reads lengths, page tables, ``query_start`` and all but the newest keys before the previous kernel
    has ended: of these it may write only the keys of the step."""
    if not takes(q, pages, head):
        return False
    _, page_size, kv_heads, head_dim = pages[0].shape
    group, slots = q.shape[1] // kv_heads, 0
    kernel = _find_kernel(
        head_dim, q.dtype, head.softcap > 0, q.device, **list_macros(head_dim, group, kv_heads, page_size)
    )
    if kernel is None:
        return False
    if step.query_start is None:  # else the number of decodes is not known on the host: do not split
        reach = min(step.max_kv_len, head.window or step.max_kv_len)
        slots = plan_slots(
            step.num_requests, kv_heads, reach, head_dim=head_dim, group=group, processors=workspace.processors
        )
    call = describe_call(q, pages, out, workspace, head, step, slots)
    programs = kv_heads * (slots or step.num_requests)
    kernel.launch(programs, 32 * SHAPES[head_dim].warps, call, is_dependent=pdl)
    return True
