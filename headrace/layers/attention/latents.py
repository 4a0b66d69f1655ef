"""The Triton attention backend for latents, which all heads read as keys and as values: a kernel for decodes and one
for prefill chunks."""

from __future__ import annotations

import torch

from headrace.kernels.attention.blocks import find_block_bytes
from headrace.kernels.attention.decodes import DecodeStep
from headrace.kernels.attention.latents import (
    LatentWorkspace,
    attend_chunks,
    chunk_group,
    chunk_tile,
    decode_latents,
    decode_tile,
)
from headrace.kernels.attention.prefill import PrefillPlan, plan_open_prefill, plan_prefill
from headrace.kernels.operation import LARGE_BLOCK
from headrace.layers.attention.contract import (
    AttentionBackend,
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)


class LatentTritonAttention(AttentionBackend):
    """See `AttentionBackend`. ``pdl``: kernels are launched with programmatic dependent launch."""

    preferred_page_size = 64
    supports_dynamic_lengths = True
    pdl = False

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        # off CUDA the kernels run in Triton's interpreter, where any small number will do
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        size, is_roomy = getattr(torch, geometry.dtype).itemsize, find_block_bytes(device) >= LARGE_BLOCK
        self._tile = decode_tile(geometry.num_heads, size, is_roomy=is_roomy)
        self._chunk_tile = chunk_tile(size, is_roomy=is_roomy)
        self._group = chunk_group(geometry.num_heads, self._chunk_tile)
        self._workspace = LatentWorkspace.allocate(processors, geometry.num_heads, geometry.value_dim, device)
        self.inputs: AttentionInputs | None = None
        self._plan: PrefillPlan | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Launch a small kernel that assigns prefill chunks to programs; decodes need no plan."""
        self.inputs, self._plan = inputs, None
        group, tile, starts = self._group, self._chunk_tile, inputs.query_start
        if inputs.has_dynamic_lengths:
            self._plan = plan_open_prefill(starts, inputs.num_tokens, group=group, tile=tile)
        elif inputs.num_decodes < inputs.num_requests:
            self._plan = plan_prefill(
                starts, inputs.query_lens_cpu, first=inputs.num_decodes, group=group, tile=tile
            )

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        inputs = self.inputs
        assert inputs is not None, "prepare comes first"
        is_open = inputs.has_dynamic_lengths
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        # With dynamic lengths only the device knows which requests are decodes: the kernel finds those of one token.
        count = inputs.num_requests if is_open else inputs.num_decodes
        if count:
            starts = inputs.query_start if is_open else None
            step = DecodeStep(inputs.kv_lens, inputs.page_table, count, inputs.max_kv_len, starts)
            decode_latents(q, pages.k, out, self._workspace, step, self._tile, scale=params.scale, pdl=self.pdl)
        if self._plan is not None:
            lengths = (inputs.query_start, inputs.kv_lens, inputs.page_table)
            attend_chunks(q, pages.k, out, self._plan, lengths, scale=params.scale, pdl=self.pdl)
        return out


class DependentLaunchLatentTritonAttention(LatentTritonAttention):
    """The same with programmatic dependent launch."""

    pdl = True
