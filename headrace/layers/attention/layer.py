"""`Attention`: projection, rotation and page write, attention, projection back. T tokens, H heads, K kv heads, E head
dim."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import nn

from headrace.kernels.rope_write import ROPE_WRITE
from headrace.layers.attention.contract import AttentionParams, KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.branch import Branch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import AttentionSpec, LayerSpec, NormSpec


class AttentionLayer(Branch):
    """What all kinds of attention layers have: heads, the constants their backend is told, and pages once bound.
    ``values_in_keys``: value pages are views into the key pages. ``prunes_queries``:
    obeys ``ForwardBatch.queries``."""

    values_in_keys: ClassVar[bool] = False
    prunes_queries: ClassVar[bool] = False

    def __init__(self, num_heads: int, params: AttentionParams):
        super().__init__()
        self.num_heads, self.params = num_heads, params
        self.group = -1
        self.pages: KvPages | None = None

    def bind(self, pages: KvPages, group: int) -> None:
        """Attach this layer's pages and the cache group they belong to."""
        self.pages, self.group = pages, group


class Attention(AttentionLayer):
    """``x [T, D] -> [T, D]``, or [S, D] for the queries of the batch; reads and writes this layer's pages, which
    ``bind`` gives it before the first step."""

    prunes_queries = True

    def __init__(
        self, spec: AttentionSpec, layer: LayerSpec, *, width: int, norm: NormSpec, rotary: RotaryTable | None,
        build: Build
    ):
        sinks = build.parameter(spec.num_heads) if spec.sinks else None
        super().__init__(spec.num_heads, AttentionParams(spec.scale, layer.window, spec.softcap, sinks))
        self.spec, self.rope, self.sinks = spec, layer.rope, sinks
        heads_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(build, width, {"q": heads_width, "k": kv_width, "v": kv_width}, bias=spec.qkv_bias)
        self.output = Linear(build, heads_width, width, bias=spec.output_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            is_full = spec.qk_norm == "full"
            self.q_norm = RmsNorm(build, heads_width if is_full else spec.head_dim, norm.eps, norm.offset)
            self.k_norm = RmsNorm(build, kv_width if is_full else spec.head_dim, norm.eps, norm.offset)
        self.rotary = rotary
        self._rope_write = self._choose_rope_write(norm, layer, build)

    def leave_sums(self) -> None:
        self.output.leave_sums()

    def _choose_rope_write(self, norm: NormSpec, layer: LayerSpec, build: Build) -> partial[torch.Tensor]:
        spec, rope = self.spec, layer.rope
        weights = {}
        if spec.qk_norm != "none":
            weights = {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight}
        shape = dict(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            rotary_dim=rope.rotary_dim if rope else 0
        )
        return partial(
            ROPE_WRITE.choose(build.query(**shape)), **shape, **weights, interleaved=bool(rope and rope.interleaved),
            norm_eps=norm.eps, norm_offset=norm.offset,
        )

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(self.qkv(x), batch)

    def onto(self, residual: torch.Tensor, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        return self._attend(self.qkv(x), batch, residual if batch.queries is None else None)

    def after_norm(
        self, norm: nn.Module, x: torch.Tensor | None, residual: torch.Tensor | None, *batch: ForwardBatch
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if not self.qkv.can_join(norm, x, residual):
            return super().after_norm(norm, x, residual, *batch)
        qkv, residual = self.qkv.join(norm, x, residual)
        return self._attend(qkv, *batch), residual

    def _attend(
        self, qkv: torch.Tensor, batch: ForwardBatch, residual: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        pages, step = self.pages, batch.groups[self.group]
        cos_sin = self.rotary.cos_sin if self.rotary else None
        codes = {} if pages.scales is None else {"scales": pages.scales}
        q = self._rope_write(qkv, batch.positions, cos_sin, step.inputs.slots, pages.k, pages.v, **codes)
        if batch.queries is not None:
            q = q.index_select(0, batch.queries)
        return self.output(step.backend.attend(q, pages, self.params).flatten(1), residual)
