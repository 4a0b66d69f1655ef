"""`RmsNorm`, `LayerNorm`, `NoNorm`: normalise, or add to the residual and normalise. T tokens, D hidden size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from headrace.kernels.coded_linear import NORM_ROWS
from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.linear import Norm as NormWeights
from headrace.kernels.rowwise import ADD_LAYER_NORM, ADD_RMS_NORM, RMS_NORM
from headrace.layers.build import Build
from headrace.layers.residual import Norm, Residual
from headrace.layers.spec import NormSpec
from headrace.parallel.share import Share, as_share


class RmsNorm(Norm):
    """``x / rms(x) * (weight + offset)`` over the last dim, [T, D], fused with the addition to the residual before it.
    Zhang and Sennrich, arXiv:1910.07467."""

    def __init__(self, build: Build, size: int | Share, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = build.parameter(size)
        self.eps, self.offset = eps, offset
        query = build.query(width=as_share(size).length)
        self._norm = RMS_NORM.choose(query)
        self._add_norm = ADD_RMS_NORM.choose(query)
        self._norm_rows = NORM_ROWS.choose(query)

    @property
    def weights(self) -> NormWeights:
        """What kernels are told of it."""
        return NormWeights(self.weight, self.eps, self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)

    def add(self, residual: Residual) -> torch.Tensor:
        group, pending = residual.group, residual.pending
        if group is not None and pending is not None:
            fused = group.reduce_add_norm(
                pending, residual.stream, self.weight, eps=self.eps, offset=self.offset
            )
            if fused is not None:
                residual.pending = residual.group = None
                x, residual.stream = fused
                return x
            residual.gather()
        if residual.addition is not None and residual.pending is not None:
            addition = residual.addition
            adapted = addition.bank.finish_norm(
                addition.begun, residual.pending, residual.stream, self.weights
            )
            if adapted is not None:
                residual.pending = residual.addition = None
                x, residual.stream, _ = adapted
                return x
            residual.finish()
        if residual.pending is None:
            return self._norm(residual.stream, self.weight, self.eps, self.offset)
        # the sum may be written into the old stream's memory: use only the returned tensor
        x, residual.stream = self._add_norm(residual.pending, residual.stream, self.weight, self.eps, self.offset)
        residual.pending = None
        return x

    def add_rows(self, residual: Residual, group: int) -> Fp8Rows:
        """As `add`, with the normalised stream in FP8 for a product that takes it so; ``group`` as of `QUANTISE_ROWS`.
        No other rank has a part of what is pending."""
        assert residual.group is None
        rows, residual.stream = self._norm_rows(
            residual.pending, residual.stream, self.weight, self.eps, self.offset, group=group
        )
        residual.pending = None
        return rows


class LayerNorm(Norm):
    """Mean 0 and variance 1 over the last dim, [T, D], times ``weight + offset``, plus a bias; fused with the addition
    to the residual before it."""

    def __init__(self, build: Build, size: int, eps: float, offset: float = 0.0, *, bias: bool = True):
        super().__init__()
        self.weight, self.eps, self.offset = build.parameter(size), eps, offset
        self.bias = build.parameter(size) if bias else None
        self._add_norm = ADD_LAYER_NORM.choose(build.query(width=size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)

    def add(self, residual: Residual) -> torch.Tensor:
        residual.gather()
        if residual.pending is None:
            return self(residual.stream)
        # as in `RmsNorm`, the old stream is not to be used
        x, residual.stream = self._add_norm(
            residual.pending, residual.stream, self.weight, self.bias, self.eps, self.offset
        )
        residual.pending = None
        return x


class HeadNorm(nn.Module):
    """The same without a bias for each head by itself, [T, H * E], with a ``weight`` [H, E] of its own. H heads, E head
    dim."""

    def __init__(self, build: Build, num_heads: int | Share, head_dim: int, eps: float):
        super().__init__()
        self.weight, self.eps, self.offset = build.parameter(num_heads, head_dim), eps, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.float().unflatten(-1, self.weight.shape)
        return (F.layer_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight.float()).flatten(-2).to(x.dtype)


class NoNorm(Norm):
    """The identity, for architectures without this norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def make_norm(spec: NormSpec, size: int, build: Build) -> Norm:
    """The norm of that kind over ``size`` dims."""
    if spec.kind == "layer":
        return LayerNorm(build, size, spec.eps, spec.offset, bias=spec.bias)
    return RmsNorm(build, size, spec.eps, spec.offset)
