"""The attention backend of CPUs: native C++ kernels, compiled in the background at first use; plain torch until then.
"""

from __future__ import annotations

import copy

import torch

from headrace.kernels.attention.cpu import paged_attention
from headrace.layers.attention.contract import (
    AttentionBackend,
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)
from headrace.layers.attention.reference import ReferenceAttention


class CpuAttention(AttentionBackend):
    """See `AttentionBackend`. Switches to the native kernels as soon as they are compiled, which may happen between
    two layers of a step."""

    is_capturable = False
    fuses_layers = True

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        self._reference = ReferenceAttention(geometry, device)
        self._is_prepared = False
        self.inputs: AttentionInputs | None = None

    def prepare(self, inputs: AttentionInputs) -> None:
        """Keep the inputs; plain torch is prepared in `attend`, if it is needed."""
        self.inputs, self._is_prepared = inputs, False

    def twin(self) -> CpuAttention:
        """See `AttentionBackend.twin`."""
        found = copy.copy(self)
        found._reference = copy.copy(self._reference)
        return found

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """``q`` [T, H, E] to [T, H, E_value]."""
        inputs = self.inputs
        assert inputs is not None, "prepare comes first"
        sinks = params.sinks if params.sinks is None else params.sinks.float()
        out = paged_attention(
            q, (pages.k, pages.v), (inputs.query_start, inputs.kv_lens, inputs.page_table), scale=params.scale,
            softcap=params.softcap, window=params.window, sinks=sinks, scales=pages.scales,
        )
        if out is not None:
            return out
        if not self._is_prepared:  # at most once a step: the first layer that needs it
            self._reference.prepare(inputs)
            self._is_prepared = True
        return self._reference.attend(q, pages, params)
