"""Cache backends of DeepSeek-V4. `prepare` computes the index tensors of a step once for all layers of a cache group:
slots of each token's sliding window, which compressed entries it sees, which windows end, where compressor state goes.

T tokens, R requests, C candidates for windows that end in this step. Everything is computed on the device, from its own
lengths, in shapes that follow from the number of tokens of each request, or from T and R alone where a captured step
leaves these open: nothing waits.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from headrace.base.cache import CacheSpec
from headrace.base.step import MAX_DRAFTS
from headrace.kernels.compressor import Windows
from headrace.kernels.latents import DECODE_ENTRIES, DECODE_STATE, DECODE_WINDOWS, LIST_ENTRIES
from headrace.kernels.latents.slots import find_slots
from headrace.kernels.operation import KernelQuery, Operation
from headrace.kernels.sparse_attention import EntryView
from headrace.layers.attention.contract import AttentionInputs, CacheBackend
from headrace.layers.hot_entries import HotEntries
from headrace.memory.hot_pool import HotLayer
from headrace.models.deepseek_v4.layout import (
    BLOCK,
    INDEX_KEYS,
    INDEX_KEYS_FP4,
    INDEX_KEYS_FP8,
    PAGE_SIZE,
    SCORES_AT_ONCE,
    SCORES_CAPTURED,
    draft_ring_rows,
    slots_per_page,
)


def has_decodes_alone(inputs: AttentionInputs) -> bool:
    """Whether each request has one token."""
    return inputs.num_decodes == inputs.num_requests


class _Backend(CacheBackend):
    """Base of the backends here: page geometry, and whose tokens are where. ``operation``: what makes the index tensors
    of steps of decodes alone."""

    operation: ClassVar[Operation]
    preferred_page_size = PAGE_SIZE
    supports_dynamic_lengths = divides_dynamic_keys = True

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device):
        self.spec, self.page_size, self.device = spec, page_size, device
        self.per_page = slots_per_page(spec, page_size)  # slots, not tokens: fewer where entries are compressed
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        query = KernelQuery(device.type, "int64", capability)
        self._decode, self._list = self.operation.choose(query), LIST_ENTRIES.choose(query)

    def locate(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's request and position, [T] int64 each. Padding is at position -1 of the last request."""
        tokens, ends = torch.arange(inputs.num_tokens, dtype=torch.int32, device=self.device), inputs.query_start[1:]
        requests = torch.searchsorted(ends, tokens, right=True)
        if inputs.has_dynamic_lengths:
            requests.clamp_(max=inputs.num_requests - 1)
        positions = (inputs.kv_lens - ends).index_select(0, requests).long() + tokens
        if inputs.has_dynamic_lengths:
            positions.masked_fill_(tokens >= ends[-1], -1)
        return requests, positions


class WindowBackend(_Backend):
    """``numbers`` [T, window] int64: slots of each token's latest positions, newest (its own) first; ``counts`` [T]
    int64: how many there are, the others being undefined."""

    operation = DECODE_WINDOWS
    numbers: torch.Tensor
    counts: torch.Tensor

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        if has_decodes_alone(inputs):  # a kernel is compiled for a window: short requests take that of long ones, too
            self.numbers, self.counts = self._decode(
                inputs.page_table, inputs.kv_lens, window=self.spec.window, per_page=self.per_page
            )
            return
        window = min(self.spec.window, inputs.max_kv_len)  # no token has more positions up to its own
        requests, positions = self.locate(inputs)
        seen = (positions[:, None] - torch.arange(window, device=self.device)).clamp_(min=0)  # [T, window]
        self.numbers = find_slots(inputs.page_table, requests[:, None].expand_as(seen), seen, self.per_page)
        self.counts = (positions + 1).clamp_(1, window)
        if inputs.has_dynamic_lengths:  # padding attends to what padding writes to the null page
            self.numbers.masked_fill_(positions[:, None] < 0, 0)


