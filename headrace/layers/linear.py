"""`Linear`: a matrix product whose weight may be several checkpoint matrices stacked, e.g. q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from headrace.kernels.linear import GATED_LINEAR, LINEAR, LINEAR_SUMS
from headrace.kernels.norm_linear import NORM_LINEAR, Norm, fits
from headrace.kernels.operation import KernelQuery, Operation
from headrace.layers.build import Build
from headrace.layers.norm import RmsNorm
from headrace.layers.storing import StorableLayer, plain_weight


def choose_joined(operation: Operation, query: KernelQuery) -> Callable[..., Any] | None:
    """The best solution of an operation that joins several; None if that is the reference: apart, each has its best
    kernel."""
    chosen = operation.choose(query)
    return None if chosen is operation.load("reference") else chosen


class Linear(StorableLayer):
    """``x [T, I] -> [T, O]``. ``parts`` names the stacked outputs and their widths in order; O is their sum. A layer
    whose weight is read by others, or must stay as precise as it is, ``is_storable=False``, keeps it plain."""

    def __init__(
        self, build: Build, in_width: int, parts: dict[str, int] | int, *, bias: bool = False, is_storable: bool = True
    ):
        super().__init__()
        self.is_storable = is_storable
        widths = {"": parts} if isinstance(parts, int) else parts
        ends = list(accumulate(widths.values()))
        self.rows = {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}
        self.weight = build.parameter(ends[-1], in_width)
        self.bias = build.parameter(ends[-1]) if bias else None
        self._query = build.query(in_width=in_width, out_width=ends[-1])
        self._linear = LINEAR.choose(self._query)
        self._linear_sums: Callable[..., torch.Tensor | None] | None = None
        self._norm_linear = choose_joined(NORM_LINEAR, self._query)
        self._gated_linear = choose_joined(GATED_LINEAR, self._query)

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of ``weight`` or ``bias`` that holds the named part."""
        return parameter[self.rows[name]]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | None:
        """The product; of a layer that leaves sums see `leave_sums`, all others know no residual."""
        weight = plain_weight(self)
        if weight is None:
            return self.stored.multiply(x, self.bias)
        return (
            self._linear(x, weight, self.bias) if self._linear_sums is None
            else self._linear_sums(x, weight, self.bias, residual)
        )

    def leave_sums(self) -> None:
        """From now on outputs may be sums [S, T, O] in float32, or None: they were added to ``residual`` in place.
        `RmsNorm.add` takes them so: that is where they must go."""
        self._linear_sums = LINEAR_SUMS.choose(self._query)

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor | None:
        """The product followed by the gated activation, in one kernel; None where two take no longer."""
        weight = plain_weight(self)
        if weight is None:
            return self.stored.gate(x, self.bias, activation)
        return None if self._gated_linear is None else self._gated_linear(x, weight, self.bias, activation)

    def can_join(self, norm: nn.Module, x: torch.Tensor | None, residual: torch.Tensor | None) -> bool:
        """Whether `join` takes these: few rows, an RMS norm, and a residual to add."""
        return (
            self._norm_linear is not None and x is not None and residual is not None and isinstance(norm, RmsNorm)
            and x.dim() == 2 and fits(x.shape[0])
        )

    def join(
        self, norm: RmsNorm, x: torch.Tensor, residual: torch.Tensor, activation: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(product(norm(x + residual)), x + residual)`` in one kernel, the product followed by the gated
        activation."""
        assert self._norm_linear is not None, "see can_join"
        return self._norm_linear(
            x, residual, Norm(norm.weight, norm.eps, norm.offset), self.weight, self.bias, activation
        )
