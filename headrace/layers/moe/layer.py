"""`MoeMlp`: router, experts and shared MLP. How tokens travel and experts compute is chosen in `pairing`.

T tokens, D hidden size, X experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from headrace.kernels.moe import LINEAR_ROUTE, NORM_ROUTE, ROUTE, RouteShape
from headrace.kernels.operation import choose_fused
from headrace.layers.build import Build
from headrace.layers.linear import FloatLinear, Linear
from headrace.layers.mlp import GatedMlp, describe_gate
from headrace.layers.moe.adapted import adapt_experts
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.pairing import pair_experts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.norm import RmsNorm
from headrace.layers.quantization.storage import count_elements, plain_weight
from headrace.layers.residual import Branch, Norm, Residual, join_rows
from headrace.layers.spec import MoeSpec, RoutingSpec
from headrace.parallel.group import Group
from headrace.parallel.placement import Placement
from headrace.parallel.share import Share

Choices = tuple[torch.Tensor, torch.Tensor]
"""Ids [T, k] int64 and weights [T, k] float32 of chosen experts."""


class Router(nn.Module):
    """``x [T, D] -> (ids [T, k] int64, weights [T, k] float32)``; see `RoutingSpec`."""

    def __init__(self, spec: RoutingSpec, hidden_size: int, build: Build):
        super().__init__()
        self.logits = (
            FloatLinear(build, hidden_size, spec.num_experts, bias=spec.bias) if spec.in_float32  # as the reference
            else Linear(build, hidden_size, spec.num_experts, bias=spec.bias, is_storable=False)
        )
        build = build.in_float32() if spec.in_float32 else build
        self.choice_bias = build.in_float32().parameter(spec.num_experts) if spec.choice_bias else None
        self.shape: RouteShape = {
            "top_k": spec.top_k, "score": spec.score, "renormalise": spec.renormalise, "scale": spec.scale,
            "num_groups": spec.num_groups, "top_groups": spec.top_groups, "group_best": spec.group_best,
        }
        query = build.query(num_experts=spec.num_experts, top_k=spec.top_k, num_groups=spec.num_groups)
        self._route = partial(ROUTE.choose(query), **self.shape)
        self._norm_route, self._linear_route = (
            None if spec.in_float32 else choose_fused(operation, query) for operation in (NORM_ROUTE, LINEAR_ROUTE)
        )

    def forward(self, x: torch.Tensor) -> Choices:
        weight = plain_weight(self.logits)
        if self._linear_route is not None and weight is not None and self.logits.lora is None:
            fused: Choices | None = self._linear_route(x, weight, self.logits.bias, self.choice_bias, **self.shape)
            if fused is not None:
                return fused
        return self._route(self.logits(x), self.choice_bias)

    def add(self, norm: Norm, residual: Residual) -> tuple[torch.Tensor, Choices]:
        """As `Norm.add`, and what the router chooses for that; both in one kernel where there is one for it, which does
        not add up what ranks have."""
        pending, weight = residual.pending, plain_weight(self.logits)
        if (
            self._norm_route is not None and isinstance(norm, RmsNorm) and pending is not None and weight is not None
            and residual.group is None and residual.addition is None and self.logits.lora is None
        ):
            fused = self._norm_route(
                pending, residual.stream, norm.weights, weight, self.logits.bias, self.choice_bias, **self.shape
            )
            if fused is not None:
                residual.pending = None
                x, residual.stream, ids, weights = fused
                return x, (ids, weights)
        x = norm.add(residual)
        return x, self(x)


class ExpertSlots(nn.Module):
    """Where the experts of a layer are, and how often each was chosen. On the device, changed in place, so that
    captured steps read what is true now. P slots of all ranks, C copies. ``table`` [X, C]: the slots of each expert,
    repeated up to the most copies that there may be; ``copies`` [X]; ``load`` [X]: choices since it was last set to
    zero."""

    def __init__(self, num_experts: int, placement: Placement, device: torch.device):
        super().__init__()
        most = min(placement.num_ranks, 1 + len(placement.slots) - num_experts)
        self.num_slots = len(placement.slots)
        self.table, self.copies, self.load = (
            nn.Buffer(torch.zeros(shape, dtype=torch.int64, device=device), persistent=False)
            for shape in ((num_experts, most), (num_experts,), (num_experts,))
        )
        self.assign(placement)

    def assign(self, placement: Placement) -> None:
        """Experts are there now."""
        by_expert, most = placement.find_slots(), self.table.shape[1]
        slots = [by_expert[expert] for expert in range(len(self.table))]
        self.table.copy_(torch.tensor([(own * most)[:most] for own in slots]))
        self.copies.copy_(torch.tensor([len(own) for own in slots]))

    def route(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of chosen experts [T, k]; tokens take the copies of an expert in turns. Counts them."""
        chosen = ids.flatten()
        self.load.index_add_(0, chosen, torch.ones_like(chosen))
        turns = torch.arange(len(ids), device=ids.device).unsqueeze(1) % self.copies[ids]
        return self.table[ids, turns]


