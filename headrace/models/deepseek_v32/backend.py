"""`RowsBackend`: which tokens each token of a step sees, and which of them were selected. T tokens, k selected tokens.
Everything is computed from the device's own lengths."""

from __future__ import annotations

from typing import Any

import torch

from headrace.base.cache import CacheSpec
from headrace.base.step import MAX_DRAFTS
from headrace.kernels.latents import LIST_ENTRIES
from headrace.kernels.latents.slots import Slots
from headrace.kernels.operation import KernelQuery
from headrace.kernels.sparse_attention import EntryView, SeenSlots
from headrace.layers.attention.contract import AttentionInputs, CacheBackend
from headrace.layers.batch import GroupStep
from headrace.layers.hot_entries import HotEntries
from headrace.memory.hot_pool import HotLayer


class RowsBackend(CacheBackend):
    """``view``: every token is an entry; a token sees its own and those before. ``selected`` [T, k] int64: slots that
    the layer in hand attends to, padded with -1; None: all that are visible. A layer without an indexer leaves what
    the layer before it has selected."""

    view: EntryView
    _inputs: AttentionInputs

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device):
        self.page_size, self.device = page_size, device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self._list = LIST_ENTRIES.choose(KernelQuery(device.type, "int64", capability))
        self.selected: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self._hot: HotEntries | None = None
        if spec.hot_slots:
            self.most_drafts = max(0, min(MAX_DRAFTS, spec.hot_tokens - 1))

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        starts, prefills = 0, []
        for request, (length, end) in enumerate(zip(inputs.query_lens_cpu, inputs.kv_lens_cpu, strict=True)):
            if request >= inputs.num_decodes:
                prefills.append((request, starts, length, end))
            starts += length
        if inputs.num_decodes == inputs.num_requests:
            requests, visible = torch.arange(inputs.num_requests, device=self.device), inputs.kv_lens.long()
        else:
            tokens = torch.arange(inputs.num_tokens, dtype=torch.int32, device=self.device)
            ends = inputs.query_start[1:]
            requests = torch.searchsorted(ends, tokens, right=True)
            visible = (inputs.kv_lens - ends).index_select(0, requests).long() + tokens + 1
        self.view = EntryView(
            inputs.page_table, requests, visible, inputs.max_kv_len, inputs.num_decodes, prefills
        )
        self._inputs, self.selected, self._all, self._hot = inputs, None, None, None

    def open_hot(self, layer: HotLayer) -> HotEntries:
        """How latents in host memory are read in this step; ``selected`` are then numbers of its view."""
        if self._hot is None:
            self._hot = HotEntries(layer, self._inputs, self.view, self._list)
        return self._hot

    @staticmethod
    def of(step: GroupStep) -> RowsBackend:
        """That of a step of this family's cache group."""
        backend: Any = step.backend
        return backend

    def find_seen(self, rows: torch.Tensor) -> SeenSlots:
        """What each token attends to in the layer in hand, whose pages are ``rows`` [P, page_size, E]."""
        slots = Slots(rows)
        if self.selected is not None:
            return SeenSlots(slots, self.selected, self.view.visible)
        if self._all is None:
            self._all = self._list(self.view.page_table, count=self.view.longest, per_page=self.page_size)
        return SeenSlots(slots, self._all, self.view.visible, self.view.requests)
