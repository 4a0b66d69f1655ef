"""Qwen3 MoE's checkpoint names: a tensor per expert and matrix, or experts stacked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES
from headrace.layers.moe.checkpoint import GATE_FIRST, MATRICES_APART, unstack_experts


class Qwen3MoeModel(Decoder):
    """The decoder with a mixture of experts in the layers the spec says."""

    names: ClassVar[dict[str, str]] = {**SPLIT_NAMES, **EXPERT_NAMES, "model.layers.{i}.mlp.gate": ROUTER}

    def translate(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Stacked experts apart."""
        return unstack_experts(tensors, {**GATE_FIRST, **MATRICES_APART})