class EntriesBackend(_Backend):
    """``view``: which compressed entries each token sees; behind `open_hot`, as numbered there. ``scores_at_once``: the
    most scores of index keys that exist at a time in this step."""

    operation = DECODE_ENTRIES
    view: EntryView
    scores_at_once: int
    _inputs: AttentionInputs
    _all: torch.Tensor | None
    _hot: HotEntries | None

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device):
        super().__init__(spec, page_size, device)
        if spec.hot_slots:
            self.most_drafts = max(0, min(MAX_DRAFTS, spec.hot_tokens - 1))
            self.supports_dynamic_lengths = False  # pages of prompts are staged by lengths that the host knows

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        ratio, longest = self.spec.compress_ratio, inputs.max_kv_len // self.spec.compress_ratio
        self._inputs, self._all, self._hot = inputs, None, None
        self.scores_at_once = SCORES_CAPTURED if inputs.has_dynamic_lengths else SCORES_AT_ONCE
        if has_decodes_alone(inputs):
            requests, visible = self._decode(inputs.kv_lens, ratio=ratio)
            self.view = EntryView(inputs.page_table, requests, visible, longest, inputs.num_decodes, [])
            return
        requests, positions = self.locate(inputs)
        starts = 0
        prefills: list[tuple[int, int, int, int]] | None = None if inputs.has_dynamic_lengths else []
        for request, (length, end) in enumerate(zip(inputs.query_lens_cpu, inputs.kv_lens_cpu, strict=True)):
            if request >= inputs.num_decodes and prefills is not None:
                prefills.append((request, starts, length, end // ratio))
            starts += length
        # causal: a token sees the windows whose last token is not after it, its own window if it is that last token
        visible = torch.div(positions + 1, ratio, rounding_mode="floor")
        self.view = EntryView(inputs.page_table, requests, visible, longest, inputs.num_decodes, prefills)

    def open_hot(self, layer: HotLayer) -> HotEntries:
        """How entries in host memory are read in this step; `view` and `list_all` number them so from now on."""
        if self._hot is None:
            self._hot = HotEntries(layer, self._inputs, self.view, self._list)
            self.view = self._hot.view
        return self._hot

    def context_bytes(self, num_tokens: int, kv_len: int) -> int:
        """See `CacheBackend`: scores of index keys."""
        has_scores = self.spec.kind in (INDEX_KEYS, INDEX_KEYS_FP8, INDEX_KEYS_FP4)
        return 4 * min(SCORES_AT_ONCE, num_tokens * (kv_len // self.spec.compress_ratio)) if has_scores else 0

    def list_all(self) -> torch.Tensor:
        """Slots [R, longest] int64 of every entry of each request, undefined beyond the request's own; made at the
        first call of a step."""
        if self._all is None:
            self._all = self._list(self.view.page_table, count=self.view.longest, per_page=self.per_page)
        return self._all


class StateBackend(_Backend):
    """``windows``: those that end in this step. ``rows`` [T] int64: where each token's projections are stored, a row of
    the null page for tokens that no later step needs. ``stores``: some tokens with their rows, to be stored before
    windows are pooled, and some to be stored behind. Drafts are verified where rings have room for wrong ones."""

    operation = DECODE_STATE
    windows: Windows
    rows: torch.Tensor
    stores: tuple[tuple[slice, torch.Tensor], tuple[slice, torch.Tensor]]

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device):
        super().__init__(spec, page_size, device)
        self.most_drafts = MAX_DRAFTS if spec.window >= draft_ring_rows(spec.compress_ratio) else 0

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        ratio, ring = self.spec.compress_ratio, self.spec.window
        if has_decodes_alone(inputs):
            requests, numbers, self.rows = self._decode(
                inputs.page_table, inputs.kv_lens, ratio=ratio, block=BLOCK, ring=ring, per_page=self.per_page
            )
            self.windows = Windows(requests, numbers, inputs.query_start, inputs.kv_lens)
            self._divide_stores(inputs.num_decodes)
            return
        requests, positions = self.locate(inputs)
        self.windows = self._find_windows(inputs, ratio)
        # A block of BLOCK tokens has only ``ring`` rows, reused in turn, so of this step's tokens only the last
        # ``ring`` of each block are stored. So no row is stored twice either, in an order that would be undefined.
        stop = torch.minimum(inputs.kv_lens.index_select(0, requests), (positions // BLOCK + 1) * BLOCK)
        rows = find_slots(
            inputs.page_table, requests, positions // BLOCK * ring + positions % ring, self.per_page
        )
        self.rows = rows.masked_fill_((positions < stop - ring) | (positions < 0), 0)
        if inputs.has_dynamic_lengths:
            is_decode = (inputs.query_start.diff() == 1).index_select(0, requests)
            whole = slice(0, inputs.num_tokens)
            self.stores = (whole, self.rows.masked_fill(~is_decode, 0)), (whole, self.rows.masked_fill(is_decode, 0))
        else:
            self._divide_stores(inputs.num_decodes)

    def _divide_stores(self, num_decodes: int) -> None:
        # Decodes are stored before windows are pooled: the window of one that verifies drafts has tokens of this step
        # that other decodes have. Chunks are stored behind: they may overwrite rows that their first window reads.
        few, behind = slice(0, num_decodes), slice(num_decodes, len(self.rows))
        self.stores = (few, self.rows[few]), (behind, self.rows[behind])

    def _find_windows(self, inputs: AttentionInputs, ratio: int) -> Windows:
        # Of L tokens at most L // ratio + 1 end a window. The host's lengths, or the most that all requests may have,
        # give the number of candidates, the device's lengths the windows; candidates that are none get the number -1.
        ends, lengths = inputs.kv_lens.long(), inputs.query_start.diff().long()
        firsts = torch.div(ends - lengths, ratio, rounding_mode="floor")
        room = torch.div(lengths, ratio, rounding_mode="floor") + 1
        until = room.cumsum(0)
        count = sum(length // ratio + 1 for length in inputs.query_lens_cpu)
        if inputs.has_dynamic_lengths:
            count = inputs.num_tokens // ratio + inputs.num_requests
        candidates = torch.arange(count, device=self.device)
        requests = torch.searchsorted(until, candidates, right=True).clamp_(max=inputs.num_requests - 1)
        numbers = (firsts + room - until).index_select(0, requests) + candidates
        ended = torch.div(ends, ratio, rounding_mode="floor").index_select(0, requests)
        return Windows(requests, numbers.masked_fill(numbers >= ended, -1), inputs.query_start, inputs.kv_lens)
