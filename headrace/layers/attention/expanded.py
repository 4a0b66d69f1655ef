"""The attention backend of Hopper over pages of 8-bit floats: those that chunks read are expanded for the kernel that
takes half precision alone; decodes read codes."""

from __future__ import annotations

import torch

from headrace.kernels.attention.blocks import Head, Tile
from headrace.kernels.attention.expanded import ExpandedPages, ExpandedStep
from headrace.kernels.attention.prefill import PrefillPlan
from headrace.kernels.precompile import is_dry_run
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, KvPages
from headrace.layers.attention.hopper import HopperAttention


class ExpandingAttention(HopperAttention):
    """See `AttentionBackend`. The Triton kernels, which read codes, have steps whose lengths only the device knows, and
    those of more keys than there is room for."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        super().__init__(geometry, device)
        self._expanded = ExpandedPages(
            geometry.page_size, geometry.num_kv_heads, geometry.head_dim, self._dtype, device
        )
        self._step: ExpandedStep | None = None
        self._spare_plan: PrefillPlan | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.prepare`."""
        self._step = None
        if not inputs.has_dynamic_lengths and inputs.num_decodes < inputs.num_requests:
            self._step = self._expanded.plan(
                inputs.query_lens_cpu, inputs.kv_lens_cpu, first=inputs.num_decodes, window=self._geometry.window
            )
        super().prepare(inputs)
        self._spare_plan = None
        if self._plan is not None and self._is_own and is_dry_run():  # for steps like this one without room
            self._spare_plan = super(HopperAttention, self)._plan_chunks(inputs, self._chunk_tile, None)

    def _choose_tile(self, num_tokens: int) -> Tile:
        if self._step is None:
            self._is_own = False
            return self._chunk_tile
        return super()._choose_tile(num_tokens)

    def _attend_chunks(
        self, q: torch.Tensor, pages: KvPages, head: Head, plan: PrefillPlan,
        step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor,
    ) -> None:
        if self._spare_plan is not None:
            super(HopperAttention, self)._attend_chunks(q, pages, head, self._spare_plan, step, out)
        if self._is_own and self._step is not None:
            starts, lengths, table = step
            self._expanded.fill(pages.k, pages.v, table, self._step, pdl=self.pdl)
            pages, step = KvPages(self._expanded.k, self._expanded.v), (starts, lengths, self._step.table)
        super()._attend_chunks(q, pages, head, plan, step, out)