class MoeMlp(Branch):
    """``x [T, D] -> [T, D]``: the weighted sum of each token's experts, plus the shared MLP's output if it has one.

    The ranks of ``build.tensor`` have a part of each expert and of the shared MLP. With several ranks in
    ``build.experts`` each of those has some experts whole. What a rank computes is a partial sum over ``build.tensor``.
    """

    takes_slices = True

    def __init__(self, spec: MoeSpec, hidden_size: int, build: Build):
        super().__init__()
        routing = spec.routing
        self.num_experts, self.gate, self.dtype = routing.num_experts, describe_gate(spec.expert), build.dtype
        self.router = Router(routing, hidden_size, build)
        group = build.tensor
        self.group = None if group.is_single else group
        experts, size = Share.whole(routing.num_experts), Share.whole(spec.expert.intermediate_size)
        if build.experts.is_single:
            size = group.share(size.size, "intermediate dims of experts")
        else:
            experts = build.experts.share(experts.size)
        self.is_divided = self.group is not None or not build.experts.is_single
        self.experts = ExpertWeights(experts, spec.expert, hidden_size, build, size=size)
        self.shared = None if spec.shared is None else GatedMlp(spec.shared, hidden_size, build)
        self.shared_gate = Linear(build, hidden_size, 1, is_storable=False) if spec.shared_gate else None
        query = build.query(
            width=hidden_size, expert_width=size.length, num_experts=experts.length, top_k=routing.top_k,
            ranks=build.experts.group.size, replicas=build.experts.num_replicas, moves=int(build.moves_experts),
        )
        self._run_experts = pair_experts(self.experts, spec.expert, build, query)
        self._num_replicas = build.experts.num_replicas
        self.slots: ExpertSlots | None = None  # where experts are, if they move
        self._step, self._has_banks = build.step, build.adapters is not None
        self._num_slots = self.num_experts
        self._nothing = torch.empty(0, hidden_size, dtype=build.dtype, device=build.device)

    @property
    def is_capturable(self) -> bool:
        """Whether steps with this layer may be recorded in CUDA graphs."""
        return self._run_experts.is_capturable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.compute_share(x)
        return out if self.group is None else self.group.all_reduce(out)

    def add(self, norm: Norm, residual: Residual) -> None:
        slices = residual.slices
        xs, choices = zip(*(self.router.add(norm, rows) for rows in slices), strict=True)
        ids, weights = (join_rows(parts) for parts in zip(*choices, strict=True))
        # all rows at once: an expert's matrices are read once, and its rows fill tiles better
        out = self._run(join_rows(xs), (ids, weights))
        for rows, part in zip(slices, residual.rows_of(out), strict=True):
            rows.pending = part
            rows.group = None if self.group is None else self.group.begin_sum(part)

    def spread(self, placement: Placement) -> None:
        """Have places for copies of experts, and count what is chosen. Once, when the weights are loaded."""
        for stack in (self.experts.gate_up, self.experts.down):
            stack.make_room(placement.slots_each)
        self._num_slots = len(placement.slots)
        self.slots = ExpertSlots(self.num_experts, placement, self._nothing.device)

    def rearrange(self, placement: Placement, moves: Sequence[tuple[int, int]], group: Group) -> None:
        """Move experts between ranks; see `Placement.moves_from`. All ranks at the same step."""
        assert self.slots is not None, "spread comes first"
        self.experts.exchange(group, moves, placement.slots_each)
        self.slots.assign(placement)

    def count_idle(self) -> int:
        """Parameters of this rank's experts that a token does not choose, on average."""
        size, top_k = count_elements(self.experts), self.router.shape["top_k"]
        return size - size * top_k // self.num_experts

    def take_part(self) -> None:
        """Compute other replicas' tokens in a step in which this one has none. Does nothing where none come here."""
        if self._num_replicas == 1:
            return
        ids = torch.empty(0, self.router.shape["top_k"], dtype=torch.int64, device=self._nothing.device)
        self._run_experts(ChosenTokens(self._nothing, ids, ids.float(), self._num_slots))

    def compute_share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the output."""
        return self._run(x, self.router(x))

    def _run(self, x: torch.Tensor, choices: Choices) -> torch.Tensor:
        ids, weights = choices
        if self.slots is not None:
            ids = self.slots.route(ids)
        out = self._run_experts(ChosenTokens(x, ids, weights, self._num_slots))
        if self._has_banks and (rows := self._step.batch.adapters) is not None:
            adapt_experts(self.experts, self.gate, x, (ids, weights), out, rows)
        if self.shared is None:
            return out
        shared = self.shared.compute_share(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return out.add_(shared)  # experts return memory of their own
