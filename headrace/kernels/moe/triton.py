"""Grouped products in which each program finds its expert itself, so that nothing waits for the row counts.

Rows are sorted by expert; X experts.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.kernels.moe.grouping import find_tile

LEAST_ROWS, MOST_ROWS = 16, 128
"""Rows of a tile; the tensor cores take no fewer."""


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, bias_ptr, ends_ptr, out_ptr, x_stride, num_outputs, num_inputs,
    X: tl.constexpr, BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    expert, first, last = find_tile(ends_ptr, tl.program_id(0), X, BLOCK_X, ROWS)
    if expert < X:
        row, column, inner = (
            first + tl.arange(0, ROWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        )
        x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + inner[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * num_outputs + column[None, :]) * num_inputs + inner[:, None]
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for done in range(0, num_inputs, INPUTS):
            is_inside = inner < num_inputs - done
            x = tl.load(x_at + done, mask=(row < last)[:, None] & is_inside[None, :], other=0.0)
            weight = tl.load(weight_at + done, mask=is_inside[:, None] & (column < num_outputs)[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(
                bias_ptr + expert * num_outputs + column, mask=column < num_outputs, other=0.0
            ).to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None].to(tl.int64) * num_outputs + column[None, :], total.to(out_ptr.dtype.element_ty),
            mask=(row < last)[:, None] & (column < num_outputs)[None, :]
        )


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """See `GROUPED_LINEAR`."""
    num_rows, (num_experts, outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    rows = min(MOST_ROWS, max(LEAST_ROWS, next_power_of_2(ceil_div(max(1, num_rows), num_experts))))
    tiles = min(num_rows, num_rows // rows + num_experts)
    block_outputs = 64 if x.dtype == torch.float32 or rows == LEAST_ROWS else 128
    if num_rows:
        _grouped_kernel[(tiles, ceil_div(outputs, block_outputs))](
            x, weight, x if bias is None else bias, ends, out, x.stride(0), outputs, inputs, X=num_experts,
            BLOCK_X=next_power_of_2(num_experts),
            HAS_BIAS=bias is not None, ROWS=rows, OUTPUTS=block_outputs, INPUTS=32 if x.dtype == torch.float32 else 64,
            num_warps=8 if rows == MOST_ROWS else 4, num_stages=4 if rows == LEAST_ROWS else 3,
        )
    return out
