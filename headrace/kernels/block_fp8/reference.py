"""Block-scaled 8-bit floats to plain ones: the oracle, and fast enough for loading."""

from __future__ import annotations

import torch

from headrace.kernels.block_fp8 import BLOCK, GROUP

LARGEST = 448.0
"""Of e4m3."""
LEAST_AMAX = 1e-4


def dequantise_blocks(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `DEQUANTISE_BLOCKS`."""
    rows, columns = values.shape
    spread = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float().mul_(spread).to(dtype)


def quantise_groups(x: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """See `QUANTISE_GROUPS`."""
    groups = x.float().unflatten(-1, (-1, group))
    exponents = ceil_power_of_two(groups.abs().amax(-1).clamp_(min=LEAST_AMAX) / LARGEST)
    return (groups / power_of_two(exponents).unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), exponents


def ceil_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The exponent byte (e8m0) of the least power of two that is not below positive float32 ``x``."""
    bits = x.contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes to float32; byte 0 is the least, 2 ** -127."""
    return torch.where(exponents == 0, 2.0**-127, (exponents.int() << 23).view(torch.float32))
