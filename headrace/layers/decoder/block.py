"""`DecoderBlock` and `ParallelBlock`: one layer, attention and MLP around a residual. T tokens, D hidden size."""

from __future__ import annotations

from torch import nn

from headrace.base.registry import load_target
from headrace.layers.build import Build
from headrace.layers.norm import NoNorm, make_norm
from headrace.layers.residual import Branch, Norm, Residual
from headrace.layers.rotary import RotaryTable
from headrace.layers.self_attention import AttentionLayer
from headrace.layers.spec import DecoderSpec, LayerSpec


class Block(nn.Module):
    """One layer of a decoder."""

    attention: AttentionLayer
    mlp: Branch
    takes_slices: bool = False
    """Whether it takes a residual in slices."""

    def forward(self, residual: Residual) -> None:
        """Run the layer on the residual; the output of its last branch is left pending. If the batch has ``queries``,
        the residual is pruned to their rows, [S, D]."""
        raise NotImplementedError


class DecoderBlock(Block):
    """Attention, then MLP, each with norms before or after it; the norm before a branch also adds the latest output."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, rotary: RotaryTable | None, build: Build):
        super().__init__()

        def norm(is_there: bool) -> Norm:
            return make_norm(spec.norm, spec.hidden_size, build) if is_there else NoNorm()

        self.step = build.step
        self.attention_norm = norm(spec.norm.before)
        self.attention = _make_attention(spec, layer, rotary, build)
        self.attention_post_norm = norm(spec.norm.after)
        self.mlp_norm = norm(spec.norm.before)
        self.mlp = _make_mlp(spec, layer, build)
        self.mlp_post_norm = norm(spec.norm.after)
        self.residual_scale = spec.residual_scale
        # Nothing is applied to a branch's output before the next norm adds it, so it may be left in any form that
        # `Residual.pending` allows, partial sums included.
        self._adds = spec.norm.before and not spec.norm.after and spec.residual_scale == 1.0
        self.takes_slices = self._adds and self.attention.takes_slices and self.mlp.takes_slices

    def forward(self, residual: Residual) -> None:
        if self._adds:
            self.attention.add(self.attention_norm, residual)
        else:
            self._add_scaled(self.attention, self.attention_norm, self.attention_post_norm, residual)
        if self.step.batch.queries is not None and not len(residual.stream):
            return  # keys and values are in their pages, and no hidden state is wanted
        if self._adds:
            self.mlp.add(self.mlp_norm, residual)
        else:
            self._add_scaled(self.mlp, self.mlp_norm, self.mlp_post_norm, residual)

    def _add_scaled(self, branch: Branch, norm: Norm, post_norm: Norm, residual: Residual) -> None:
        x = branch.read(norm, residual)
        if len(x):  # no rows where no hidden state is wanted; kernels take one at least
            x = post_norm(x)
            x = x if self.residual_scale == 1.0 else x.mul_(self.residual_scale)
        residual.pending = x


class ParallelBlock(Block):
    """Attention and MLP read the same residual, through a norm each or through one; their sum is left pending."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, rotary: RotaryTable | None, build: Build):
        super().__init__()
        assert not spec.norm.after and spec.norm.before, "parallel branches have norms before them and none after"
        self.step, self.residual_scale = build.step, spec.residual_scale
        self.attention_norm = make_norm(spec.norm, spec.hidden_size, build)
        self.attention = _make_attention(spec, layer, rotary, build)
        self.mlp_norm = None if spec.block == "parallel_one_norm" else make_norm(spec.norm, spec.hidden_size, build)
        self.mlp = _make_mlp(spec, layer, build)

    def forward(self, residual: Residual) -> None:
        x = self.attention_norm.add(residual)
        out = self.attention(x)
        # attention has pruned its output to [S, D] already; its input and the stream are still [T, D]
        if (queries := self.step.batch.queries) is not None:
            residual.keep_rows(queries)
            x = x.index_select(0, queries)
        if len(x):
            out = out.add_(self.mlp(x if self.mlp_norm is None else self.mlp_norm(residual.stream)))
        residual.pending = out if self.residual_scale == 1.0 else out.mul_(self.residual_scale)


def make_block(spec: DecoderSpec, layer: LayerSpec, rotary: RotaryTable | None, build: Build) -> Block:
    """The block that ``spec.block`` asks for."""
    cls = DecoderBlock if spec.block == "sequential" else ParallelBlock
    return cls(spec, layer, rotary, build)


def _make_attention(spec: DecoderSpec, layer: LayerSpec, rotary: RotaryTable | None, build: Build) -> AttentionLayer:
    attention = layer.attention or spec.attention
    return load_target(attention.branch)(
        attention, layer, hidden_size=spec.hidden_size, norm=spec.norm, rotary=rotary, build=build
    )


def _make_mlp(spec: DecoderSpec, layer: LayerSpec, build: Build) -> Branch:
    mlp = layer.mlp or spec.mlp
    return load_target(mlp.branch)(mlp, spec.hidden_size, build)
