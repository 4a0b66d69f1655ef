"""`HotEntries`: how the layers of a cache group read entries whose pages are in host memory, in one step.

A decode wants few of a long context, and its drafts few others: those that the row lacks are copied to its hot slots.
The tokens of a prompt want most of theirs between them: pages are staged, whole requests at a time.

T tokens, R requests, n of them decodes, k entries wanted by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from headrace.kernels.hot_slots import NONE, Loads
from headrace.kernels.latents.slots import Slots
from headrace.kernels.sparse_attention import EntryView, SeenSlots
from headrace.layers.attention.contract import AttentionInputs, KvPages
from headrace.memory.copies import to_device
from headrace.memory.hot_pool import HotLayer


@dataclass(frozen=True)
class _Staging:
    """Prompts whose pages are staged together: their tokens, and these ``pages`` [n] int64 in host memory."""

    tokens: slice
    pages: torch.Tensor


class HotEntries:
    """``view``: the step's, whose page table numbers entries as `read` takes them: of a decode from 0 on, of others by
    their staged pages. ``list_entries`` is of `LIST_ENTRIES`. Everything is computed on the device, in shapes that the
    host knows."""

    def __init__(
        self, layer: HotLayer, inputs: AttentionInputs, view: EntryView, list_entries: Callable[..., torch.Tensor]
    ):
        assert inputs.rows is not None, "no step with dynamic lengths reads entries in host memory"
        self._inputs, self._num_decodes, self._list = inputs, inputs.num_decodes, list_entries
        self._device = inputs.page_table.device
        self._staged: list[_Staging] = []
        local = torch.arange(inputs.page_table.shape[1], dtype=torch.int32, device=self._device).expand(
            inputs.num_requests, -1
        )
        if self._num_decodes < inputs.num_requests:
            local = local + self._stage_prompts(layer, view)[:, None]
        self.view = replace(view, page_table=local)
        self._all: torch.Tensor | None = None

    def _stage_prompts(self, layer: HotLayer, view: EntryView) -> torch.Tensor:
        """Divide the prompts such that each part's pages fit; returns the first staged page [R] int32 of each."""
        count, per_page, inputs = self._num_decodes, layer.per_page, self._inputs
        firsts = torch.zeros(inputs.num_requests, dtype=torch.int32, device=self._device)
        starts = [0]
        for length in inputs.query_lens_cpu:
            starts.append(starts[-1] + length)
        assert view.prefills is not None
        sizes = [-(-entries // per_page) for *_, entries in view.prefills]
        while count < inputs.num_requests:
            first, total = count, 0
            while count < inputs.num_requests and total + sizes[count - self._num_decodes] <= layer.num_staged:
                total += sizes[count - self._num_decodes]
                count += 1
            assert count > first, "any request fits alone"
            own = torch.tensor(sizes[first - self._num_decodes : count - self._num_decodes])
            ends = own.cumsum(0)
            firsts[first:count] = to_device(ends - own, self._device).to(torch.int32)
            requests = to_device(torch.repeat_interleave(torch.arange(first, count), own), self._device)
            entries = to_device(torch.arange(total) - torch.repeat_interleave(ends - own, own), self._device)
            pages = inputs.page_table[requests, entries].long()
            self._staged.append(_Staging(slice(starts[first], starts[count]), pages))
        return firsts

    def read(
        self, layer: HotLayer, wanted: torch.Tensor | None, open_slots: Callable[[KvPages], Slots]
    ) -> Iterator[tuple[slice, SeenSlots]]:
        """Spans of tokens, with what they attend to. ``wanted`` [T, k] int64: entries as ``view`` numbers them, padded
        with -1; None: all that are visible, at most as many as a row has slots. ``open_slots`` makes
        `Slots` of a layer's tensors. What a span attends to is there until the next is asked for."""
        count, view = self._num_decodes, self.view
        if wanted is None and self._all is None:
            self._all = self._list(view.page_table, count=view.longest, per_page=layer.per_page)  # [R, longest]
        if count:
            decodes = slice(0, count)
            found = self._swap(layer, self._list_decodes() if wanted is None else wanted[decodes])
            yield decodes, SeenSlots(open_slots(KvPages(*layer.slots)), found, view.visible[decodes])
        for part in self._staged:
            layer.stage(part.pages)
            slots, visible = open_slots(KvPages(*layer.staged)), view.visible[part.tokens]
            if wanted is not None:
                yield part.tokens, SeenSlots(slots, wanted[part.tokens], visible)
            else:
                assert self._all is not None
                yield part.tokens, SeenSlots(slots, self._all, visible, view.requests[part.tokens])

    def _list_decodes(self) -> torch.Tensor:
        """All entries [n, longest] int64 of decodes, padded with `NONE`."""
        assert self._all is not None
        own = self._all[: self._num_decodes]
        numbers = torch.arange(own.shape[1], device=self._device)
        return torch.where(numbers < self.view.visible[: self._num_decodes, None], own, NONE)

    def _swap(self, layer: HotLayer, wanted: torch.Tensor) -> torch.Tensor:
        """Bring what decodes want [n, k] int64 to their rows' hot slots; returns the numbers [n, k] of these."""
        inputs, count = self._inputs, self._num_decodes
        assert inputs.rows is not None
        found, loads = torch.empty_like(wanted), Loads.allocate(count, wanted.shape[1], self._device)
        layer.find_swaps(layer.hot, inputs.rows[:count], wanted, inputs.kv_lens[:count], found, loads)
        layer.load_entries(layer.parts, inputs.page_table[:count], loads)
        return found
