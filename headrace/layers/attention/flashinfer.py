"""The flashinfer attention backend: long prefill chunks by its paged kernels, planned once a step from host lengths.

Decodes, steps of short chunks and layers with a window go to the Triton kernels, which need no plan on the host and so
run in captured graphs. Nothing is compiled on a request's path: kernels are built when the backend is constructed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from headrace.base.errors import ConfigError
from headrace.kernels.launch import ceil_div
from headrace.layers.attention import HOPPER
from headrace.layers.attention.contract import (
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)
from headrace.layers.attention.triton import BesideTriton, DependentLaunchTritonAttention, TritonAttention
from headrace.memory.copies import pin

logger = logging.getLogger(__name__)

LEAST_QUERIES = 128
"""Fewest query tokens in the longest chunk: below it the Triton kernel is faster, as flashinfer's tiles hold 128
queries of one head (192 at head dim 64). Measured on an H200 at 64 and 128."""
SPLIT_BYTES = 128 * 2**20
"""Workspace for keys split among programs; the kernels for Hopper never split them."""
LEAST_BYTES = 2**20  # flashinfer wants a workspace even where nothing is split


class Planners:
    """flashinfer's wrappers of one geometry; each holds one plan. A wrapper writes its plan into one pinned buffer and
    copies it to the device asynchronously, so it must not plan again before that copy has completed. With several steps
    in flight another wrapper plans; there are as many as were ever needed at once."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._planners: list[tuple[Any, torch.cuda.Event]] = []

    def plan(self, *arguments: torch.Tensor | int, **options: Any) -> Any:
        """Plan on a free wrapper and return it; arguments as its ``plan`` takes them."""
        free = next((pair for pair in self._planners if pair[1].query()), None)
        if free is None:
            free = self._make(), torch.cuda.Event()
            self._planners.append(free)
        planner, copied = free
        planner.plan(*arguments, **options)
        copied.record()
        return planner


class FlashinferAttention(BesideTriton):
    """See `AttentionBackend`. Raises `ConfigError` when flashinfer's kernels for this geometry cannot be built."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        super().__init__(
            (DependentLaunchTritonAttention if geometry.capability >= HOPPER else TritonAttention)(geometry, device)
        )
        is_hopper = geometry.capability[:1] == HOPPER[:1]
        self._geometry, self._device = geometry, device
        self._planners = None if geometry.window else _build_planners(geometry, device, "fa3" if is_hopper else "fa2")
        self._planned: Any = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Plan the prefill chunks of a step in which one is long. Lengths are copied from pinned memory, the page ids
        are gathered on the device; nothing waits."""
        has_long_chunk = (
            not inputs.has_dynamic_lengths and inputs.num_decodes < inputs.num_requests
            and inputs.max_query_len >= LEAST_QUERIES
        )
        self._inputs, self._planned = inputs, None
        if has_long_chunk and self._planners is not None:
            self._planned = self._plan(inputs, self._planners)

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        inputs = self._inputs
        assert inputs is not None, "prepare comes first"
        if self._planned is None:
            return self._prepared(inputs).attend(q, pages, params)
        out = torch.empty_like(q)
        first = inputs.num_decodes
        # q_scale multiplies the wrapper's own scale, head_dim ** -0.5
        relative = params.scale * math.sqrt(self._geometry.head_dim)
        self._planned.run(q[first:], (pages.k, pages.v), q_scale=relative, out=out[first:], enable_pdl=False)
        self._fallback.attend_decodes(q, pages, params, inputs, out)
        return out

    def _plan(self, inputs: AttentionInputs, planners: Planners) -> Any:
        first, page_size = inputs.num_decodes, self._geometry.page_size
        kv_lens = inputs.kv_lens_cpu[first:]
        counts = [ceil_div(length, page_size) for length in kv_lens]
        pages = _gather_pages(inputs.page_table[first:], inputs.kv_lens[first:], counts, page_size)
        return _plan_chunks(planners, self._geometry, inputs.query_lens_cpu[first:], kv_lens, pages)


def _plan_chunks(
    planners: Planners, geometry: AttentionGeometry, query_lens: list[int], kv_lens: list[int], pages: torch.Tensor
) -> Any:
    """Plan prefill chunks. ``pages`` [sum of the requests' page counts] int32 on the device; the other arguments are
    host values, copied from pinned memory."""
    count, page_size = len(kv_lens), geometry.page_size
    lens = torch.tensor(  # [4, n]: query lengths, page counts, tokens in the last page, kv lengths
        [query_lens, [ceil_div(n, page_size) for n in kv_lens], [(n - 1) % page_size + 1 for n in kv_lens], kv_lens],
        dtype=torch.int32
    )
    starts = torch.zeros((2, count + 1), dtype=torch.int32)  # exclusive sums of query lengths and of page counts
    torch.cumsum(lens[:2], 1, dtype=torch.int32, out=starts[:, 1:])
    lens, starts = pin(lens, pages.device), pin(starts, pages.device)
    dtype = getattr(torch, geometry.dtype)
    return planners.plan(
        starts[0], starts[1], pages, lens[2], geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, page_size,
        causal=True, q_data_type=dtype, kv_data_type=dtype, seq_lens=lens[3], max_token_per_sequence=max(query_lens),
    )


def _gather_pages(table: torch.Tensor, kv_lens: torch.Tensor, counts: list[int], page_size: int) -> torch.Tensor:
    """The requests' page ids concatenated, [sum(counts)] int32. ``counts`` are the page counts on the host: with the
    total known there, ``repeat_interleave`` need not wait for the device."""
    if len(counts) == 1:
        return table[0, : counts[0]]
    total = sum(counts)
    num_pages = (kv_lens + (page_size - 1)) // page_size
    owner = torch.repeat_interleave(num_pages, output_size=total)  # [total]: each page's request
    column = torch.arange(total, device=table.device) - (num_pages.cumsum(0) - num_pages)[owner]
    return table[owner, column]


def _build_planners(geometry: AttentionGeometry, device: torch.device, kind: str) -> Planners:
    """Build the kernels by planning a chunk of one token; takes minutes unless the library has them cached."""
    workspace = torch.empty(SPLIT_BYTES if kind == "fa2" else LEAST_BYTES, dtype=torch.uint8, device=device)
    logger.info("flashinfer's %s kernels for head dim %d; built now if they are not cached", kind, geometry.head_dim)
    try:
        # takes seconds, and makes a folder in the user's cache
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        planners = Planners(lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kind))
        _plan_chunks(planners, geometry, [1], [1], torch.zeros(1, dtype=torch.int32, device=device))
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"attention_backend: flashinfer's kernels could not be built ({type(error).__name__}: {error}); it needs "
            "nvcc and ninja, or the package flashinfer-jit-cache; without either take another attention_backend",
            param="attention_backend",
        ) from error
    return planners
