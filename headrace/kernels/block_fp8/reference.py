"""Block-scaled 8-bit floats to plain ones: the oracle, and fast enough for loading."""

from __future__ import annotations

import torch

from headrace.kernels.block_fp8 import BLOCK


def dequantise_blocks(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `DEQUANTISE_BLOCKS`."""
    rows, columns = values.shape
    spread = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float().mul_(spread).to(dtype)
