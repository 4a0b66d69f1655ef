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
    """The best solution of an operation that fuses several. None if that is the reference: one by one, each has its
    best kernel."""
    chosen = operation.choose(query)
    return None if chosen is operation.load("reference") else chosen


class Linear(StorableLayer):
    """``x [T, I] -> [T, O]``. ``parts`` names the stacked outputs and their widths in order; O is their sum. A layer
    whose weight is read by others, or must stay as precise as it is, ``is_storable=False``, keeps it plain."""

    def __init__(
        self, build: Build, in_features: int, parts: dict[str, int] | int, *, bias: bool = False,
        is_storable: bool = True
    ):
        super().__init__()
        self.is_storable = is_storable
        widths = {"": parts} if isinstance(parts, int) else parts
        ends = list(accumulate(widths.values()))
        self.rows = {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}
        self.weight = build.parameter(ends[-1], in_features)
        self.bias = build.parameter(ends[-1]) if bias else None
        query = build.query(in_features=in_features, out_features=ends[-1])
        self._linear = LINEAR.choose(query)
        self._linear_sums = LINEAR_SUMS.choose(query)
        self._norm_linear = choose_fused(NORM_LINEAR, query)
        self._gated_linear = choose_fused(GATED_LINEAR, query)

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of ``weight`` or ``bias`` that holds the named part."""
        return parameter[self.rows[name]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = plain_weight(self)
        return self.stored.multiply(x, self.bias) if weight is None else self._linear(x, weight, self.bias)

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """The product of ``x`` [T, I], left pending in ``residual``: as partial sums, or accumulated into the stream,
        where that is faster. Nothing else may be pending."""
        weight = plain_weight(self)
        residual.pending = (
            self.stored.multiply(x, self.bias) if weight is None
            else self._linear_sums(x, weight, self.bias, residual.stream)
        )

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """The product followed by the gated activation, in one kernel; None where two take no longer."""
        weight = plain_weight(self)
        if weight is None:
            return self.stored.gate(x, self.bias, activation)
        return None if self._gated_linear is None else self._gated_linear(x, weight, self.bias, activation)

    def read(self, norm: Norm, residual: Residual, activation: str = "") -> torch.Tensor | None:
        """``product(norm(residual))``, then the gated ``activation`` if one is named, all in one kernel; None where
        that is no faster: it takes few rows, an RMS norm, and a pending output that is no partial sums."""
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
