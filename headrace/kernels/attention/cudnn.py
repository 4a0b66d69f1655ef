"""Attention graphs of cuDNN (through nvidia-cudnn-frontend): one per `Bounds`, built once and cached.

R requests, H heads, K kv heads, E head dim. There are two kinds. A paged graph fixes the maximum numbers of requests,
queries and keys, and the pool; it reads the actual lengths and page table from device memory. An exact graph is for one
request of exactly these lengths with contiguous keys and values: several percent faster, since it looks up no pages.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cudnn
import torch

from headrace.kernels.cuda_source import current_stream
from headrace.kernels.late import note_compiled

logger = logging.getLogger(__name__)

DATA_TYPES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
Q, K, V, OUT, QUERY_LENS, KV_LENS, TABLE, Q_OFFSETS, OUT_OFFSETS = range(1, 10)
"""Names (uids) of a graph's tensors. ``*_OFFSETS`` [R + 1] int32 count elements and exist in ragged graphs only."""


@dataclass(frozen=True)
class Bounds:
    """What a graph is built for. Paged: q [T, H, E] holds up to ``requests`` chunks of up to ``queries`` tokens back to
    back, k and v are a pool of ``num_pages`` pages [P, page_size, K, E], and ``table_stride`` is the page table's row
    length in entries. Exact: ``num_pages`` is 0, q is [queries, H, E], k and v are [keys, K, E]."""

    requests: int
    queries: int
    keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    num_pages: int
    table_stride: int
    scale: float
    window: int
    dtype: torch.dtype

    @property
    def is_exact(self) -> bool:
        return self.num_pages == 0

    def describe(self) -> str:
        """The sizes, in words."""
        kind = "exact" if self.is_exact else "paged"
        return f"{kind} attention of cuDNN for {self.requests} x {self.queries} queries and {self.keys} keys"


class SdpaGraph:
    """A built graph, and the bytes of workspace that it takes."""

    def __init__(self, bounds: Bounds, handle: Any):
        self._graph = (_build_exact if bounds.is_exact else _build_paged)(bounds, handle)
        self._handle, self._device = handle, torch.cuda.current_device()
        self.workspace_bytes = max(1, self._graph.get_workspace_size())

    def run(self, tensors: dict[int, torch.Tensor], workspace: torch.Tensor) -> None:
        """Launch on torch's current stream; ``tensors`` by the names above."""
        cudnn.set_stream(handle=self._handle, stream=current_stream(self._device))
        self._graph.execute(tensors, workspace, handle=self._handle)


