"""The Triton attention backend: a kernel for decodes and one for prefill chunks, any geometry; and what it shares with
backends of other kernels."""

from __future__ import annotations

import copy
from typing import Self

import torch

from headrace.kernels.attention import LONG_CONTEXT
from headrace.kernels.attention.blocks import Head, Tile, block_dim, find_block_bytes
from headrace.kernels.attention.decodes import MANY_REQUESTS, DecodeStep, DecodeWorkspace, decode
from headrace.kernels.attention.fp8_decodes import fp8_decodes
from headrace.kernels.attention.prefill import (
    PrefillPlan,
    plan_open_prefill,
    plan_prefill,
    prefill,
    prefill_tile,
)
from headrace.kernels.attention.prefixes import count_members, decode_behind_prefixes
from headrace.kernels.attention.splits import Splitting
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.few_decodes.hopper import DIVISIONS, SHORT_CONTEXTS, few_decodes
from headrace.layers.attention import HOPPER
from headrace.layers.attention.contract import (
    AttentionBackend,
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)

MOST_SPLIT = 128
"""Requests of which one may be long in a step that is captured by itself; more hide it better."""


def count_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. Elsewhere the kernels run in Triton's interpreter, where any small number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class PlannedBackend(AttentionBackend):
    """Own Triton kernels: prefill chunks are assigned to programs by a plan, decodes need none. ``pdl``: kernels are
    launched with programmatic dependent launch. Rows of a chunk's ``tile`` are tokens times ``group`` heads."""

    preferred_page_size = 64
    supports_dynamic_lengths = True
    pdl = False

    def __init__(self, group: int, tile: Tile):
        self._chunk_group, self._chunk_tile = group, tile
        self.inputs: AttentionInputs | None = None
        self._plan: PrefillPlan | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Launch a small kernel that assigns prefill chunks to programs; decodes need no plan."""
        self.inputs, self._plan = inputs, None
        if inputs.has_dynamic_lengths or inputs.num_decodes < inputs.num_requests:
            num_tokens = inputs.num_tokens - (0 if inputs.has_dynamic_lengths else inputs.num_decodes)
            self._plan = self._plan_chunks(inputs, self._choose_tile(num_tokens), None)

    def _choose_tile(self, num_tokens: int) -> Tile:
        """That of chunks of so many tokens together, at most."""
        return self._chunk_tile

    def _plan_chunks(self, inputs: AttentionInputs, tile: Tile, splitting: Splitting | None) -> PrefillPlan:
        """With ``splitting`` for kernels that can divide keys."""
        starts, group = inputs.query_start, self._chunk_group
        if inputs.has_dynamic_lengths:
            return plan_open_prefill(starts, inputs.num_tokens, group=group, tile=tile, splitting=splitting)
        return plan_prefill(
            starts, inputs.query_lens_cpu, first=inputs.num_decodes, group=group, tile=tile, splitting=splitting
        )


def find_decodes(inputs: AttentionInputs) -> DecodeStep | None:
    """The step's decodes; None where there are none. With dynamic lengths only the device knows which requests are
    decodes: kernels are launched for all of them and find those of one token in ``query_start``."""
    is_open = inputs.has_dynamic_lengths
    count = inputs.num_requests if is_open else inputs.num_decodes
    starts = inputs.query_start if is_open else None
    return DecodeStep(inputs.kv_lens, inputs.page_table, count, inputs.max_kv_len, starts) if count else None


class TritonAttention(PlannedBackend):
    """See `AttentionBackend`."""

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        group = geometry.num_heads // geometry.num_kv_heads
        super().__init__(group, prefill_tile(
            block_dim(geometry.head_dim), getattr(torch, geometry.dtype).itemsize, find_block_bytes(device)
        ))
        # behind a window `fp8_decodes` is faster, with a kernel before it that rotates and writes
        kv_dtypes = ("bfloat16",) if geometry.window else ("bfloat16", "float8_e4m3fn")
        self._fuses = (
            self.pdl and geometry.capability == HOPPER and geometry.head_dim in DIVISIONS
            and geometry.dtype == "bfloat16" and geometry.kv_dtype in kv_dtypes and not geometry.values_in_keys
        )
        self._reads_codes = (
            self.pdl and geometry.capability == HOPPER and geometry.kv_dtype == "float8_e4m3fn"
            and not geometry.values_in_keys
        )
        self._short_contexts = SHORT_CONTEXTS if self._fuses else ()
        self._has_window = bool(geometry.window)
        is_plain = geometry.dtype == geometry.kv_dtype and not geometry.window
        self.prefix_members = count_members(group) if is_plain else 0
        self._workspace = DecodeWorkspace.allocate(count_processors(device), group, geometry.value_dim, device)

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        inputs = self.inputs
        assert inputs is not None, "prepare comes first"
        out = torch.empty((q.shape[0], q.shape[1], pages.v.shape[-1]), dtype=q.dtype, device=q.device)
        self.attend_decodes(q, pages, params, inputs, out)
        if self._plan is not None:
            step = (inputs.query_start, inputs.kv_lens, inputs.page_table)
            self._attend_chunks(q, pages, _head(params), self._plan, step, out)
        return out

    def _attend_chunks(
        self, q: torch.Tensor, pages: KvPages, head: Head, plan: PrefillPlan,
        step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor,
    ) -> None:
        """Write the rows of planned chunks in ``out`` [T, H, E_value]."""
        prefill(q, (pages.k, pages.v), out, plan, head, step, pdl=self.pdl)

    def attend_decodes(
        self, q: torch.Tensor, pages: KvPages, params: AttentionParams, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        """Write the decodes' rows of ``out`` [T, H, E_value]; needs no `prepare`."""
        step, prefixes = find_decodes(inputs), inputs.prefixes
        if prefixes is not None and not params.window:
            decode_behind_prefixes(
                q, (pages.k, pages.v), out, _head(params), prefixes, (inputs.kv_lens, inputs.page_table),
                processors=self._workspace.processors, pdl=self.pdl
            )
        elif step is not None:
            call = (q, (pages.k, pages.v), out, self._workspace, _head(params), step)
            if not (self._reads_codes and fp8_decodes(*call, pdl=self.pdl)):
                decode(*call, pdl=self.pdl)

    def short_context(self, num_decodes: int) -> int:
        """See `CacheBackend.short_context`."""
        if self._has_window:
            return 0
        if MANY_REQUESTS < num_decodes <= MOST_SPLIT:
            return LONG_CONTEXT
        return self._short_contexts[num_decodes - 1] if num_decodes <= len(self._short_contexts) else 0

    def rotate_and_attend(
        self, qkv: torch.Tensor, rotation: Rotation, pages: KvPages, params: AttentionParams
    ) -> torch.Tensor | None:
        """See `AttentionBackend.rotate_and_attend`."""
        assert self.inputs is not None, "prepare comes first"
        return self.rotate_decodes(qkv, rotation, pages, params, self.inputs)

    def rotate_decodes(
        self, qkv: torch.Tensor, rotation: Rotation, pages: KvPages, params: AttentionParams, inputs: AttentionInputs
    ) -> torch.Tensor | None:
        """The same for a step's ``inputs``; needs no `prepare`."""
        if not self._fuses or inputs.has_dynamic_lengths or not inputs.num_decodes == inputs.num_requests == len(qkv):
            return None
        step = DecodeStep(inputs.kv_lens, inputs.page_table, inputs.num_decodes, inputs.max_kv_len)
        return few_decodes(qkv, rotation, (pages.k, pages.v), _head(params), step)


