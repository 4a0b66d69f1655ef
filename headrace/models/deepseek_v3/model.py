"""DeepSeek-V2's and V3's checkpoint names: latent projections, shared experts, layers for speculation that are not
loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from headrace.layers.build import Build
from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES
from headrace.layers.moe.checkpoint import GATE_FIRST, MATRICES_APART, unstack_experts
from headrace.layers.spec import DecoderSpec

LATENT_NAMES = {
    "model.layers.{i}.self_attn.q_a_layernorm": "layers.{i}.attention.q_norm",
    "model.layers.{i}.self_attn.q_b_proj": "layers.{i}.attention.q_up",
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa": "layers.{i}.attention.down#kv",
    "model.layers.{i}.self_attn.kv_a_layernorm": "layers.{i}.attention.kv_norm",
    "model.layers.{i}.self_attn.kv_b_proj": "layers.{i}.attention.kv_up",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.output",
}
MOE_NAMES = {
    **EXPERT_NAMES,
    "model.layers.{i}.mlp.gate": ROUTER,
    "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.router.choice_bias",
    "model.layers.{i}.mlp.shared_experts.gate_proj": "layers.{i}.mlp.shared.gate_up#gate",
    "model.layers.{i}.mlp.shared_experts.up_proj": "layers.{i}.mlp.shared.gate_up#up",
    "model.layers.{i}.mlp.shared_experts.down_proj": "layers.{i}.mlp.shared.down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekModel(Decoder):
    """The decoder with latent attention and a mixture of experts, which the spec asks for."""

    def __init__(self, spec: DecoderSpec, build: Build):
        super().__init__(spec, build)
        query = "q_a_proj" if spec.attention.q_lora_rank else "q_proj"
        self.names = {
            **{theirs: ours for theirs, ours in SPLIT_NAMES.items() if "self_attn" not in theirs}, **LATENT_NAMES,
            **MOE_NAMES,
            f"model.layers.{{i}}.self_attn.{query}": "layers.{i}.attention.down#q",
        }

    def ignores(self, name: str) -> bool:
        """The layers after the last, which predict further tokens."""
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) >= self.spec.num_layers

    def translate(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Stacked experts apart."""
        return unstack_experts(tensors, {**GATE_FIRST, **MATRICES_APART})
