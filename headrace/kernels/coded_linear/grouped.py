"""Block-diagonal products with weights in FP8 in Triton, for few rows: codes become operands of tensor cores in
registers, and each row of tiles reads the inputs of its own group alone.

T tokens, G groups, N outputs and K inputs of a group.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

OUTPUTS, INPUTS = 32, 128
"""Of a program, and those that it multiplies at a time, which have one scale for each output."""


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_kernel(
    x_ptr, codes_ptr, scales_ptr, out_ptr, num_tokens, x_token, x_group, N: tl.constexpr, K: tl.constexpr,
    ALL: tl.constexpr, SHARED: tl.constexpr, TABLE: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)  # of all groups' outputs; a program has one group's
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    at = tl.arange(0, INPUTS)
    x = x_ptr + tl.program_id(0) * OUTPUTS // N * x_group + token[:, None].to(tl.int64) * x_token + at[None, :]
    codes = codes_ptr + row[None, :].to(tl.int64) * K + at[:, None]
    table = scales_ptr + row // SHARED * TABLE
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    wait_for_previous(PDL)
    for first in range(0, K, INPUTS):
        weight = tl.load(codes + first, eviction_policy="evict_first").to(x_ptr.dtype.element_ty)
        own = tl.load(x + first, mask=(token < num_tokens)[:, None] & (at >= 0)[None, :], other=0.0)
        part = tl.dot(own, weight, input_precision="ieee")
        if TABLE > 1:
            part *= tl.load(table + first // INPUTS)[None, :]
        total += part
    if TABLE == 1:
        total *= tl.load(table)[None, :]
    place = out_ptr + token[:, None].to(tl.int64) * ALL + row[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(token < num_tokens)[:, None] & (row < ALL)[None, :])


def multiply(x: torch.Tensor, weight: DeviceCodes, *, pdl: bool = False) -> torch.Tensor:
    """See `GROUPED_CODED`."""
    (num_tokens, groups, inputs), outputs = x.shape, weight.out_features
    out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    tokens = min(64, max(16, next_power_of_2(num_tokens)))
    if num_tokens:
        _grouped_kernel[(outputs // OUTPUTS, ceil_div(num_tokens, tokens))](
            x, weight.codes, weight.scales, out, num_tokens, x.stride(0), x.stride(1), N=outputs // groups, K=inputs,
            ALL=outputs, SHARED=weight.rows, TABLE=weight.scales.shape[1], TOKENS=tokens, OUTPUTS=OUTPUTS,
            INPUTS=INPUTS, PDL=pdl, num_warps=4, num_stages=6 if tokens == 16 else 4, launch_pdl=pdl,
        )
    return out


multiply_pdl = partial(multiply, pdl=True)
