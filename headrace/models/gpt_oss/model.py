"""gpt-oss's checkpoint names: stacked experts with gate and up by turns, often in MXFP4; its own word for the
router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES
from headrace.layers.moe.checkpoint import GATE_EVERY_OTHER, MATRICES_APART, unstack_mxfp4_experts


class GptOssModel(Decoder):
    """The decoder with sinks and a mixture of experts, which the spec asks for."""

    names: ClassVar[dict[str, str]] = {
        **SPLIT_NAMES,
        **EXPERT_NAMES,
        "model.layers.{i}.mlp.router": ROUTER,
        "model.layers.{i}.self_attn.sinks": "layers.{i}.attention.sinks",
    }

    def translate(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Stacked experts apart, and out of MXFP4 where they are not kept in it; the sinks' name in GGUF files to the
        usual one."""
        renamed = ((name.replace(".self_attn.sinks.weight", ".self_attn.sinks"), tensor) for name, tensor in tensors)
        return unstack_mxfp4_experts(renamed, {**GATE_EVERY_OTHER, **MATRICES_APART}, keeps_blocks=self._keeps_blocks)
