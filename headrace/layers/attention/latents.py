"""The Triton attention backend for latents, which all heads read as keys and as values: a kernel for decodes and one
for prefill chunks."""

from __future__ import annotations

import torch

from headrace.kernels.attention.blocks import find_block_bytes
from headrace.kernels.attention.latents import (
    LatentWorkspace,
    attend_chunks,
    chunk_group,
    chunk_tile,
    decode_latents,
    decode_tile,
)
from headrace.kernels.operation import LARGE_BLOCK
from headrace.layers.attention.contract import AttentionGeometry, AttentionParams, KvPages
from headrace.layers.attention.triton import PlannedBackend, count_processors, find_decodes


class LatentTritonAttention(PlannedBackend):
    """See `AttentionBackend`."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        size, is_roomy = getattr(torch, geometry.dtype).itemsize, find_block_bytes(device) >= LARGE_BLOCK
        tile = chunk_tile(size, is_roomy=is_roomy)
        super().__init__(chunk_group(geometry.num_heads, tile), tile)
        self._tile = decode_tile(geometry.num_heads, size, is_roomy=is_roomy)
        self._workspace = LatentWorkspace.allocate(
            count_processors(device), geometry.num_heads, geometry.value_dim, device
        )

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        inputs = self.inputs
        assert inputs is not None, "prepare comes first"
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        step = find_decodes(inputs)
        if step is not None:
            decode_latents(q, pages.k, out, self._workspace, step, self._tile, scale=params.scale, pdl=self.pdl)
        if self._plan is not None:
            lengths = (inputs.query_start, inputs.kv_lens, inputs.page_table)
            attend_chunks(q, pages.k, out, self._plan, lengths, scale=params.scale, pdl=self.pdl)
        return out


class DependentLaunchLatentTritonAttention(LatentTritonAttention):
    """The same with programmatic dependent launch."""

    pdl = True
