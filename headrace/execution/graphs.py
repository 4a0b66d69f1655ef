"""Decode steps captured as CUDA graphs, one per bucket of requests: one launch instead of hundreds.

Refuses: prefill, and sampling beyond the likeliest token; the runner draws those from the logits a replay leaves.
B bucket size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.cache import CacheLayout
from headrace.execution.captures import Capture, Records
from headrace.execution.rows import Rows
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import DECODE_INPUTS, DecodeInputs
from headrace.kernels.sample import SAMPLE_GREEDY
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs
from headrace.layers.batch import ForwardBatch, GroupStep
from headrace.layers.model import ServedModel
from headrace.memory.page_tables import PageTables

DENSE_BUCKETS = (1, 2, 4)
"""Below 8 requests a padded row costs as much as a real one; from 8 on the step is 8 (later 16, 32) requests: padding
has no keys to attend to, and tensor cores take as long for 130 rows as for 144. Each size is 20 ms of the start."""


def bucket_sizes(max_requests: int) -> list[int]:
    """Ascending; the last is ``max_requests``, so that every decode step has a bucket."""
    sizes = [*DENSE_BUCKETS, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_requests + 1, 32)]
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
    length 1. `run` yields logits [B, V] float32 and drawn [2, B] int64 (likeliest ids, states), and sets the rows' last
    tokens. All may be overwritten by the next run of any bucket; stream order keeps readers safe."""

    def __init__(self, size: int, model: ServedModel, state: DecodeState, recorder: Records):
        device = state.rows.last_token.device
        self.size, self._model, self._state = size, model, state
        self.requests = torch.empty((2, size), dtype=torch.int64, device=device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        query = KernelQuery(device.type, "float32", capability)
        self._decode_inputs, self._sample_greedy = DECODE_INPUTS.choose(query), SAMPLE_GREEDY.choose(query)
        self._inputs = DecodeInputs.allocate(size, state.tables.tensor)
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._capture = Capture(self._compute, recorder)

    @property
    def is_settled(self) -> bool:
        """See `Bucket`, here and below."""
        return self._capture.is_settled

    def settle(self) -> None:
        self.requests[0] = self._state.tables.null_row
        self.requests[1] = 1
        self._capture.run()

    def run(self, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``requests`` [2 * B] as `pack` made it, on the device."""
        self.requests.view(-1).copy_(requests)
        return self._capture.run()

    def pack(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[2 * B] int64 on the host: the requests and the padding."""
        packed = np.ones(2 * self.size, dtype=np.int64)
        packed[: len(rows)] = rows
        packed[len(rows) : self.size] = self._state.tables.null_row
        packed[self.size : self.size + len(rows)] = ends
        return packed

    def _compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        state, inputs = self._state, self._inputs
        self._decode_inputs(self.requests, state.rows.last_token, state.tables.tensor, state.layout.page_size, inputs)
        groups = [self._group_step(g) for g in range(len(state.backends))]
        logits = self._model.compute_logits(
            self._model.forward(ForwardBatch(inputs.token_ids, inputs.positions, groups))
        )
        return logits, self._sample_greedy(logits, self.requests[0], state.rows.last_token)

    def _group_step(self, group: int) -> GroupStep:
        inputs, longest, backend = self._inputs, self._state.layout.max_model_len, self._state.backends[group]
        step = AttentionInputs(
            num_tokens=self.size, num_decodes=self.size, query_lens_cpu=[1] * self.size,
            kv_lens_cpu=[longest] * self.size, max_query_len=1,
            max_kv_len=longest, query_start=self._query_start, kv_lens=inputs.kv_lens,
            page_table=inputs.page_tables[group], slots=inputs.slots[group],
        )
        backend.prepare(step)
        return GroupStep(step, backend)

