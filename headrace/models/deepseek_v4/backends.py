"""Cache backends of DeepSeek-V4. `prepare` computes the index tensors of a step once for all layers of a cache group:
slots of each token's sliding window, slots of compressed entries, rows of compressor state to read and write.

T tokens, R requests, C compression windows that end in this step, n tokens that make an entry. Index arrays are
computed on the host from the step's lengths and copied from pageable memory, which synchronises with the device, so no
CUDA graph is captured over these backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.cache import CacheSpec
from headrace.layers.attention.contract import AttentionInputs, CacheBackend
from headrace.models.deepseek_v4.layout import BLOCK, PAGE_SIZE, ring_rows, slots_per_page


@dataclass(slots=True)
class Spans:
    """The step's lengths on the host, all int64. Per request: ``begins`` [R], the position of its first token in this
    step; ``ends`` [R], one past its last position; ``starts`` [R], the index of its first token among the T. Per token:
    its request ``requests`` [T] and its position ``positions`` [T]."""

    begins: np.ndarray
    ends: np.ndarray
    starts: np.ndarray
    requests: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Spans:
        """Spans from the host-side lengths of ``inputs``."""
        lengths, ends = (np.array(values, dtype=np.int64) for values in (inputs.query_lens_cpu, inputs.kv_lens_cpu))
        starts, begins = lengths.cumsum() - lengths, ends - lengths  # exclusive prefix sum
        requests = np.repeat(np.arange(len(lengths)), lengths)
        return cls(begins, ends, starts, requests, np.arange(len(requests)) + (begins - starts)[requests])

    def finished(self, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """The compression windows of ``ratio`` tokens whose last token is in this step: the request of each [C], and
        its index within that request [C]. Ordered by request, then by index."""
        firsts, counts = self.begins // ratio, self.ends // ratio - self.begins // ratio
        # like `positions` above: a ragged arange, in which each request's run starts at its own first window
        requests = np.repeat(np.arange(len(counts)), counts)
        return requests, np.arange(len(requests)) + (firsts - (counts.cumsum() - counts))[requests]


class _Backend(CacheBackend):
    """Base of the backends here: page geometry and the lookup of slots in page tables."""

    preferred_page_size = PAGE_SIZE
    is_capturable = False
    verifies_drafts = False  # compressors add each token to a row's state

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device):
        self.spec, self.page_size, self.device = spec, page_size, device
        self.per_page = slots_per_page(spec, page_size)  # slots, not tokens: fewer where entries are compressed

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """Copy an index array to the device; synchronises."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def find_slots(self, inputs: AttentionInputs, requests: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Physical slots, int64, for the ``numbers``-th logical slot of each of ``requests``; all of one shape."""
        width = inputs.page_table.shape[1]
        # Callers pass numbers beyond a request's own length and mask them afterwards; the clamp keeps the read inside
        # that request's row of the table.
        entries = (numbers // self.per_page).clamp_(0, width - 1)
        pages = inputs.page_table.flatten().index_select(0, (requests * width + entries).flatten()).view(numbers.shape)
        return pages.long() * self.per_page + numbers % self.per_page


class WindowBackend(_Backend):
    """``seen`` [T, window] int64: slots of each token's latest positions, newest (its own) first; -1 for positions
    before the request's start."""

    seen: torch.Tensor

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        spans = Spans.of(inputs)
        window = min(self.spec.window, inputs.max_kv_len)  # no token has more positions up to its own
        positions = self.upload(spans.positions)[:, None] - torch.arange(window, device=self.device)  # [T, window]
        requests = self.upload(spans.requests)[:, None].expand_as(positions)
        self.seen = self.find_slots(inputs, requests, positions.clamp(min=0)).masked_fill_(positions < 0, -1)


class EntriesBackend(_Backend):
    """Index tensors of compressed entries, int64 on the device. ``write_slots`` [C]: where the entries that this step
    finishes are written. ``visible`` [T]: how many entries, from its request's first on, each token may see.
    ``slots`` [R, longest]: slots of every entry of each request, undefined beyond the request's own. ``requests`` [T]:
    each token's request. The first ``num_decodes`` requests have one token each; for each later one ``prefills`` has
    ``(request, index of its first token, number of tokens, number of entries)``."""

    write_slots: torch.Tensor
    visible: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    num_decodes: int
    prefills: list[tuple[int, int, int, int]]

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        ratio, spans = self.spec.compress_ratio, Spans.of(inputs)
        finished_requests, finished_numbers = spans.finished(ratio)
        self.write_slots = self.find_slots(inputs, self.upload(finished_requests), self.upload(finished_numbers))
        # causal: a token sees the windows whose last token is not after it, its own window if it is that last token
        self.visible, self.requests = self.upload((spans.positions + 1) // ratio), self.upload(spans.requests)
        # as many columns as the longest request has entries; shorter ones are masked by `visible`
        numbers = torch.arange(inputs.max_kv_len // ratio, device=self.device).expand(inputs.num_requests, -1)
        self.slots = self.find_slots(
            inputs, torch.arange(inputs.num_requests, device=self.device)[:, None].expand_as(numbers), numbers
        )
        self.num_decodes = inputs.num_decodes
        self.prefills = [
            (request, int(spans.starts[request]), inputs.query_lens_cpu[request], inputs.kv_lens_cpu[request] // ratio)
            for request in range(inputs.num_decodes, inputs.num_requests)
        ]

    def all_seen(self) -> torch.Tensor:
        """[T, longest] int64: slots of the entries that each token sees, padded with -1."""
        numbers = torch.arange(self.slots.shape[1], device=self.device)
        return self.slots.index_select(0, self.requests).masked_fill(numbers >= self.visible[:, None], -1)


class StateBackend(_Backend):
    """Where a compressor finds the n tokens of each window that ends in this step: among the step's own tokens, in
    rows that earlier steps stored in the state pages, or, for the overlap before a request's first window, nowhere.

    ``kept`` [S]: slots of the stored rows to read. ``sources`` [C, n]: indices into the concatenation of the step's T
    tokens, the S stored rows, and one padding row. ``starts`` [C]: each window's first position. ``left`` [L]: tokens
    of this step whose rows later steps may need; ``left_slots`` [L]: where these are stored. All int64.
    """

    kept: torch.Tensor
    sources: torch.Tensor
    starts: torch.Tensor
    left: torch.Tensor
    left_slots: torch.Tensor

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        # reach = n: one window of tokens, or two where windows overlap. Entry m is pooled from positions
        # (m + 1) * ratio - reach up to, but not including, (m + 1) * ratio.
        spans, ratio, reach = Spans.of(inputs), self.spec.compress_ratio, self.spec.window
        requests, numbers = spans.finished(ratio)
        # Stored rows to read, per request: from the first position of its first finished entry (`lows`) up to this
        # step's first position; none for a request that finishes no entry in this step.
        lows = np.maximum(0, spans.begins - spans.begins % ratio - (reach - ratio))
        counts = np.where(spans.ends // ratio > spans.begins // ratio, spans.begins - lows, 0)
        firsts = counts.cumsum() - counts
        kept_requests = np.repeat(np.arange(len(counts)), counts)
        kept_positions = np.arange(len(kept_requests)) + (lows - firsts)[kept_requests]
        self.kept = self._find_rows(inputs, kept_requests, kept_positions)
        positions = (numbers[:, None] + 1) * ratio - reach + np.arange(reach)  # [C, n]
        # three candidates per element of [C, n]: offset in the T tokens, in the S stored rows, or the padding row
        owner = requests[:, None]
        in_step = spans.starts[owner] + positions - spans.begins[owner]
        before = len(spans.positions) + firsts[owner] + positions - lows[owner]
        nothing = len(spans.positions) + len(kept_positions)
        self.sources = self.upload(
            np.where(positions < 0, nothing, np.where(positions >= spans.begins[owner], in_step, before))
        )
        self.starts = self.upload(numbers * ratio)
        # A block of BLOCK tokens has only `ring_rows` rows, reused in turn, so of this step's tokens only the last
        # `ring_rows` of each block are stored. This also keeps `left_slots` free of duplicates, whose order of
        # writing would be undefined.
        stop = np.minimum(spans.ends[spans.requests], (spans.positions // BLOCK + 1) * BLOCK)
        left = np.flatnonzero(spans.positions >= stop - ring_rows(ratio))
        self.left = self.upload(left)
        self.left_slots = self._find_rows(inputs, spans.requests[left], spans.positions[left])

    def _find_rows(self, inputs: AttentionInputs, requests: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        ring = ring_rows(self.spec.compress_ratio)
        return self.find_slots(inputs, self.upload(requests), self.upload(positions // BLOCK * ring + positions % ring))
