"""The Triton attention backend: a kernel for decodes and one for prefill chunks, any geometry."""

from __future__ import annotations

import torch

from headrace.kernels.attention.blocks import Head, block_dim, find_block_bytes
from headrace.kernels.attention.decodes import DecodeStep, DecodeWorkspace, decode
from headrace.kernels.attention.prefill import (
    PrefillPlan,
    plan_open_prefill,
    plan_prefill,
    prefill,
    prefill_tile,
)
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.few_decodes.hopper import DIVISIONS, SHORT_CONTEXTS, few_decodes
from headrace.layers.attention.contract import (
    AttentionBackend,
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)

FUSED_CAPABILITY = (9, 0)
"""That of `few_decodes`."""


class TritonAttention(AttentionBackend):
    """See `AttentionBackend`. ``pdl``: kernels are launched with programmatic dependent launch."""

    preferred_page_size = 64
    supports_dynamic_lengths = True
    pdl = False

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        # off CUDA the kernels run in Triton's interpreter, where any small number will do
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self._group = geometry.num_heads // geometry.num_kv_heads
        self._fuses = (
            self.pdl and geometry.capability == FUSED_CAPABILITY and geometry.head_dim in DIVISIONS
            and geometry.dtype == geometry.kv_dtype == "bfloat16" and not geometry.values_in_keys
        )
        self._short_contexts = SHORT_CONTEXTS if self._fuses and not geometry.window else ()
        self._tile = prefill_tile(
            block_dim(geometry.head_dim), getattr(torch, geometry.dtype).itemsize, find_block_bytes(device)
        )
        self._workspace = DecodeWorkspace.allocate(processors, self._group, geometry.value_dim, device)
        self.inputs: AttentionInputs | None = None
        self._plan: PrefillPlan | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Launch a small kernel that assigns prefill chunks to programs; decodes need no plan."""
        self.inputs, self._plan = inputs, None
        group, tile, starts = self._group, self._tile, inputs.query_start
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
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        self.attend_decodes(q, pages, params, inputs, out)
        if self._plan is not None:
            step = (inputs.query_start, inputs.kv_lens, inputs.page_table)
            prefill(q, (pages.k, pages.v), out, self._plan, _head(params), step, pdl=self.pdl)
        return out

    def attend_decodes(
        self, q: torch.Tensor, pages: KvPages, params: AttentionParams, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        """Write the decodes' rows of ``out`` [T, H, E_value]; needs no `prepare`."""
        # With dynamic lengths only the device knows which requests are decodes: the kernel is launched for all of
        # them and finds those of one token in query_start.
        count = inputs.num_requests if inputs.has_dynamic_lengths else inputs.num_decodes
        if count:
            step = DecodeStep(
                inputs.kv_lens, inputs.page_table, count, inputs.max_kv_len,
                inputs.query_start if inputs.has_dynamic_lengths else None
            )
            decode(q, (pages.k, pages.v), out, self._workspace, _head(params), step, pdl=self.pdl)

    def short_context(self, num_decodes: int) -> int:
        """See `CacheBackend.short_context`."""
        return self._short_contexts[num_decodes - 1] if num_decodes <= len(self._short_contexts) else 0

    def rotate_and_attend(
        self, qkv: torch.Tensor, rotation: Rotation, pages: KvPages, params: AttentionParams
    ) -> torch.Tensor | None:
        """See `AttentionBackend.rotate_and_attend`."""
        inputs = self.inputs
        assert inputs is not None, "prepare comes first"
        if not self._fuses or inputs.has_dynamic_lengths or not inputs.num_decodes == inputs.num_requests == len(qkv):
            return None
        step = DecodeStep(inputs.kv_lens, inputs.page_table, inputs.num_decodes, inputs.max_kv_len)
        return few_decodes(qkv, rotation, (pages.k, pages.v), _head(params), step)


def _head(params: AttentionParams) -> Head:
    return Head(params.scale, params.window, params.softcap, params.sinks)


class DependentLaunchTritonAttention(TritonAttention):
    """The same with programmatic dependent launch."""

    pdl = True