def _head(params: AttentionParams) -> Head:
    return Head(params.scale, params.window, params.softcap, params.sinks)


class DependentLaunchTritonAttention(TritonAttention):
    """The same with programmatic dependent launch."""

    pdl = True


class BesideTriton(AttentionBackend):
    """Kernels of a library for long chunks, beside those of ``fallback``, which takes decodes and whatever else the
    library does not."""

    preferred_page_size = 64
    supports_dynamic_lengths = True

    def __init__(self, fallback: TritonAttention):
        self._fallback, self.prefix_members = fallback, fallback.prefix_members
        self._inputs: AttentionInputs | None = None

    def twin(self) -> Self:
        """See `AttentionBackend.twin`."""
        found = copy.copy(self)
        found._fallback = copy.copy(self._fallback)
        return found

    def short_context(self, num_decodes: int) -> int:
        """See `CacheBackend.short_context`."""
        return self._fallback.short_context(num_decodes)

    def rotate_and_attend(
        self, qkv: torch.Tensor, rotation: Rotation, pages: KvPages, params: AttentionParams
    ) -> torch.Tensor | None:
        """See `AttentionBackend.rotate_and_attend`."""
        assert self._inputs is not None, "prepare comes first"
        return self._fallback.rotate_decodes(qkv, rotation, pages, params, self._inputs)

    def _prepared(self, inputs: AttentionInputs) -> TritonAttention:
        if self._fallback.inputs is not inputs:  # the first layer of this step that falls back
            self._fallback.prepare(inputs)
        return self._fallback
