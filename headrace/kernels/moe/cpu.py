"""Mixtures of experts by the native library, from choices to sums in one call; by the reference while that is not there."""

from __future__ import annotations

import torch

from headrace.kernels.activation.cpu import NUMBERS
from headrace.kernels.moe import Gate, PackedStack, reference
from headrace.kernels.native import NATIVE


def packed_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: PackedStack, down: PackedStack, gate: Gate) -> torch.Tensor:
    """See `PACKED_EXPERTS`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.packed_experts(x, ids, weights, gate_up, down, gate)
    stacks = [(matrix.words, matrix.scales, matrix.mins, matrix.number, bias) for matrix, bias in (gate_up, down)]
    num_experts = down[0].out_width // x.shape[1]
    return ops.packed_experts(x.contiguous(), ids.contiguous(), weights.contiguous(), num_experts, *stacks[0], *stacks[1], NUMBERS[gate.kind], gate.limit, gate.alpha, gate.up_offset)
