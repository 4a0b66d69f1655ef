"""The attention backend on cuDNN: long prefill chunks in one ragged graph.

Decodes, steps of short chunks and whatever cuDNN refuses go to the Triton kernels: measured on an H200 they are as fast
or faster there, and need no plan for each size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.attention import cudnn as sdpa
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages
from headrace.layers.attention.triton import DependentLaunchTritonAttention

LEAST_KEYS = 1024
LEAST_QUERIES = 512
"""Below so many query tokens in the longest chunk the Triton kernel is faster."""


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A step's prefill chunks, padded to a power of two of requests: the padding has no queries and no keys."""

    requests: int
    queries: int
    keys: int
    query_lens: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor
    q_offsets: torch.Tensor
    out_offsets: torch.Tensor


class CudnnAttention:
    """See `AttentionBackend`."""

    preferred_page_size = 64

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        self._geometry, self._device = geometry, device
        self._fallback = DependentLaunchTritonAttention(geometry, device)
        self._graphs = sdpa.SdpaGraphs(device)
        self._inputs: AttentionInputs | None = None
        self._chunks: _Chunks | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Pad the chunks' lengths and tables to the bounds of a graph that may be there already."""
        is_long = inputs.num_decodes < inputs.num_requests and inputs.max_query_len >= LEAST_QUERIES
        self._inputs, self._chunks = inputs, self._pad_chunks(inputs) if is_long else None

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        chunks = self._chunks
        graph = self._find_graph(q, pages, params)
        if graph is None:
            if self._fallback.inputs is not self._inputs:
                self._fallback.prepare(self._inputs)
            return self._fallback.attend(q, pages, params)
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        self._fallback.attend_decodes(q, pages, params, self._inputs, out)
        tensors = {
            sdpa.Q: q, sdpa.K: pages.k, sdpa.V: pages.v, sdpa.OUT: out, sdpa.QUERY_LENS: chunks.query_lens, sdpa.KV_LENS: chunks.kv_lens,
            sdpa.TABLE: chunks.table, sdpa.Q_OFFSETS: chunks.q_offsets, sdpa.OUT_OFFSETS: chunks.out_offsets,
        }
        graph.run(tensors)
        return out

    def _find_graph(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> sdpa.SdpaGraph | None:
        chunks, geometry = self._chunks, self._geometry
        if chunks is None or params.softcap or params.sinks is not None:
            return None
        return self._graphs.find(sdpa.Bounds(
            chunks.requests, chunks.queries, chunks.keys, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.value_dim,
            geometry.page_size, num_pages=pages.k.shape[0], table_stride=chunks.table.stride(0), scale=params.scale, window=params.window,
            dtype=q.dtype,
        ))

    def _pad_chunks(self, inputs: AttentionInputs) -> _Chunks:
        first, page_size = inputs.num_decodes, self._geometry.page_size
        count = inputs.num_requests - first
        requests = next_power_of_2(count)
        keys = max(LEAST_KEYS, next_power_of_2(inputs.max_kv_len))
        queries = max(LEAST_QUERIES, next_power_of_2(inputs.max_query_len))
        columns = min(ceil_div(keys, page_size), inputs.page_table.shape[1])
        starts = torch.empty(requests + 1, dtype=torch.int32, device=self._device)
        starts[: count + 1] = inputs.query_start[first:]
        starts[count + 1 :] = inputs.query_start[-1]
        kv_lens = torch.zeros(requests, dtype=torch.int32, device=self._device)
        kv_lens[:count] = inputs.kv_lens[first : inputs.num_requests]
        table = torch.zeros((requests, ceil_div(keys, page_size)), dtype=torch.int32, device=self._device)
        table[:count, :columns] = inputs.page_table[first : inputs.num_requests, :columns]
        heads = self._geometry.num_heads
        offsets = (starts * (heads * self._geometry.head_dim), starts * (heads * self._geometry.value_dim))
        return _Chunks(requests, queries, keys, starts.diff(), kv_lens, table, *offsets)
