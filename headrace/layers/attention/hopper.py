"""The attention backend of Hopper: prefill chunks by own CUDA C++, decodes by the Triton kernels. Lengths are read on
the device, so captured steps of dynamic lengths take the same kernel as others."""

from __future__ import annotations

import torch

from headrace.kernels.attention import HOPPER_ROWS, hopper
from headrace.kernels.attention.blocks import Head, Tile
from headrace.kernels.attention.prefill import PrefillPlan
from headrace.kernels.attention.splits import KEYS, LEAST_CONTEXT, Splitting, SplitWorkspace, has_splits
from headrace.kernels.precompile import is_dry_run
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, KvPages
from headrace.layers.attention.triton import DependentLaunchTritonAttention, count_processors


class HopperAttention(DependentLaunchTritonAttention):
    """See `AttentionBackend`. Chunks too are left to the Triton kernels, with a warning, where the own one cannot be
    compiled."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        super().__init__(geometry, device)
        self._geometry, self._device = geometry, device
        self._dtype, self._num_sms = getattr(torch, geometry.dtype), count_processors(device)
        self._is_own = False
        self._split_workspace: SplitWorkspace | None = None
        most_rows = max(HOPPER_ROWS[geometry.head_dim])
        if not geometry.window or geometry.window + most_rows > KEYS * LEAST_CONTEXT:
            self._split_workspace = SplitWorkspace.allocate(
                self._num_sms, geometry.num_kv_heads, most_rows, geometry.head_dim, device
            )

    def _choose_tile(self, num_tokens: int) -> Tile:
        geometry = self._geometry
        self._is_own = hopper.is_compiled(geometry.head_dim, self._dtype, geometry.has_softcap, self._device)
        if not self._is_own:
            return super()._choose_tile(num_tokens)
        return hopper.choose_tile(
            geometry.head_dim, self._chunk_group, geometry.num_kv_heads, num_tokens, self._num_sms
        )

    def _plan_chunks(self, inputs: AttentionInputs, tile: Tile, splitting: Splitting | None) -> PrefillPlan:
        """With keys divided where that is faster, or where only the device knows."""
        workspace, window, first = self._split_workspace, self._geometry.window, inputs.num_decodes
        if self._is_own and workspace is not None:
            splitting = Splitting(inputs.kv_lens, window, workspace)
            if is_dry_run():  # steps like this one may take either kind
                super()._plan_chunks(inputs, tile, None)
            elif not inputs.has_dynamic_lengths and not has_splits(
                inputs.query_lens_cpu[first:], inputs.kv_lens_cpu[first:], tokens=tile.rows // self._chunk_group,
                window=window, room=workspace.room,
            ):
                splitting = None
        return super()._plan_chunks(inputs, tile, splitting)

    def _attend_chunks(
        self, q: torch.Tensor, pages: KvPages, head: Head, plan: PrefillPlan,
        step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor,
    ) -> None:
        if not self._is_own:
            super()._attend_chunks(q, pages, head, plan, step, out)
            return
        assert (head.softcap > 0) == self._geometry.has_softcap, "a soft-cap is declared in the geometry"
        assert plan.workspace is None or head.window == self._geometry.window, "else a split might be empty"
        hopper.prefill(q, (pages.k, pages.v), out, plan, head, step, pdl=self.pdl)
