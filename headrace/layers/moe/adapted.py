"""Experts with low-rank additions, for the tokens whose adapter has some. T tokens, k choices, D hidden size, F expert
intermediate size, O outputs, I inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.lora import SlotRows
from headrace.kernels.moe.reference import gate_halves
from headrace.kernels.rowwise import Gate
from headrace.layers.moe.weights import ExpertWeights, StackedLinear
from headrace.layers.quantization.storage import plain_weight


def adapt_experts(
    experts: ExpertWeights, gate: Gate, x: torch.Tensor, choices: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
    rows: SlotRows,
) -> None:
    """Compute the rows of ``out`` [T, D] again whose adapter changes experts: the weighted sums for ``x`` [T, D] of
    ``choices``, ids [T, k] and weights [T, k]. An expert at a time; where no adapter does, at the cost of a look."""
    stacks = (experts.gate_up, experts.down)
    for slot, first, count in rows.segments:
        if any(stack.lora is not None and stack.lora.has_extras(slot) for stack in stacks):
            own = rows.order[first : first + count]
            ids, weights = (tensor.index_select(0, own) for tensor in choices)
            mixed = _run_experts(experts, gate, slot, x.index_select(0, own), ids, weights)
            out.index_copy_(0, own, mixed.to(out.dtype))


def _run_experts(
    experts: ExpertWeights, gate: Gate, slot: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        rows, choice = torch.where(ids == expert)
        hidden = gate_halves(_multiply(experts.gate_up, slot, expert, x.index_select(0, rows)), gate)
        out.index_add_(0, rows, _multiply(experts.down, slot, expert, hidden).float() * weights[rows, choice, None])
    return out


def _multiply(stack: StackedLinear, slot: int, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One expert's product [n, O] of ``x`` [n, I], with the adapter's additions."""
    weight = plain_weight(stack)
    if weight is not None:
        matrix = weight[expert]
    else:
        assert stack.stored is not None
        num_rows = stack.stored.shape[0] // stack.num_stacked
        ids = torch.arange(expert * num_rows, (expert + 1) * num_rows, device=x.device)
        matrix = stack.stored.rows(ids, x.dtype)
    out = F.linear(x, matrix, None if stack.own_bias is None else stack.own_bias[expert])
    assert stack.lora is not None
    for part in stack.lora.additions(slot, expert):
        assert part.a is not None and part.b is not None
        out[:, part.start : part.start + part.b.shape[1]] += (x.float() @ part.a.t() @ part.b).to(out.dtype)
    return out
