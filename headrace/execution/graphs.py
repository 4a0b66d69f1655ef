"""Decode steps captured as CUDA graphs, one per bucket of requests: one launch instead of hundreds.

Refuses: prefill, and sampling beyond the likeliest token; the runner draws those from the logits a replay leaves.
B bucket size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.cache import CacheLayout
from headrace.execution.rows import Rows
from headrace.kernels.decode_inputs import DECODE_INPUTS, DecodeInputs
from headrace.kernels.operation import KernelQuery
from headrace.kernels.sample import KEEP_BEST
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs
from headrace.layers.batch import ForwardBatch, GroupStep
from headrace.memory.page_tables import PageTables
from headrace.models.family import ServedModel

DENSE_BUCKETS = (1, 2, 4)
"""Below 8 requests a padded row costs as much as a real one; from 8 on the step is 8 (later 16, 32) requests."""


def bucket_sizes(max_requests: int) -> list[int]:
    """Ascending; the last is ``max_requests``, so that every decode step has a bucket."""
    sizes = [*DENSE_BUCKETS, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_requests + 1, 32)]
    return sorted({*(size for size in sizes if size < max_requests), max_requests})


@dataclass(slots=True)
class DecodeState:
    """What every graph reads and writes besides the model: the rows' last tokens and the page tables."""

    rows: Rows
    tables: PageTables
    layout: CacheLayout
    backends: list[AttentionBackend]


class DecodeGraph:
    """One bucket. ``requests`` [2, B] int64 is its input: rows, and lengths after the step; padding is the null row at
    length 1. After `replay`: ``logits`` [B, V] float32, ``drawn`` [2, B] int64 (likeliest ids, states), and the rows'
    last tokens are set. All are overwritten by the next replay of any bucket; stream order keeps readers safe."""

    def __init__(self, size: int, model: ServedModel, state: DecodeState, device: torch.device):
        self.size, self._model, self._state = size, model, state
        self.requests = torch.empty((2, size), dtype=torch.int64, device=device)
        query = KernelQuery(device.type, "float32", torch.cuda.get_device_capability(device))
        self._decode_inputs, self._keep_best = DECODE_INPUTS.choose(query), KEEP_BEST.choose(query)
        self._inputs = DecodeInputs.allocate(size, state.tables.tensor)
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.logits: torch.Tensor | None = None
        self.drawn: torch.Tensor | None = None
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, pool: tuple[int, int]) -> None:
        """Run once to compile and choose what must be, then capture into the shared memory pool."""
        self.requests[0] = self._state.tables.null_row
        self.requests[1] = 1
        self._run()
        with torch.cuda.graph(self._graph, pool=pool):
            self.logits, self.drawn = self._run()

    def replay(self, requests: torch.Tensor) -> None:
        """``requests`` [2 * B] as `pack` made it, on the device."""
        self.requests.view(-1).copy_(requests)
        self._graph.replay()

    def pack(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[2 * B] int64 on the host: the requests and the padding."""
        packed = np.ones(2 * self.size, dtype=np.int64)
        packed[: len(rows)] = rows
        packed[len(rows) : self.size] = self._state.tables.null_row
        packed[self.size : self.size + len(rows)] = ends
        return packed

    def _run(self) -> tuple[torch.Tensor, torch.Tensor]:
        state, inputs = self._state, self._inputs
        self._decode_inputs(self.requests, state.rows.last_token, state.tables.tensor, state.layout.page_size, inputs)
        groups = [self._group_step(g) for g in range(len(state.backends))]
        logits = self._model.compute_logits(self._model.forward(ForwardBatch(inputs.token_ids, inputs.positions, groups)))
        return logits, self._keep_best(logits, self.requests[0], state.rows.last_token)

    def _group_step(self, group: int) -> GroupStep:
        inputs, longest, backend = self._inputs, self._state.layout.max_model_len, self._state.backends[group]
        step = AttentionInputs(
            num_tokens=self.size, num_decodes=self.size, query_lens_cpu=[1] * self.size, kv_lens_cpu=[longest] * self.size, max_query_len=1,
            max_kv_len=longest, query_start=self._query_start, kv_lens=inputs.kv_lens, page_table=inputs.page_tables[group], slots=inputs.slots[group],
        )
        backend.prepare(step)
        return GroupStep(step, backend)


class DecodeGraphs:
    """All buckets of one runner, captured largest first so that the smaller ones fit into its memory."""

    def __init__(self, model: ServedModel, state: DecodeState, device: torch.device):
        self._model, self._state, self._device = model, state, device
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, sizes: list[int], pool: tuple[int, int], advance: Callable[[], None]) -> None:
        """Capture buckets; ``advance`` is called after each."""
        for size in sorted(sizes, reverse=True):
            graph = DecodeGraph(size, self._model, self._state, self._device)
            graph.capture(pool)
            self._graphs[size] = graph
            advance()
        self._sizes = sorted(self._graphs)

    def find(self, num_requests: int) -> DecodeGraph | None:
        """The smallest bucket that holds so many requests."""
        at = int(np.searchsorted(self._sizes, num_requests))
        return self._graphs[self._sizes[at]] if at < len(self._sizes) else None
