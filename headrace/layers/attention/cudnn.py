"""The cuDNN attention backend, for long prefill chunks. There are two kinds of cuDNN graph: a ragged one over paged
keys and values, for all chunks of a step, padded to powers of two; and an exact one over contiguous keys and values,
for a single chunk whose lengths are multiples of `EXACT_STEP`. One of each is built while the model is loaded, the
others in idle moments, for the sizes that steps may have.

Decodes, steps of short chunks, layers with a window (pages before the window may belong to other requests) and what
cuDNN does not support go to the Triton kernels: measured on an H200 they are as fast or faster there, and need no graph
per size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headrace.base.cache import NULL_PAGE
from headrace.kernels.attention import cudnn as sdpa
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.layers.attention.contract import (
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)
from headrace.layers.attention.triton import BesideTriton, DependentLaunchTritonAttention

LEAST_KEYS = 1024  # keys are padded at least to this, so that short contexts share one graph
LEAST_QUERIES = 512
"""Fewest query tokens in the longest chunk: below it the Triton kernel is faster."""
EXACT_STEP = 1024
"""Exact graphs are built only for multiples of this length, in tokens: building one takes tens of milliseconds."""

MOST_PLANNED = 16
"""Chunks of a step for which graphs are built ahead, at most."""


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A step's prefill chunks for the ragged graph. ``requests`` N, ``queries`` and ``keys`` (longest of any request)
    are padded to powers of two; padding requests have no queries and no keys.

    On the device: ``query_lens`` [N] and ``kv_lens`` [N] int32; ``table`` [N, pages of ``keys``] int32, null page where
    a request has none; ``q_offsets`` and ``out_offsets`` [N + 1] int32, in elements; ``unwritten`` int64, the slots
    after the last key in each request's last page, and all slots of the null page."""

    requests: int
    queries: int
    keys: int
    query_lens: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor
    q_offsets: torch.Tensor
    out_offsets: torch.Tensor
    unwritten: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Exact:
    """A step's only prefill chunk, which comes after the decodes: numbers of ``queries`` and ``keys``, both multiples
    of `EXACT_STEP`, and the ``pages`` of the keys, [n] ids or a slice if they are contiguous."""

    queries: int
    keys: int
    pages: torch.Tensor | slice


