"""Cache backends: index tensors that all layers of a group share in a step. Slots of each token's window, the
compressed entries that the step finishes, the rows of state that it reads and writes.

T tokens, R requests, C windows of tokens that the step finishes, n tokens that make an entry. The tensors are made on
the host from the step's lengths and copied, which synchronises with the device: no graph is captured.
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
    """A step on the host, int64: per request ``begins`` [R], ``ends`` [R] and the number of its first token ``starts``
    [R]; per token ``requests`` [T] and ``positions`` [T]."""

    begins: np.ndarray
    ends: np.ndarray
    starts: np.ndarray
    requests: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Spans:
        """Read a step's lengths."""
        lengths, ends = (np.array(values, dtype=np.int64) for values in (inputs.query_lens_cpu, inputs.kv_lens_cpu))
        starts, begins = lengths.cumsum() - lengths, ends - lengths
        requests = np.repeat(np.arange(len(lengths)), lengths)
        return cls(begins, ends, starts, requests, np.arange(len(requests)) + (begins - starts)[requests])

    def finished(self, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """Requests [C] and numbers [C] of the windows of ``ratio`` tokens whose last token is in this step."""
        firsts, counts = self.begins // ratio, self.ends // ratio - self.begins // ratio
        requests = np.repeat(np.arange(len(counts)), counts)
        return requests, np.arange(len(requests)) + (firsts - (counts.cumsum() - counts))[requests]


class _Backend(CacheBackend):
    """What the backends have in common."""

    preferred_page_size = PAGE_SIZE
    is_capturable = False

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device):
        self.spec, self.page_size, self.device = spec, page_size, device
        self.per_page = slots_per_page(spec, page_size)

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """An index array on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def find_slots(self, inputs: AttentionInputs, requests: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Slots of the ``numbers``-th slots of requests, of equal shape, int64."""
        width = inputs.page_table.shape[1]
        entries = (numbers // self.per_page).clamp_(0, width - 1)
        pages = inputs.page_table.flatten().index_select(0, (requests * width + entries).flatten()).view(numbers.shape)
        return pages.long() * self.per_page + numbers % self.per_page


class WindowBackend(_Backend):
    """``seen`` [T, window] int64: slots of the latest positions, -1 before the first."""

    seen: torch.Tensor

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        spans = Spans.of(inputs)
        window = min(self.spec.window, inputs.max_kv_len)
        positions = self.upload(spans.positions)[:, None] - torch.arange(window, device=self.device)
        requests = self.upload(spans.requests)[:, None].expand_as(positions)
        self.seen = self.find_slots(inputs, requests, positions.clamp(min=0)).masked_fill_(positions < 0, -1)


class EntriesBackend(_Backend):
    """``write_slots`` [C] for the entries of finished windows. ``visible`` [T]: how many entries each token may see,
    the first ones of its request. ``slots`` [R, longest]: those of all entries. ``requests`` [T]. Of requests beyond
    the first ``num_decodes``, which have a token each: ``prefills`` (request, first token, tokens, entries)."""

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
        self.visible, self.requests = self.upload((spans.positions + 1) // ratio), self.upload(spans.requests)
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
        """[T, longest] int64: slots of all entries that each token sees, then -1."""
        numbers = torch.arange(self.slots.shape[1], device=self.device)
        return self.slots.index_select(0, self.requests).masked_fill(numbers >= self.visible[:, None], -1)


class StateBackend(_Backend):
    """How a compressor gets the tokens of windows finished in this step: of the step itself, of rows kept from before,
    and, before a request's first window, nothing.

    ``kept`` [S] are slots of rows from before. ``sources`` [C, n] index (this step's T tokens, the S rows, nothing).
    ``starts`` [C]: each window's first position. ``left`` [L] are tokens of the step whose rows later steps may need,
    and ``left_slots`` [L] where those go. All int64.
    """

    kept: torch.Tensor
    sources: torch.Tensor
    starts: torch.Tensor
    left: torch.Tensor
    left_slots: torch.Tensor

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""
        spans, ratio, reach = Spans.of(inputs), self.spec.compress_ratio, self.spec.window
        requests, numbers = spans.finished(ratio)
        # Rows from before: from the first one that the request's first finished window takes.
        lows = np.maximum(0, spans.begins - spans.begins % ratio - (reach - ratio))
        counts = np.where(spans.ends // ratio > spans.begins // ratio, spans.begins - lows, 0)
        firsts = counts.cumsum() - counts
        kept_requests = np.repeat(np.arange(len(counts)), counts)
        kept_positions = np.arange(len(kept_requests)) + (lows - firsts)[kept_requests]
        self.kept = self._find_rows(inputs, kept_requests, kept_positions)
        positions = (numbers[:, None] + 1) * ratio - reach + np.arange(reach)
        owner = requests[:, None]
        in_step = spans.starts[owner] + positions - spans.begins[owner]
        before = len(spans.positions) + firsts[owner] + positions - lows[owner]
        nothing = len(spans.positions) + len(kept_positions)
        self.sources = self.upload(
            np.where(positions < 0, nothing, np.where(positions >= spans.begins[owner], in_step, before))
        )
        self.starts = self.upload(numbers * ratio)
        # Each block of tokens has a ring of rows: only its last tokens so far can have one.
        stop = np.minimum(spans.ends[spans.requests], (spans.positions // BLOCK + 1) * BLOCK)
        left = np.flatnonzero(spans.positions >= stop - ring_rows(ratio))
        self.left = self.upload(left)
        self.left_slots = self._find_rows(inputs, spans.requests[left], spans.positions[left])

    def _find_rows(self, inputs: AttentionInputs, requests: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        ring = ring_rows(self.spec.compress_ratio)
        return self.find_slots(inputs, self.upload(requests), self.upload(positions // BLOCK * ring + positions % ring))
