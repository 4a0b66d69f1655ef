"""A product of many rows with what adapters add to gate and up, and the gated activation, in one kernel of own CUDA C++
on Hopper: sums of ranks are more inputs of the product (``csrc/cuda/gated_product.cu``, ADAPTED).

T rows, I inputs, F gated outputs, S slots, R ranks.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p

import torch

from headrace.kernels.cuda_source import describe_boxes
from headrace.kernels.linear import gated_product, hopper
from headrace.kernels.lora import LowRankBank, SlotRows
from headrace.kernels.lora.triton import shrink_owned

RANKS = 16
"""As in the source: of a product."""
LEAST_RUN = 16
"""Rows of a run at least, on average: each other adapter among 64 rows takes 1.5 us behind a tile's 52. Gate and up of
8,192 rows of Llama-3.1-8B take 2.82 ms with one adapter, 3.26 with eight in turns and 6.4 with 64, where an activation
behind the product makes it 3.15 (H200)."""


class _Added(ctypes.Structure):
    """``Added`` of the source."""

    _fields_ = (*((name, c_void_p) for name in ("sums", "owners", "ranks")), ("most_ranks", c_int))


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bank: LowRankBank, activation: str) -> bool:
    """Whether the kernel takes a weight [2F, I] that stacks gate and up, for which it is faster than several."""
    outputs = len(weight) // 2
    return (
        activation in gated_product.MACROS and x.dtype == weight.dtype == bank.b.dtype == torch.bfloat16
        and bank.ends == (outputs, 2 * outputs) and bank.most_ranks % RANKS == 0
        and gated_product.takes(x, outputs, bias) and hopper.is_describable(x, weight)
    )


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bank: LowRankBank, rows: SlotRows,
    activation: str,
) -> torch.Tensor | None:
    """``activation(gate) * up`` [T, F] of x [T, I], each with what adapters add and rounded as if stored; None where
    more kernels are as fast."""
    has_long_runs = 0 < LEAST_RUN * rows.num_runs <= rows.num_rows
    if not has_long_runs or not takes(x, weight, bias, bank, activation):
        return None
    kernel = gated_product.find_kernel(x.dtype, activation, x.device, is_adapted=True)
    if kernel is None:
        return None
    sums, owners = shrink_owned(x, bank, rows)
    added = _Added(sums.data_ptr(), owners.data_ptr(), bank.ranks.data_ptr(), bank.most_ranks)
    return gated_product.multiply(x, weight, kernel, describe_boxes(bank.b.flatten(0, 1), (RANKS, 64)), added)