def list_paged_sizes(most_tokens: int, longest: int) -> list[tuple[int, int, int]]:
    """Requests, queries and keys of ragged graphs that steps of at most ``most_tokens`` may want, of requests of at
    most ``longest`` tokens; of three or more chunks in a step those without earlier keys, up to `MOST_PLANNED` of them.
    In order of their number, from the longest on."""
    queries = [next_power_of_2(min(most_tokens, longest))]
    while queries[-1] // 2 >= LEAST_QUERIES:
        queries.append(queries[-1] // 2)
    counts = [2**i for i in range(MOST_PLANNED.bit_length())]
    fresh = [
        (requests, count, max(LEAST_KEYS, count)) for requests in counts for count in queries if count >= LEAST_QUERIES
    ]
    last = max(LEAST_KEYS, next_power_of_2(longest))
    later = [
        (requests, count, keys) for requests, count, least in fresh if requests <= 2
        for keys in (least << i for i in range(1, 32)) if keys <= last
    ]
    return fresh + later


def list_exact_sizes(most_tokens: int, longest: int) -> list[tuple[int, int]]:
    """Queries and keys of exact graphs: prompts in one chunk, and the full chunks of longer ones."""
    most = min(most_tokens, longest) // EXACT_STEP * EXACT_STEP
    whole = [(count, count) for count in range(most, 0, -EXACT_STEP)]
    return whole + [(most, keys) for keys in range(2 * most, longest + 1, most)] if most == most_tokens else whole


class CudnnAttention(BesideTriton):
    """See `AttentionBackend`."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        super().__init__(DependentLaunchTritonAttention(geometry, device))
        self._geometry, self._device = geometry, device
        self._graphs = sdpa.SdpaGraphs(device)
        self._chunks: _Chunks | None = None
        self._exact: _Exact | None = None
        if not geometry.window:
            self._compile()

    def _compile(self) -> None:
        """Begin to build one graph of each kind: with the first one cuDNN compiles or loads its kernel, which takes 1.2
        to 1.6 s on an H200 and would otherwise delay a request."""
        params, dtype = AttentionParams(self._geometry.head_dim**-0.5), getattr(torch, self._geometry.dtype)
        columns = ceil_div(LEAST_KEYS, self._geometry.page_size)
        exact = self._bounds(params, dtype, 1, EXACT_STEP, EXACT_STEP)
        paged = self._bounds(
            params, dtype, 1, LEAST_QUERIES, LEAST_KEYS, num_pages=columns + 1, table_stride=columns
        )
        self._graphs.build_early((exact, paged))

    def plan_ahead(
        self, pages: KvPages, params: AttentionParams, most_tokens: int, longest: int
    ) -> Iterator[bool]:
        """Build the graphs of the sizes that steps may have, those of the longest chunks first."""
        if self._geometry.window or params.softcap or params.sinks is not None:
            return
        dtype, page_size = getattr(torch, self._geometry.dtype), self._geometry.page_size
        for requests, queries, keys in list_paged_sizes(most_tokens, longest):
            stride = ceil_div(keys, page_size)
            self._find_graph(params, dtype, requests, queries, keys, num_pages=len(pages.k), table_stride=stride)
            yield True
        for queries, keys in list_exact_sizes(most_tokens, longest):
            self._find_graph(params, dtype, 1, queries, keys)
            yield True

    def prepare(self, inputs: AttentionInputs) -> None:
        """Pad the chunks' lengths and tables to powers of two, so that few graphs serve all steps."""
        # a windowed group has freed pages behind its window, which cuDNN would read: see the module's docstring
        is_long = (
            not inputs.has_dynamic_lengths and inputs.num_decodes < inputs.num_requests
            and inputs.max_query_len >= LEAST_QUERIES and not self._geometry.window
        )
        self._inputs, self._chunks = inputs, self._pad_chunks(inputs) if is_long else None
        self._exact = self._find_exact(inputs) if is_long else None

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        inputs, chunks = self._inputs, self._chunks
        assert inputs is not None, "prepare comes first"
        if chunks is None or params.softcap or params.sinks is not None:
            return self._prepared(inputs).attend(q, pages, params)
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        is_done = self._run_exact(q, pages, params, inputs, out) or self._run_paged(q, pages, params, chunks, out)
        if not is_done:
            return self._prepared(inputs).attend(q, pages, params)
        self._fallback.attend_decodes(q, pages, params, inputs, out)
        return out

    def _run_exact(
        self, q: torch.Tensor, pages: KvPages, params: AttentionParams, inputs: AttentionInputs, out: torch.Tensor
    ) -> bool:
        """Write the chunk's rows of ``out`` and return True if there is an exact graph for it. The graph reads
        contiguous keys and values, so scattered pages are gathered into a copy first."""
        exact = self._exact
        graph = self._find_graph(params, q.dtype, 1, exact.queries, exact.keys) if exact is not None else None
        if exact is None or graph is None:
            return False
        k, v = (  # [keys, K, E]
            (t[exact.pages] if isinstance(exact.pages, slice) else t.index_select(0, exact.pages)).flatten(0, 1)
            for t in (pages.k, pages.v)
        )
        first = inputs.num_decodes  # decodes have one token each, so this is also the chunk's first row
        self._graphs.run(graph, {sdpa.Q: q[first:], sdpa.K: k, sdpa.V: v, sdpa.OUT: out[first:]})
        return True

    def _run_paged(
        self, q: torch.Tensor, pages: KvPages, params: AttentionParams, chunks: _Chunks, out: torch.Tensor
    ) -> bool:
        """Write the rows of all chunks in ``out``; False if cuDNN has no graph of these sizes."""
        sizes = (chunks.requests, chunks.queries, chunks.keys)
        graph = self._find_graph(
            params, q.dtype, *sizes, num_pages=pages.k.shape[0], table_stride=chunks.table.stride(0)
        )
        if graph is None:
            return False
        # cuDNN multiplies masked values by zero: a NaN that an earlier request left there would spread
        for t in (pages.k, pages.v):
            t.flatten(0, 1).index_fill_(0, chunks.unwritten, 0)
        self._graphs.run(graph, {
            sdpa.Q: q, sdpa.K: pages.k, sdpa.V: pages.v, sdpa.OUT: out, sdpa.QUERY_LENS: chunks.query_lens,
            sdpa.KV_LENS: chunks.kv_lens, sdpa.TABLE: chunks.table, sdpa.Q_OFFSETS: chunks.q_offsets,
            sdpa.OUT_OFFSETS: chunks.out_offsets,
        })
        return True

    def _find_graph(
        self, params: AttentionParams, dtype: torch.dtype, requests: int, queries: int, keys: int, *,
        num_pages: int = 0, table_stride: int = 0,
    ) -> sdpa.SdpaGraph | None:
        return self._graphs.find(self._bounds(
            params, dtype, requests, queries, keys, num_pages=num_pages, table_stride=table_stride
        ))

    def _bounds(
        self, params: AttentionParams, dtype: torch.dtype, requests: int, queries: int, keys: int, *,
        num_pages: int = 0, table_stride: int = 0,
    ) -> sdpa.Bounds:
        geometry = self._geometry
        return sdpa.Bounds(
            requests, queries, keys, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.value_dim,
            geometry.page_size, num_pages=num_pages, table_stride=table_stride, scale=params.scale,
            window=params.window, dtype=dtype,
        )

    def _find_exact(self, inputs: AttentionInputs) -> _Exact | None:
        queries, keys = inputs.query_lens_cpu[-1], inputs.kv_lens_cpu[-1]
        is_round = queries % EXACT_STEP == 0 and keys % EXACT_STEP == 0 and keys % self._geometry.page_size == 0
        if inputs.num_requests - inputs.num_decodes != 1 or not is_round:
            return None
        count, first = keys // self._geometry.page_size, inputs.last_run
        return _Exact(queries, keys, inputs.page_table[-1, :count] if first is None else slice(first, first + count))

    def _pad_chunks(self, inputs: AttentionInputs) -> _Chunks:
        first, page_size = inputs.num_decodes, self._geometry.page_size
        count = inputs.num_requests - first
        requests = next_power_of_2(count)
        keys = max(LEAST_KEYS, next_power_of_2(inputs.max_kv_len))
        queries = max(LEAST_QUERIES, next_power_of_2(inputs.max_query_len))
        columns = min(ceil_div(keys, page_size), inputs.page_table.shape[1])
        # Device tensors are sliced by host numbers only, so nothing here waits for the device.
        starts = torch.empty(requests + 1, dtype=torch.int32, device=self._device)
        starts[: count + 1] = inputs.query_start[first:]
        starts[count + 1 :] = inputs.query_start[-1]  # padding requests: empty
        kv_lens = torch.zeros(requests, dtype=torch.int32, device=self._device)
        kv_lens[:count] = inputs.kv_lens[first : inputs.num_requests]
        lengths = kv_lens[:count, None]
        # table entries beyond a request's keys may be left over from an earlier request: replace them
        is_used = torch.arange(columns, device=self._device) * page_size < lengths
        table = torch.zeros((requests, ceil_div(keys, page_size)), dtype=torch.int32, device=self._device)
        table[:count, :columns] = torch.where(
            is_used, inputs.page_table[first : inputs.num_requests, :columns], NULL_PAGE
        )
        offset = torch.arange(page_size, device=self._device)
        # A full last page has no unwritten slots; its row repeats slots of the null page, so that the shape of the
        # index tensor does not depend on lengths: [page_size + count * page_size].
        last_page = table[:count].gather(1, (lengths.long() - 1) // page_size) * page_size
        unwritten = torch.cat(
            (offset, torch.where(offset > (lengths - 1) % page_size, last_page + offset, offset).flatten())
        )
        heads = self._geometry.num_heads
        # in elements of q [T, H, E] and out [T, H, E_value]: where each request's rows begin
        offsets = (starts * (heads * self._geometry.head_dim), starts * (heads * self._geometry.value_dim))
        return _Chunks(requests, queries, keys, starts.diff(), kv_lens, table, *offsets, unwritten.long())