class SdpaGraphs:
    """A cache of graphs by bounds; failures are cached too, so that cuDNN is asked once. Launches share the workspace
    of the largest, so they must be on one stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._handle = cudnn.create_handle()
        self._graphs: dict[Bounds, SdpaGraph | None] = {}
        self._workspace = torch.empty(1, dtype=torch.uint8, device=device)
        self._early: threading.Thread | None = None

    def build_early(self, bounds: Sequence[Bounds]) -> None:
        """Build these graphs on a thread, which the next `find` waits for: loading a model is mostly waiting."""
        self._early = threading.Thread(target=self._build, args=(bounds,), name="cudnn-graphs", daemon=True)
        self._early.start()

    def _build(self, bounds: Sequence[Bounds]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        for wanted in bounds:
            self._add(wanted)

    def find(self, bounds: Bounds) -> SdpaGraph | None:
        """The graph for ``bounds``, None if cuDNN does not support them. Building takes tens of milliseconds, the first
        of a kind a second, holds the GIL and may allocate the workspace, so do it before a capture, and ahead of steps.
        """
        if self._early is not None:
            self._early.join()
            self._early = None
        if bounds not in self._graphs:
            self._add(bounds)
        return self._graphs[bounds]

    def _add(self, bounds: Bounds) -> None:
        began = time.perf_counter()
        try:
            graph = self._graphs[bounds] = SdpaGraph(bounds, self._handle)
            if graph.workspace_bytes > self._workspace.numel():
                self._workspace = torch.empty(graph.workspace_bytes, dtype=torch.uint8, device=self._device)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
            logger.warning("cuDNN has no attention for %s: %s", bounds, error)
            self._graphs[bounds] = None
        note_compiled(bounds.describe(), time.perf_counter() - began)

    def run(self, graph: SdpaGraph, tensors: dict[int, torch.Tensor]) -> None:
        """Launch a graph that was found here."""
        graph.run(tensors, self._workspace)


def _begin(b: Bounds, handle: Any) -> Any:
    return cudnn.pygraph(
        io_data_type=getattr(cudnn.data_type, DATA_TYPES[b.dtype]), intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT, handle=handle,
    )


def _finish(graph: Any) -> Any:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def _build_exact(b: Bounds, handle: Any) -> Any:
    graph = _begin(b, handle)

    # cuDNN names dimensions [batch, heads, tokens, dim]; strides make that a view of [tokens, heads, dim] in memory
    def rows(name: int, count: int, heads: int, dim: int) -> Any:
        return graph.tensor(dim=(1, heads, count, dim), stride=(count * heads * dim, dim, heads * dim, 1), uid=name)

    q = rows(Q, b.queries, b.num_heads, b.head_dim)
    k, v = rows(K, b.keys, b.num_kv_heads, b.head_dim), rows(V, b.keys, b.num_kv_heads, b.value_dim)
    out, _ = graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=False, attn_scale=b.scale, **_mask(b))
    out.set_output(True).set_uid(OUT).set_dim(
        (1, b.num_heads, b.queries, b.value_dim)
    ).set_stride(_query_stride(b, b.value_dim))
    return _finish(graph)


def _build_paged(b: Bounds, handle: Any) -> Any:
    graph = _begin(b, handle)

    def integers(name: int, *dims: int, stride: int = 1) -> Any:
        return graph.tensor(dim=(*dims, 1), stride=(stride, stride, 1, 1), data_type=cudnn.data_type.INT32, uid=name)

    def heads(name: int, dim: int) -> Any:
        return graph.tensor(dim=(b.requests, b.num_heads, b.queries, dim), stride=_query_stride(b, dim), uid=name)

    def pages(name: int, dim: int) -> Any:
        # [P, K, page_size, E] to cuDNN, [P, page_size, K, E] in memory
        row = b.num_kv_heads * dim
        return graph.tensor(
            dim=(b.num_pages, b.num_kv_heads, b.page_size, dim), stride=(b.page_size * row, dim, row, 1), uid=name
        )

    q = heads(Q, b.head_dim)
    table = integers(TABLE, b.requests, 1, -(-b.keys // b.page_size), stride=b.table_stride)
    # Ragged: requests are packed back to back; request r starts ``offsets[r]`` elements into the tensor, and the batch
    # stride is not used.
    q.set_ragged_offset(integers(Q_OFFSETS, b.requests + 1, 1, 1))
    out, _ = graph.sdpa(
        name="attention", q=q, k=pages(K, b.head_dim), v=pages(V, b.value_dim), generate_stats=False,
        attn_scale=b.scale, use_padding_mask=True, seq_len_q=integers(QUERY_LENS, b.requests, 1, 1),
        seq_len_kv=integers(KV_LENS, b.requests, 1, 1), paged_attention_k_table=table, paged_attention_v_table=table,
        paged_attention_max_seq_len_kv=b.keys, **_mask(b),
    )
    out.set_output(True).set_uid(OUT).set_dim(
        (b.requests, b.num_heads, b.queries, b.value_dim)
    ).set_stride(_query_stride(b, b.value_dim))
    out.set_ragged_offset(integers(OUT_OFFSETS, b.requests + 1, 1, 1))
    return _finish(graph)


def _query_stride(b: Bounds, dim: int) -> tuple[int, int, int, int]:
    # of [R, H, queries, dim] to cuDNN, tokens of H heads in memory
    row = b.num_heads * dim
    return (b.queries * row, dim, row, 1)


def _mask(b: Bounds) -> dict[str, Any]:
    # bottom right: the last query sees all keys of its request
    mask = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
    return {**mask, "diagonal_band_left_bound": b.window} if b.window else mask
