"""The attention backend on cuDNN: prefill chunks in one ragged graph, steps of decodes alone in another.

Decodes in a step that also prefills go to the Triton kernel: their number is arbitrary, and a cuDNN graph is built for
one. So does whatever cuDNN refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.attention import cudnn as sdpa
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages
from headrace.layers.attention.triton import TritonAttention

LEAST_KEYS = 1024
LEAST_QUERIES = 128


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
    """See `AttentionBackend`. ``decodes_here`` False leaves all decodes to the Triton kernel."""

    preferred_page_size = 64
    decodes_here = True

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        self._geometry, self._device = geometry, device
        self._fallback = TritonAttention(geometry, device)
        self._graphs = sdpa.SdpaGraphs(device)
        self._ones = torch.ones(0, dtype=torch.int32, device=device)
        self._inputs: AttentionInputs | None = None
        self._chunks: _Chunks | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Pad the chunks' lengths and tables to the bounds of a graph that may be there already."""
        self._inputs, self._chunks = inputs, None
        if inputs.num_decodes < inputs.num_requests:
            self._chunks = self._pad_chunks(inputs)
        elif self._ones.shape[0] < inputs.num_requests:
            self._ones = torch.ones(next_power_of_2(inputs.num_requests), dtype=torch.int32, device=self._device)

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        chunks = self._chunks
        graph = self._find_graph(q, pages, params)
        if graph is None:
            if self._fallback.inputs is not self._inputs:
                self._fallback.prepare(self._inputs)
            return self._fallback.attend(q, pages, params)
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        tensors = {sdpa.Q: q, sdpa.K: pages.k, sdpa.V: pages.v, sdpa.OUT: out}
        if chunks is None:
            num_requests = self._inputs.num_requests
            tensors |= {sdpa.QUERY_LENS: self._ones[:num_requests], sdpa.KV_LENS: self._inputs.kv_lens, sdpa.TABLE: self._inputs.page_table}
        else:
            self._fallback.attend_decodes(q, pages, params, self._inputs, out)
            tensors |= {sdpa.QUERY_LENS: chunks.query_lens, sdpa.KV_LENS: chunks.kv_lens, sdpa.TABLE: chunks.table}
            tensors |= {sdpa.Q_OFFSETS: chunks.q_offsets, sdpa.OUT_OFFSETS: chunks.out_offsets}
        graph.run(tensors)
        return out

    def _find_graph(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> sdpa.SdpaGraph | None:
        if params.softcap or params.sinks is not None:
            return None
        chunks, inputs, geometry = self._chunks, self._inputs, self._geometry
        if chunks is not None:
            requests, queries, keys, table = chunks.requests, chunks.queries, chunks.keys, chunks.table
        elif self.decodes_here:
            table = inputs.page_table
            requests, queries = inputs.num_requests, 1
            keys = min(max(LEAST_KEYS, next_power_of_2(inputs.max_kv_len)), table.shape[1] * geometry.page_size)
        else:
            return None
        return self._graphs.find(sdpa.Bounds(
            requests, queries, keys, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.value_dim, geometry.page_size,
            num_pages=pages.k.shape[0], table_stride=table.stride(0), is_ragged=chunks is not None, scale=params.scale, window=params.window,
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
