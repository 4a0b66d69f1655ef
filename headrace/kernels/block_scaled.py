"""Block-scaled floats, to and from plain ones in plain torch: MXFP4, and FP8 in groups of a row.

MXFP4: e2m1 in blocks of 32 that share a power of two (e8m0). OCP Microscaling Formats 1.0, 2023.
"""

from __future__ import annotations

import torch

from headrace.kernels.once import cache_once

MXFP4_BLOCK = 32
"""Values of MXFP4 that share a scale."""
FP8_BLOCK = 128
"""Rows and columns of a weight in FP8 that share a scale, where blocks have one: DeepSeek-V3, arXiv:2412.19437, section
3.3.2. Blocks at the end may be smaller."""
LARGEST = 448.0
"""The largest e4m3 value."""
LEAST_AMAX = 1e-4
"""Lower bound of a block's largest magnitude, so that the scale of a block of zeros is not 0."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The midpoints of neighbouring `MAGNITUDES`."""


def dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``codes`` [..., I / 2] and ``scales`` [..., I / 32], uint8, to [..., I] in ``dtype``, bfloat16 or float32: exact.

    A byte holds two neighbouring values, the first in its low half: bit 3 is the sign, bits 0 to 2 stand for the
    `MAGNITUDES`. They are multiplied by ``2 ** (scale - 127)``; scale 255 means NaN.
    """
    # a lookup per byte gives both of its values, [.., I / 2] wide integers viewed as [.., I / 32, 32] of ``dtype``
    values = pairs_of_bytes(dtype, codes.device)[codes.int()].view(dtype).view(*scales.shape, MXFP4_BLOCK)
    return values.mul_(powers_of_two(dtype, codes.device)[scales.int()].unsqueeze(-1)).flatten(-2)


def quantise_mxfp4(x: torch.Tensor, most_apart: int = 254) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., I] to codes and scales as above. A scale is the least power of two by which every value of its block, and
    at least 1e-4, fits, or ``2 ** -most_apart`` times the largest scale of its row, if that is more; values become the
    nearest code, a tie the one nearer to 0, and never minus zero. Computed in float32."""
    blocks = x.float().unflatten(-1, (-1, MXFP4_BLOCK))
    scales = ceil_power_of_two(blocks.abs().amax(-1).clamp_(min=LEAST_AMAX) / MAGNITUDES[-1])
    least = scales.amax(-1, keepdim=True).clamp(min=most_apart) - most_apart  # a byte, which may not go below 0
    scales = torch.maximum(scales, least)
    scaled = blocks / power_of_two(scales).unsqueeze(-1)
    # right=False: a value on a midpoint takes the lower code, nearer to 0
    codes = torch.bucketize(scaled.abs(), torch.tensor(HALFWAY, device=x.device))
    # bit 3 is the sign; code 0 never gets it, since there is no minus zero
    codes = (codes | ((scaled < 0) & (codes > 0)).to(codes.dtype) << 3).flatten(-2).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


@cache_once
def pairs_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: the two values of each byte side by side, as one integer of twice the width of ``dtype``."""
    half = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((half[byte & 15], half[byte >> 4]), dim=-1)
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).squeeze(-1).to(device)


@cache_once
def powers_of_two(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: the value of each e8m0 byte, 2 ** (byte - 127); NaN for 255."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).to(dtype).to(device)


def quantise_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., I] to codes [..., I] in e4m3 and exponents [..., I / group] uint8. An exponent byte e stands for
    ``2 ** (e - 127)`` (e8m0): the least power of two by which every value of its group, and at least 1e-4, fits e4m3.
    Computed in float32; `power_of_two` reads exponents."""
    groups = x.float().unflatten(-1, (-1, group))
    exponents = ceil_power_of_two(groups.abs().amax(-1).clamp_(min=LEAST_AMAX) / LARGEST)
    return (groups / power_of_two(exponents).unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), exponents


def ceil_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The exponent byte (e8m0) of the least power of two that is not below positive float32 ``x``."""
    # float32's exponent field has e8m0's bias; any mantissa bit means the next power
    bits = x.contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes to float32, exactly. Byte 0, 2 ** -127, is subnormal in float32, where an exponent field of 0 means
    another thing."""
    return torch.where(exponents == 0, 2.0**-127, (exponents.int() << 23).view(torch.float32))
