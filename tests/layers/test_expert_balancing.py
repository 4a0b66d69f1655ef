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
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights, Mxfp4Linear
from headrace.layers.moe.routed import ExpertSlots, RoutedExperts
from headrace.layers.spec import MlpSpec, MoeSpec, RoutingSpec
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
            redundant_experts=redundant,
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
        build = Build(
            CPU, torch.float32, tensor=group, experts=ExpertRanks(group), redundant_experts=redundant,
        )
        with pytest.raises(ConfigError, match="set num_redundant_experts to 1 or 3") as caught:
            MoeMlp(SPEC, WIDTH, build)
        assert caught.value.param == "eplb_config"


CODED = MoeSpec(RoutingSpec(7, top_k=3), MlpSpec(32))


@pytest.mark.parametrize("dispatcher", ["all-gather", "all-to-all", "replicated"])
def test_experts_in_mxfp4_move(dispatcher: str):
    """The same sums of choices that drift, whole and on two ranks; the codes that end up in a place are an expert's."""
    num_replicas = 1 if dispatcher == "replicated" else 2
    generator = torch.Generator().manual_seed(1)
    steps = [
        (torch.randn(9, 64, generator=generator),
         (torch.rand(9, 7, generator=generator) * torch.arange(1, 8).roll(i // 8)).topk(3).indices)
        for i in range(40)
    ]
    weights = torch.rand(9, 3, generator=generator)

    def build_experts(build: Build) -> tuple[RoutedExperts, Mxfp4ExpertWeights]:
        own = Mxfp4ExpertWeights(build.experts.share(7), CODED.expert, 64, build)
        for i, linear in enumerate((own.gate_up, own.down)):
            linear.randomise(0.5, torch.Generator().manual_seed(i))
        return RoutedExperts(own, CODED, 64, build, width=32), own

    whole, everything = build_experts(Build(CPU, torch.float32))

    def run(group: Group) -> tuple[list[torch.Tensor], ExpertBalancer, Mxfp4ExpertWeights]:
        build = Build(
            CPU, torch.float32, experts=ExpertRanks(group, num_replicas), all2all_backend=dispatcher,
            redundant_experts=3,
        )
        experts, own = build_experts(build)
        options = BalancingOptions(step_interval=4, window_size=3, num_redundant_experts=3)
        balancer, out = ExpertBalancer([experts], build.experts, options), []
        for x, ids in steps:
            build.step.batch = batch_of([9, 9] if num_replicas > 1 else [])
            balancer.begin_step()
            out.append(experts(x, (ids, weights)))
        return out, balancer, own

    results = on_all_ranks(2, run)
    for i, (x, ids) in enumerate(steps):
        shares = torch.stack([out[i] for out, *_ in results])
        got = shares if num_replicas > 1 else shares.sum(0, keepdim=True)
        torch.testing.assert_close(got, whole(x, (ids, weights)).expand_as(got), atol=1e-4, rtol=1e-4)
    for rank, (_, balancer, own) in enumerate(results):
        assert balancer.stats.num_moved > 3
        placed = balancer._placements[0].on_rank(rank)
        assert len(placed) == 5 and any(count > 1 for count in balancer._slots[0].copies.tolist())
        for place, expert in enumerate(placed):
            for linear, oracle in ((own.gate_up, everything.gate_up), (own.down, everything.down)):
                if expert != NOBODY:
                    assert torch.equal(linear.codes[place], oracle.codes[expert])


def test_experts_in_the_form_of_kernels_move_in_it():
    """Codes are put in order before any expert moves, on every rank; large scales, which kernels keep otherwise, are
    refused."""
    parts = {"gate": 8, "up": 8}
    whole = Mxfp4Linear(Build(CPU, torch.float32), 4, 128, parts)
    whole.randomise(0.5, torch.Generator().manual_seed(3))
    plain = whole.codes.clone()
    whole.scales[2] += torch.arange(16, dtype=torch.uint8)[:, None] % 3
    scales = whole.scales.clone()
    whole.pack()
    assert not torch.equal(whole.codes, plain)

    def move(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        build = Build(CPU, torch.float32, experts=ExpertRanks(group), redundant_experts=2)
        own = build.experts.share(4)
        experts = Mxfp4ExpertWeights(own, MlpSpec(128), 128, build)
        linear = experts.gate_up = Mxfp4Linear(build, own, 128, parts)
        for kept in (experts.gate_up, experts.down):
            kept.is_for_kernels = True
        linear.codes[:2], linear.scales[:2] = plain[own.start : own.stop], scales[own.start : own.stop]
        experts.make_room()
        view = linear.pack()
        before, after = Placement((0, 1, NOBODY, 2, 3, NOBODY), 2), Placement((2, 1, 3, 2, 0, 3), 2)
        experts.exchange(group, after.moves_from(before))
        assert linear.pack().codes is view.codes, "kernels' view is of the same memory"
        return view.codes.unflatten(0, (3, -1)), view.scales.unflatten(0, (3, -1))

    for (codes, sizes), experts in zip(on_all_ranks(2, move), ((2, 1, 3), (2, 0, 3)), strict=True):
        assert torch.equal(codes, whole.codes[list(experts)]) and torch.equal(sizes, whole.scales[list(experts)])
    large = Mxfp4Linear(Build(CPU, torch.float32), 4, 128, parts)
    large.scales.fill_(129)
    large.is_for_kernels = True
    with pytest.raises(ConfigError, match="scales of 2 at most") as caught:
        large.make_room()
    assert caught.value.param == "enable_eplb"
