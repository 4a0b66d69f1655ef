"""MXFP4 to plain floats by a table of byte values: the oracle, and fast enough for loading."""

from __future__ import annotations

import torch

from headrace.kernels.mxfp4 import BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `DEQUANTISE_MXFP4`."""
    half = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), dtype=dtype, device=codes.device)
    byte = torch.arange(256, device=codes.device)
    pairs = torch.stack((half[byte & 15], half[byte >> 4]), dim=-1)
    values = pairs[codes.int()].view(*scales.shape, BLOCK)
    factors = scales.contiguous().view(torch.float8_e8m0fnu).to(dtype)
    return values.mul_(factors.unsqueeze(-1)).flatten(-2)
