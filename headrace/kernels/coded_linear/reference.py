"""Products with coded weights in plain torch: the oracle, and the fastest way for many rows where no FP8 GEMM takes
the weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.block_scaled import LARGEST
from headrace.kernels.coded_linear import super_blocks
from headrace.kernels.coded_linear.codes import decode
from headrace.kernels.coded_linear.device_codes import HALF, DeviceCodes, Fp8Rows
from headrace.kernels.linear.reference import linear_float, linear_into_float
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise import reference as rowwise

CHUNK_WEIGHTS = 1 << 26
"""Weights that are dequantised at a time, which bounds temporaries."""
LEAST_SCALE = 2.0**-100
"""Of rows in FP8, so that its reciprocal is finite: groups of smaller numbers count as zeros."""


def coded_linear(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    return F.linear(x, dequantise(weight, x.dtype), bias)


def coded_float(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_FLOAT`."""
    return multiply_plain(x, dequantise(weight, x.dtype))


def multiply_plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `LINEAR_FLOAT`: cuBLAS stores its accumulator."""
    return linear_into_float(x, weight) if x.is_cuda and x.dtype != torch.float32 else linear_float(x, weight)


def grouped(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `GROUPED_CODED`."""
    return multiply_groups(x, dequantise(weight, x.dtype))


def multiply_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, G, I] times the plain weight [G * O, I] of groups: [T, G * O]."""
    stack, out = weight.unflatten(0, (x.shape[1], -1)), x.new_empty(len(x), len(weight))
    # written where it belongs: a result [G, T, O] would have to be copied
    torch.bmm(x.transpose(0, 1), stack.transpose(1, 2), out=out.unflatten(1, (x.shape[1], -1)).transpose(0, 1))
    return out


def quantise_rows(x: torch.Tensor, group: int = 0) -> Fp8Rows:
    """See `QUANTISE_ROWS`."""
    width = x.shape[1]
    size = group or width
    groups = F.pad(x.float(), (0, -width % size)).unflatten(1, (-1, size))
    scales = groups.abs().amax(2) / LARGEST
    scales = torch.where(scales > LEAST_SCALE, scales, 1.0)
    codes = (groups * (1.0 / scales).unsqueeze(2)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
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


def gate_rows(x: torch.Tensor, gate: Gate, group: int = 0) -> Fp8Rows:
    """See `GATE_ROWS`."""
    if gate.is_clamped:
        gated = rowwise.clamped_swiglu(x, limit=gate.limit, alpha=gate.alpha, up_offset=gate.up_offset)
    else:
        gated = {"silu": rowwise.silu_mul, "gelu_tanh": rowwise.gelu_tanh_mul}[gate.kind](x)
    return quantise_rows(gated, group)


def plain_codes(weight: DeviceCodes) -> torch.Tensor:
    """Codes [O, I], one to an element, in the places of ``order``; of a weight that is not in tiles."""
    if not weight.is_short:
        return weight.codes
    blocks = weight.codes.unflatten(1, (-1, HALF))
    return torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)[:, : weight.in_features]


def dequantise(weight: DeviceCodes, dtype: torch.dtype) -> torch.Tensor:
    """The plain weight [O, I], inputs in their own order; computed in float32."""
    shares = weight.split(CHUNK_WEIGHTS)
    if len(shares) == 1:
        return _dequantise(weight, dtype)
    dense = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    first = 0
    for share in shares:
        dense[first : first + share.out_features] = _dequantise(share, dtype)
        first += share.out_features
    return dense


def _dequantise(weight: DeviceCodes, dtype: torch.dtype) -> torch.Tensor:
    weight = weight.untile()
    if weight.supers is not None:
        return super_blocks.dequantise(weight).to(dtype)
    values = decode(weight.code, plain_codes(weight))
    zeros = weight.float_zeros
    if zeros is not None:
        values -= _spread(weight, zeros)
    values = (values * _spread(weight, weight.float_scales)).to(dtype)
    return values if weight.order is None else torch.empty_like(values).index_copy_(1, weight.order, values)


def _spread(weight: DeviceCodes, table: torch.Tensor) -> torch.Tensor:
    rows = table.float().repeat_interleave(weight.rows, 0)[: weight.out_features]
    return rows if rows.shape[1] == 1 else rows.repeat_interleave(weight.group, 1)[:, : weight.in_features]
