"""Experts that move between ranks while tokens come: what they compute stays the same."""

from __future__ import annotations

import pytest
import torch
from layers.test_expert_exchange import CPU, NUM_EXPERTS, SPEC, TOP_K, WIDTH, batch_of, fill
from parallel.thread_group import on_all_ranks

from headrace.base.errors import ConfigError
from headrace.base.parallel import BalancingOptions
from headrace.layers.build import Build
from headrace.layers.moe.balancing import ExpertBalancer, find_balancer
from headrace.layers.moe.layer import ExpertSlots, MoeMlp
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group
from headrace.parallel.placement import NOBODY, Placement


@pytest.mark.parametrize("dispatcher", ["all-gather", "all-to-all", "replicated"])
@pytest.mark.parametrize(("size", "redundant"), [(2, 1), (2, 3), (3, 2), (7, 7)])
def test_tokens_get_the_same_sums_wherever_experts_are(dispatcher: str, size: int, redundant: int):
    num_replicas = 1 if dispatcher == "replicated" else size
    whole = fill(MoeMlp(SPEC, WIDTH, Build(CPU, torch.float32, moe_experts="reference")))
    generator = torch.Generator().manual_seed(1)
    steps = [  # drifting, so that other experts are busy later
        torch.randn(num_replicas, 9, WIDTH, generator=generator) + torch.randn(WIDTH, generator=generator) * (i // 8)
        for i in range(40)
    ]

    def run(group: Group) -> tuple[list[torch.Tensor], ExpertBalancer]:
        tensor = Group()
        if num_replicas == 1:
            tensor.rank, tensor.size = group.rank, group.size
        build = Build(
            CPU, torch.float32, tensor=tensor, experts=ExpertRanks(group, num_replicas), all2all_backend=dispatcher,
            moves_experts=True,
        )
        layer = fill(MoeMlp(SPEC, WIDTH, build))
        options = BalancingOptions(step_interval=4, window_size=3, num_redundant_experts=redundant)
        balancer = find_balancer(torch.nn.ModuleList([layer]), build.experts, options)
        out = []
        for x in steps:
            build.step.batch = batch_of([9] * num_replicas if num_replicas > 1 else [])
            balancer.begin_step()
            out.append(layer.compute_share(x[group.rank % num_replicas]))
        return out, balancer

    results = on_all_ranks(size, run)
    for i, x in enumerate(steps):
        shares = torch.stack([out[i] for out, _ in results])
        got = shares if num_replicas > 1 else shares.sum(0, keepdim=True)
        torch.testing.assert_close(got, whole(x.flatten(0, 1)).view(x.shape), atol=1e-4, rtol=1e-4)
    balancers = [balancer for _, balancer in results]
    assert len({balancer._placements[0] for balancer in balancers}) == 1
    stats = [balancer.stats for balancer in balancers]
    assert stats.count(stats[0]) == size and stats[0].num_moved > 0 and 0 < stats[0].balancedness <= 1
    # ten windows of three steps, the last of which is not looked at: 9 tokens, 3 choices each, of every replica
    assert sum(stats[0].tokens_by_rank) == pytest.approx(num_replicas * 9 * TOP_K * 3 * 10, abs=80)


def test_copies_take_turns_and_all_is_counted():
    slots = ExpertSlots(3, Placement((0, 1, NOBODY, 2, 1, NOBODY), 2), CPU)
    ids = torch.tensor([[1, 0], [1, 2], [1, 0], [1, 2]])
    assert slots.route(ids).tolist() == [[1, 0], [4, 3], [1, 0], [4, 3]]
    assert slots.load.tolist() == [2, 4, 2]
    slots.assign(Placement((0, 1, NOBODY, 2, NOBODY, NOBODY), 2))
    assert slots.route(ids).tolist() == [[1, 0], [1, 3], [1, 0], [1, 3]]
    assert slots.load.tolist() == [4, 8, 4]


def test_what_cannot_be_balanced_is_explained():
    ranks = ExpertRanks()
    layer = MoeMlp(SPEC, WIDTH, Build(CPU, torch.float32))
    with pytest.raises(ConfigError, match="is on one rank"):
        find_balancer(torch.nn.ModuleList([layer]), ranks, BalancingOptions())
    group = Group()
    group.size = 2
    with pytest.raises(ConfigError, match="no experts that ranks can divide"):
        find_balancer(torch.nn.Linear(2, 2), ExpertRanks(group), BalancingOptions())
    for redundant in (0, 2, NUM_EXPERTS + 2):
        with pytest.raises(ConfigError, match="set num_redundant_experts to 1 or 3") as caught:
            ExpertBalancer([layer], ExpertRanks(group), BalancingOptions(num_redundant_experts=redundant))
        assert caught.value.param == "eplb_config"
