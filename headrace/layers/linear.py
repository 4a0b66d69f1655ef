"""`Linear`: a matrix product whose weight may be several checkpoint matrices stacked, e.g. q, k and v."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from headrace.kernels.linear import LINEAR
from headrace.layers.build import Build


class Linear(nn.Module):
    """``x [T, I] -> [T, O]``. ``parts`` names the stacked outputs and their widths in order; O is their sum."""

    def __init__(self, build: Build, in_width: int, parts: dict[str, int] | int, *, bias: bool = False):
        super().__init__()
        widths = {"": parts} if isinstance(parts, int) else parts
        ends = list(accumulate(widths.values()))
        self.rows = {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}
        self.weight = build.parameter(ends[-1], in_width)
        self.bias = build.parameter(ends[-1]) if bias else None
        self._linear = LINEAR.choose(build.query(in_width=in_width, out_width=ends[-1]))

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of ``weight`` or ``bias`` that holds the named part."""
        return parameter[self.rows[name]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self.weight, self.bias)
