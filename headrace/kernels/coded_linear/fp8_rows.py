"""Rows in FP8, and their making in plain torch: the oracle of the kernels in `fp8_triton`.

T tokens, I inputs, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from headrace.kernels.block_scaled.reference import LARGEST
from headrace.kernels.rowwise import reference as rowwise


class Fp8Rows(NamedTuple):
    """Rows in FP8: ``codes`` [T, I] float8_e4m3fn and ``scales`` float32, [T] or by groups of inputs [G, T]. A value is
    code * scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows [T, I] as plain numbers."""
        scales = self.scales[:, None] if self.scales.dim() == 1 else self.scales.t()
        size = -(-self.codes.shape[1] // scales.shape[1])
        size = 1 << (size - 1).bit_length() if scales.shape[1] > 1 else size  # a group is a power of two
        return (self.codes.to(dtype) * scales.to(dtype).repeat_interleave(size, 1)[:, : self.codes.shape[1]])


def quantise_rows(x: torch.Tensor, group: int = 0) -> Fp8Rows:
    """See `QUANTISE_ROWS`."""
    width = x.shape[1]
    size = group or width
    groups = F.pad(x.float(), (0, -width % size)).unflatten(1, (-1, size))
    scales = groups.abs().amax(2) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (groups / scales.unsqueeze(2)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Rows(codes.flatten(1)[:, :width].contiguous(), scales.t().contiguous() if group else scales[:, 0])


def norm_rows(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, *,
    group: int = 0,
) -> tuple[Fp8Rows, torch.Tensor]:
    """See `NORM_ROWS`."""
    if x is None:
        return quantise_rows(rowwise.rms_norm(residual, weight, eps, offset), group), residual
    normed, residual = rowwise.add_rms_norm(x, residual, weight, eps, offset)
    return quantise_rows(normed, group), residual


def gate_rows(x: torch.Tensor, activation: str, group: int = 0) -> Fp8Rows:
    """See `GATE_ROWS`."""
    gated = {"silu": rowwise.silu_mul, "gelu_tanh": rowwise.gelu_tanh_mul}[activation](x)
    return quantise_rows(gated, group)
