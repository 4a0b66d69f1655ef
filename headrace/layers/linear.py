"""`Linear`: a matrix product whose weight may be several checkpoint matrices stacked, e.g. q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from headrace.kernels.linear import GATED_LINEAR, LINEAR, LINEAR_SUMS, NORM_LINEAR, fits
from headrace.kernels.linear import Norm as NormWeights
from headrace.kernels.operation import KernelQuery, Operation
from headrace.layers.build import Build
from headrace.layers.norm import RmsNorm
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.layers.residual import Norm, Residual


def stack_rows(parts: dict[str, int]) -> dict[str, slice]:
    """The rows of each part of a stacked weight, by name; ``parts`` are names and sizes in order."""
    ends = accumulate(parts.values())
    return {name: slice(end - size, end) for (name, size), end in zip(parts.items(), ends, strict=True)}


def choose_fused(operation: Operation, query: KernelQuery) -> Callable[..., Any] | None:
    """The best kernel of an operation that fuses several, or None if there is only the reference: then the separate
    operations, each with its own best kernel, are faster."""
    chosen = operation.choose(query)
    return None if chosen is operation.load("reference") else chosen


class Linear(StorableLayer):
    """``x [T, I] -> [T, O]``. ``parts`` names the stacked outputs and their sizes in order; O is their sum.
    ``is_storable``: see `StorableLayer`."""

    def __init__(
        self, build: Build, in_features: int, parts: dict[str, int] | int, *, bias: bool = False,
        is_storable: bool = True
    ):
        super().__init__()
        self.is_storable = is_storable
        # parts are consecutive rows of one weight [O, I], so that inputs are read once for all of them
        sizes = {"": parts} if isinstance(parts, int) else parts
        self.rows, out_features = stack_rows(sizes), sum(sizes.values())
        self.weight = build.parameter(out_features, in_features)
        self.bias = build.parameter(out_features) if bias else None
        query = build.query(in_features=in_features, out_features=out_features)
        self._linear = LINEAR.choose(query)
        self._linear_sums = LINEAR_SUMS.choose(query)
        self._norm_linear = choose_fused(NORM_LINEAR, query)
        self._gated_linear = choose_fused(GATED_LINEAR, query)

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """See `StorableLayer.part`; of ``weight`` or ``bias``."""
        return parameter[self.rows[name]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Look for the parameter before `stored`, in this order: see `quantization.storage`.
        weight = plain_weight(self)
        if weight is not None:
            return self._linear(x, weight, self.bias)
        assert self.stored is not None
        return self.stored.multiply(x, self.bias)

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """Leave the product of ``x`` [T, I] pending in ``residual``: as it is, as split-K partial sums, or already
        accumulated into the stream, whichever is faster. Nothing else may be pending."""
        weight = plain_weight(self)
        if weight is not None:
            residual.pending = self._linear_sums(x, weight, self.bias, residual.stream)
        else:
            assert self.stored is not None
            residual.pending = self.stored.multiply(x, self.bias)

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """The product followed by the gated activation, in one kernel; None where two kernels are as fast."""
        weight = plain_weight(self)
        if weight is None:
            assert self.stored is not None
            return self.stored.gate(x, self.bias, activation)
        return None if self._gated_linear is None else self._gated_linear(x, weight, self.bias, activation)

    def read(self, norm: Norm, residual: Residual, activation: str = "") -> torch.Tensor | None:
        """``product(norm(residual))``, then the gated ``activation`` if one is named, all in one kernel. None, with the
        residual unchanged, where that is not faster: it takes few rows, an RMS norm, and a pending output [T, D] that
        is not partial sums."""
        # A fused kernel exists on CUDA only, where weights are never stored: `weight` is present.
        x = residual.pending
        if (
            self._norm_linear is None or x is None or x.dim() != 2 or not fits(x.shape[0])
            or not isinstance(norm, RmsNorm)
        ):
            return None
        out, residual.stream = self._norm_linear(
            x, residual.stream, NormWeights(norm.weight, norm.eps, norm.offset), self.weight, self.bias, activation
        )
        residual.pending = None
        return out
