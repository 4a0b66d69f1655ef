"""MXFP4 to plain floats by a table of byte values: the oracle, and fast enough for loading."""

from __future__ import annotations

import torch

from headrace.kernels.block_fp8.reference import ceil_power_of_two, power_of_two
from headrace.kernels.mxfp4 import BLOCK
from headrace.kernels.once import cache_once

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between two magnitudes each."""
LEAST_AMAX = 1e-4


def dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `DEQUANTISE_MXFP4`."""
    values = pairs_of_bytes(dtype, codes.device)[codes.int()].view(dtype).view(*scales.shape, BLOCK)
    return values.mul_(powers_of_two(dtype, codes.device)[scales.int()].unsqueeze(-1)).flatten(-2)


def quantise_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `QUANTISE_MXFP4`."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = ceil_power_of_two(blocks.abs().amax(-1).clamp_(min=LEAST_AMAX) / MAGNITUDES[-1])
    scaled = blocks / power_of_two(scales).unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), torch.tensor(HALFWAY, device=x.device))
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
    """[256]: the value of each e8m0 byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).to(dtype).to(device)
