"""Mixtures of experts by own C++ kernels: routing, and all experts in one call; by the reference until these are
loaded."""

from __future__ import annotations

from typing import Unpack

import torch

from headrace.kernels.moe import PackedStack, RouteShape, reference
from headrace.kernels.native import NATIVE
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.cpu import GATE_NUMBERS

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
"""Numbers of the scoring functions, as the native kernels take them."""


def route(
    logits: torch.Tensor, choice_bias: torch.Tensor | None, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ROUTE`."""
    ops, rows, top_k = NATIVE.find(), logits.shape[0], shape["top_k"]
    if ops is None:
        return reference.route(logits, choice_bias, **shape)
    ids, weights = (
        torch.empty((rows, top_k), dtype=dtype, device=logits.device) for dtype in (torch.int64, torch.float32)
    )
    groups = (shape["num_groups"], shape["top_groups"], shape["group_best"])
    ops.route(
        logits.float().contiguous(), choice_bias, ids, weights, SCORES[shape["score"]], shape["renormalise"],
        shape["scale"], *groups
    )
    return ids, weights


def packed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: PackedStack, down: PackedStack, gate: Gate
) -> torch.Tensor:
    """See `PACKED_EXPERTS`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.packed_experts(x, ids, weights, gate_up, down, gate)
    # experts are stacked along outputs: the number of experts is implied by down [X * D, F] and x [T, D]
    stacks = [(matrix.words, matrix.scales, matrix.mins, matrix.number, bias) for matrix, bias in (gate_up, down)]
    num_experts = down[0].out_features // x.shape[1]
    return ops.packed_experts(
        x.contiguous(), ids.contiguous(), weights.contiguous(), num_experts, *stacks[0], *stacks[1],
        GATE_NUMBERS[gate.kind], gate.limit, gate.alpha, gate.up_offset
    )
