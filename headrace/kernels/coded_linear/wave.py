"""FP8 products of rows in FP8 in one wave of tiles (`headrace.kernels.linear.wave_product`), for a scale per row and
per output. Results are bfloat16: a following product rounds them to FP8 itself, as a row's scale needs all its tiles.

M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

from functools import partial

import torch

from headrace.kernels.coded_linear import LEAST_WAVE_ROWS, scaled
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.linear import wave_product, waves
from headrace.kernels.linear.wave_product import Scales
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import gelu_tanh_mul_pdl, silu_mul_pdl

ACTIVATIONS = {"silu": silu_mul_pdl, "gelu_tanh": gelu_tanh_mul_pdl}


def _multiply(rows: Fp8Rows, weight: DeviceCodes, activation: str = "") -> torch.Tensor | None:
    """None where the tiles are no wave, as for more rows than were measured, or the kernel cannot be compiled."""
    wave_product.prepare(rows.codes, weight.codes, activation, LEAST_WAVE_ROWS)
    size = wave_product.measure_size(rows.codes, weight.codes, is_gated=bool(activation))
    tile = waves.find_fastest(size)
    if tile is None:
        return None
    return wave_product.multiply(rows.codes, weight.codes, tile, activation, Scales(rows.scales, weight.scales))


def multiply_rows(rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `FP8_LINEAR`."""
    out = _multiply(rows, weight)
    if out is None:
        return scaled.multiply_rows(rows, weight, bias, dtype)
    return out if bias is None else out + bias


def multiply_gated_rows(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype, activation: str
) -> torch.Tensor:
    """See `FP8_GATED`."""
    out = None if bias is not None else _multiply(rows, weight, activation)
    return ACTIVATIONS[activation](multiply_rows(rows, weight, bias, dtype)) if out is None else out


linear_rows = partial(scaled.round_and_multiply, multiply_rows)


def multiply_gated(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate
) -> torch.Tensor | None:
    """See `CODED_GATED`. For rows that no norm has rounded, as on several ranks, whose sums the norm adds up."""
    if gate.is_clamped or bias is not None or weight.out_features % 16:
        return None
    return scaled.round_and_multiply(partial(multiply_gated_rows, activation=gate.kind), x, weight, None)
