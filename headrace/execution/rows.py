"""`Rows`: the persistent state of the requests by row, on the device and on the host.

Refuses: page tables (``memory/``) and the state of penalties and rules, which only few rows have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.base.errors import HeadraceError
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingSpec
from headrace.base.step import RowDraft, RowStart
from headrace.execution.device import row_query
from headrace.kernels.sample.reference import uniform
from headrace.kernels.verify import ACCEPT, PLACE_DRAFTS, RowTensors

IS_TAKEN, IS_RANDOM, HAS_PENALTIES, HAS_RULES, HAS_GRAMMAR, WANTS_LOGPROBS, WANTS_PROMPT_LOGPROBS = (
    1 << bit for bit in range(7)
)
"""Bits of a row's flags, by which a step finds its features without a look at each row's record; 0 is a free row."""

IS_POOLED, HAS_SECOND_TEXT = 1 << 7, 1 << 8
"""More bits: the row gets a pooled result and samples no tokens; its tokens belong to two texts (a pair)."""

HAS_ADAPTER, HAS_ADAPTER_EXTRAS = 1 << 9, 1 << 10
"""More bits: the row has an adapter; one that changes more than captured steps compute."""

HAS_MEDIA, HAS_ROPE_OFFSET = 1 << 11, 1 << 12
"""More bits: its prompt has media; its tokens are rotated by other numbers than their positions."""


OutputsOf = Callable[[np.ndarray], AbstractContextManager[None]]
"""``with outputs_of(rows)``: in the body a head or classifier is called with what belongs to these rows, one each."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What a row was started with. ``token_ids`` int64: every token known at the start. Tokens sampled since are not
    here: the latest is in ``Rows.tensors`` on the device, all are in the scheduler."""

    token_ids: np.ndarray
    prompt_len: int
    sampling: SamplingSpec
    pooling: PoolingSpec | None = None


class Rows:
    """``tensors``: what the device owns of max_rows + 1 rows, the last being the null row of the page tables. The
    host's ``*_np`` arrays are [max_rows] or [max_rows, columns]: ``reals_np`` has temperature, top_p and min_p,
    ``integers_np`` top_k and seed, ``adapter_slots_np`` the slot of the row's adapter, -1 for none. ``media_end_np``:
    the position behind the row's last placeholder of media, 0 without media.

    The device's part is not set at a start: the sampling of a row's first step writes it, and before a step that begins
    with a decode `take_known` does.
    ``computed_len_np`` and ``last_token_np`` [max_rows + 1]: what the device owns where the host can read it (on a CPU,
    whose steps are done when they return), else None.
    """

    def __init__(self, max_rows: int, device: torch.device):
        self.tensors = RowTensors.allocate(max_rows + 1, device)
        self.computed_len_np = self.tensors.computed_len.numpy() if device.type == "cpu" else None
        self.last_token_np = self.tensors.last_token.numpy() if device.type == "cpu" else None
        self._place_drafts = PLACE_DRAFTS.choose(row_query(device))
        self._accept = ACCEPT.choose(row_query(device))
        self.prompt_len_np = np.zeros(max_rows, dtype=np.int64)
        self.flags_np = np.zeros(max_rows, dtype=np.int64)
        self.media_end_np = np.zeros(max_rows, dtype=np.int64)
        self.reals_np = np.zeros((max_rows, 3), dtype=np.float64)
        self.integers_np = np.zeros((max_rows, 2), dtype=np.int64)
        self.adapter_slots_np = np.full(max_rows, -1, dtype=np.int64)
        self._rows: list[RowTokens | None] = [None] * max_rows

    def __getitem__(self, row: int) -> RowTokens:
        known = self._rows[row]
        assert known is not None, f"row {row} is free"
        return known

    def require(self, rows: np.ndarray) -> None:
        """Raise `HeadraceError` unless all these rows are started."""
        free = rows[self.flags_np[rows] == 0]
        if len(free):
            raise HeadraceError(f"the plan computes rows that were never started: {free}")

    def start(self, start: RowStart, *, has_adapter_extras: bool = False) -> RowTokens:
        """Take a row and overwrite what it held."""
        spec = start.sampling
        known = RowTokens(np.array(start.token_ids, dtype=np.int64), start.prompt_len, spec, start.pooling)
        self._rows[start.row] = known
        self.prompt_len_np[start.row] = start.prompt_len
        # top_k is -1 or 0 for no limit; the kernels know 0 alone. With XTC the cuts are made before it, not behind.
        cuts = (max(spec.top_k, 0), spec.top_p, spec.min_p)
        top_k, top_p, min_p = (0, 1.0, 0.0) if spec.penalties is not None and spec.penalties.xtc is not None else cuts
        self.reals_np[start.row] = (spec.temperature, top_p, min_p)
        self.integers_np[start.row] = (top_k, spec.seed)
        # With a grammar the bitmasks enforce the minimum length: no rule is left then if that was the only one.
        is_ruled = spec.rules is not None and not (spec.grammar is not None and spec.rules.is_length_only)
        self.flags_np[start.row] = (
            IS_TAKEN | IS_RANDOM * (not spec.is_greedy) | HAS_PENALTIES * (spec.penalties is not None)
            | HAS_RULES * is_ruled | HAS_GRAMMAR * (spec.grammar is not None)
            | WANTS_LOGPROBS * (spec.num_logprobs >= 0) | WANTS_PROMPT_LOGPROBS * (spec.num_prompt_logprobs >= 0)
        )
        self.adapter_slots_np[start.row] = start.adapter_slot
        if start.adapter_slot >= 0:
            self.flags_np[start.row] |= HAS_ADAPTER | HAS_ADAPTER_EXTRAS * has_adapter_extras
        if start.pooling is not None:
            self.flags_np[start.row] |= IS_POOLED | HAS_SECOND_TEXT * (start.pooling.second_start > 0)
        return known

    def take_known(self, known: torch.Tensor) -> None:
        """Set the last tokens and lengths of rows from the host; ``known`` [3, n] int64: rows, tokens, lengths."""
        own, tokens, lengths = known
        self.tensors.last_token.index_copy_(0, own, tokens)
        self.tensors.computed_len.index_copy_(0, own, lengths)

    @staticmethod
    def pack_drafts(drafts: list[RowDraft]) -> np.ndarray:
        """Guesses as `headrace.kernels.verify.PLACE_DRAFTS` takes them, flat."""
        width = max(len(draft.token_ids) for draft in drafts)
        guesses = np.full((len(drafts), 2 + width), -1, dtype=np.int64)
        for guess, draft in zip(guesses, drafts, strict=True):
            guess[:2] = draft.row, draft.start
            guess[2 : 2 + len(draft.token_ids)] = draft.token_ids
        return guesses.ravel()

    def place_drafts(self, guesses: torch.Tensor, count: int) -> None:
        """Write ``count`` packed guesses as their rows' drafts."""
        self._place_drafts(guesses.view(count, -1), self.tensors)

    def accept(
        self, sampled: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, most: int
    ) -> torch.Tensor:
        """Find out which drafts are right, and advance the rows; see `headrace.kernels.verify.ACCEPT`."""
        return self._accept(sampled, entries, positions, self.tensors, most)

    def advance(self, rows: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """`accept` on a CPU for ``rows`` [R] without drafts: their last tokens and lengths are now these [R]."""
        assert self.last_token_np is not None and self.computed_len_np is not None, "on a CPU"
        self.last_token_np[rows], self.computed_len_np[rows] = tokens, lengths

    def accept_at_rate(self, rate: float) -> None:
        """Let drafts be right with this probability each, from now on: for benchmarks, as output is then noise."""
        accept, never = self._accept, torch.full_like(self.tensors.drafts, -1)

        def accept_none(
            sampled: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, rows: RowTensors, most: int
        ) -> torch.Tensor:
            # No random numbers: captured steps do not know whether they have drafts, so all would take 40 us longer.
            return accept(sampled, entries, positions, replace(rows, drafts=never), most)

        def accept_some(
            sampled: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, rows: RowTensors, most: int
        ) -> torch.Tensor:
            if not most:
                return accept(sampled, entries, positions, rows, most)
            own, offsets = entries
            is_draft, null_row = offsets > 0, len(rows.last_token) - 1
            is_right = uniform(own, positions) < rate
            # A draft is what was sampled at the entry before it, or nothing.
            drafts = torch.where(is_right, sampled[0].roll(1), -1)
            target = torch.where(is_draft, own, null_row), (offsets - 1).clamp(min=0)
            rows.drafts.index_put_(target, drafts)
            return accept(sampled, entries, positions, rows, most)

        self._accept = accept_some if rate > 0 else accept_none

    def release(self, row: int) -> None:
        """Give a row back; harmless when it is free already."""
        self._rows[row] = None
        self.flags_np[row] = 0
