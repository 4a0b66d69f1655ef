"""Packed products in plain torch: the oracle. Unpacks the weight at every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.linear.reference import ACTIVATIONS
from headrace.kernels.packed_linear.layout import GROUP, Format, PackedMatrix, unpack


def packed_linear(
    x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `PACKED_LINEAR`."""
    # inputs are rounded as the integer kernels do: per row, or per row and group of 32
    values = x.float()
    if weight.format is Format.INT8:
        values = round_to_int8(values)
    elif not weight.format.is_exact:
        padded = F.pad(values, (0, -values.shape[1] % GROUP))
        values = round_to_int8(padded.unflatten(1, (-1, GROUP))).flatten(1)[:, : x.shape[1]]
    out = F.linear(values, unpack(weight, torch.float32), None if bias is None else bias.float())
    return out.to(out_dtype or x.dtype)


def packed_gated(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """See `PACKED_GATED`."""
    return ACTIVATIONS[activation](packed_linear(x, weight, bias))


def round_to_int8(values: torch.Tensor) -> torch.Tensor:
    """Round to multiples of max(abs) / 127 of the last dimension; returns floats."""
    scales = values.abs().amax(dim=-1, keepdim=True) / 127
    return (values / torch.where(scales > 0, scales, 1.0)).round() * scales
