"""`DecoderBlock`: one layer, attention and MLP, each with its norms before or after and the residual around it."""

from __future__ import annotations

import torch
from torch import nn

from headrace.layers.attention.latent import LatentAttention
from headrace.layers.attention.layer import Attention
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.mlp import GatedMlp
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.norm import NoNorm, RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, MoeSpec


class DecoderBlock(nn.Module):
    """The residual is carried beside the branch output and added inside the next norm: one kernel instead of two."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, rotary: RotaryTable | None, build: Build):
        super().__init__()

        def norm(is_there: bool) -> nn.Module:
            return RmsNorm(build, spec.hidden_size, spec.norm.eps, spec.norm.offset) if is_there else NoNorm()

        self.attention_norm = norm(spec.norm.before)
        if isinstance(spec.attention, LatentAttentionSpec):
            self.attention = LatentAttention(spec.attention, layer, width=spec.hidden_size, rotary=rotary, build=build)
        else:
            self.attention = Attention(
                spec.attention, layer, width=spec.hidden_size, norm=spec.norm, rotary=rotary, build=build
            )
        self.attention_post_norm = norm(spec.norm.after)
        self.mlp_norm = norm(spec.norm.before)
        mlp = layer.mlp or spec.mlp
        self.mlp = MoeMlp(mlp, spec.hidden_size, build) if isinstance(mlp, MoeSpec) else GatedMlp(mlp, spec.hidden_size, build)
        self.mlp_post_norm = norm(spec.norm.after)
        self.residual_scale = spec.residual_scale
        # the next norm takes what a branch leaves
        if spec.norm.before and not spec.norm.after and spec.residual_scale == 1.0:
            for branch in (self.attention, self.mlp):
                branch.leave_sums()

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """``x`` [T, D] (or sums of it, or None, see `RmsNorm.add`) is the previous block's last branch, still to be
        added to ``residual``; returns the same pair, of [S, D] when the batch has S ``queries``."""
        x, residual = self.attention.after_norm(self.attention_norm, x, residual, batch)
        if batch.queries is not None:
            residual = residual.index_select(0, batch.queries)
            if not len(residual):
                return x, residual  # keys and values are in their pages, and nothing else was wanted
        x = self._scale(self.attention_post_norm(x))
        x, residual = self.mlp.after_norm(self.mlp_norm, x, residual)
        return self._scale(self.mlp_post_norm(x)), residual

    def _scale(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return x if self.residual_scale == 1.0 else x.mul_(self.residual_scale)
