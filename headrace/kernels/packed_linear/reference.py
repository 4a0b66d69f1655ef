"""Packed products in plain torch: the oracle. Unpacks the weight at every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.linear.reference import ACTIVATIONS
from headrace.kernels.packed_linear.layout import GROUP, Format, PackedMatrix, unpack

FINE_FROM = {False: 4.0, True: 2.0}
"""For `round_groups`: for weights of 4 bits, and of 8, which deserve finer inputs. The native kernels' numbers."""


def packed_linear(
    x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `PACKED_LINEAR`."""
    # inputs are rounded as the integer kernels do: per row, or per row and group of 32
    values = x.float()
    if weight.format is Format.INT8:
        values = round_to_int8(values)
    elif not weight.format.is_exact:
        values = round_groups(values, FINE_FROM[weight.format is Format.INT8_GROUP])
    out = F.linear(values, unpack(weight, torch.float32), None if bias is None else bias.float())
    return out.to(out_dtype or x.dtype)


def packed_gated(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """See `PACKED_GATED`."""
    return ACTIVATIONS[activation](packed_linear(x, weight, bias))


def round_groups(values: torch.Tensor, fine_from: float) -> torch.Tensor:
    """``values`` [T, I] float32 with each group of 32 rounded to 8 bits; to 15 bits where its largest magnitude is
    above ``fine_from`` times the mean of those of the row's groups: its other numbers would be rounded to nothing."""
    groups = F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    tops = groups.abs().amax(dim=2, keepdim=True)
    is_fine = tops > fine_from * tops.mean(dim=1, keepdim=True)
    rounded = torch.where(is_fine, round_to_int8(groups, 127 * 128), round_to_int8(groups))
    return rounded.flatten(1)[:, : values.shape[1]]


def round_to_int8(values: torch.Tensor, most: int = 127) -> torch.Tensor:
    """Round to multiples of max(abs) / ``most`` of the last dimension; returns floats."""
    scales = values.abs().amax(dim=-1, keepdim=True) / most
    return (values / torch.where(scales > 0, scales, 1.0)).round() * scales
