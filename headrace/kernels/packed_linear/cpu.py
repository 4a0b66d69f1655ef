"""Packed products by own C++ kernels; by the reference until these are loaded."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.packed_linear import reference
from headrace.kernels.packed_linear.layout import PANEL, PackedMatrix, gather_rows
from headrace.kernels.rowwise.cpu import GATE_NUMBERS, GATED


def packed_linear(
    x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `PACKED_LINEAR`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.packed_linear(x, weight, bias, out_dtype)
    out = ops.packed_linear(
        x, weight.words, weight.scales, weight.mins, weight.number, weight.out_features, bias,
        out_dtype is torch.float32
    )
    # the kernel stores x's dtype or float32
    return out if out_dtype is None or out.dtype == out_dtype else out.to(out_dtype)


def packed_gated(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """See `PACKED_GATED`. Two calls if gate and up are not whole panels."""
    ops = NATIVE.find()
    # the kernel pairs panels of gate with panels of up
    if ops is None or weight.out_features % (2 * PANEL):
        return GATED[activation](packed_linear(x, weight, bias))
    return ops.packed_gated(
        x, weight.words, weight.scales, weight.mins, weight.number, weight.out_features, bias, GATE_NUMBERS[activation]
    )


def packed_rows(weight: PackedMatrix, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `PACKED_ROWS`."""
    ops = NATIVE.find()
    if ops is None:
        return gather_rows(weight, rows, dtype)
    out_features, in_features = weight.shape
    return ops.packed_rows(
        rows.contiguous(), weight.words, weight.scales, weight.mins, weight.number, out_features, in_features,
        dtype is torch.bfloat16
    )
