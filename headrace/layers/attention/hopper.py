"""The attention backend of Hopper: prefill chunks by own CUDA C++, decodes by the Triton kernels. Lengths are read on
the device, so captured steps of dynamic lengths take the same kernel as others."""

from __future__ import annotations

import torch

from headrace.kernels.attention import hopper
from headrace.kernels.attention.blocks import Head, Tile
from headrace.kernels.attention.prefill import PrefillPlan
from headrace.layers.attention.contract import AttentionGeometry, KvPages
from headrace.layers.attention.triton import DependentLaunchTritonAttention, count_processors


class HopperAttention(DependentLaunchTritonAttention):
    """See `AttentionBackend`. Chunks too are left to the Triton kernels, with a warning, where the own one cannot be
    compiled."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        super().__init__(geometry, device)
        self._geometry, self._device = geometry, device
        self._dtype, self._num_sms = getattr(torch, geometry.dtype), count_processors(device)
        self._is_own = False

    def _choose_tile(self, num_tokens: int) -> Tile:
        geometry = self._geometry
        self._is_own = hopper.is_compiled(geometry.head_dim, self._dtype, geometry.has_softcap, self._device)
        if not self._is_own:
            return super()._choose_tile(num_tokens)
        return hopper.choose_tile(
            geometry.head_dim, self._chunk_group, geometry.num_kv_heads, num_tokens, self._num_sms
        )

    def _attend_chunks(
        self, q: torch.Tensor, pages: KvPages, head: Head, plan: PrefillPlan,
        step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor,
    ) -> None:
        if not self._is_own:
            super()._attend_chunks(q, pages, head, plan, step, out)
            return
        assert (head.softcap > 0) == self._geometry.has_softcap, "a soft-cap is declared in the geometry"
        hopper.prefill(q, (pages.k, pages.v), out, plan, head, step, pdl=self.pdl)
