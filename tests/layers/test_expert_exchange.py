"""Dispatchers among ranks: whatever goes where, each token gets the sum of its experts."""

from __future__ import annotations

import pytest
import torch
from parallel.thread_group import on_all_ranks

from headrace.base.errors import ConfigError
from headrace.kernels.operation import KernelQuery
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.exchange import pack_tokens, unpack_tokens
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.moe.pairing import choose_pair, list_pairs
from headrace.layers.spec import MlpSpec, MoeSpec, RoutingSpec
from headrace.parallel.cut import cut_of
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group

CPU = torch.device("cpu")
WIDTH, NUM_EXPERTS, TOP_K = 16, 7, 3
SPEC = MoeSpec(RoutingSpec(NUM_EXPERTS, TOP_K, renormalise=True, bias=True), MlpSpec(16, bias=True), MlpSpec(8))


def fill(layer: MoeMlp) -> MoeMlp:
    """The same layer on every rank, of which each keeps its part."""
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        cut = cut_of(parameter)
        parameter.copy_(cut.keep(torch.randn(cut.full_shape, generator=generator) * 0.4))
    return layer


def batch_of(replica_tokens: list[int]) -> ForwardBatch:
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(nothing, nothing, [], replica_tokens=replica_tokens)


@pytest.mark.parametrize("dispatcher", ["all-gather", "all-to-all"])
@pytest.mark.parametrize("experts", ["reference", "grouped", "stored"])
@pytest.mark.parametrize("counts", [[5, 3], [0, 4], [1, 0, 6], [2, 9, 1, 1], [3]])
@pytest.mark.parametrize("ranks_each", [1, 2])
def test_each_token_gets_the_sum_of_its_experts(dispatcher: str, experts: str, counts: list[int], ranks_each: int):
    """Replicas with unequal loads, idle ones among them, of one rank and of two that have the same tokens."""
    size = len(counts) * ranks_each
    if size == 1 or size > NUM_EXPERTS:
        pytest.skip("needs several ranks, and an expert for each")
    whole = fill(MoeMlp(SPEC, WIDTH, Build(CPU, torch.float32, moe_experts="reference")))
    x = torch.randn(sum(counts), WIDTH, generator=torch.Generator().manual_seed(1))
    expected = whole(x).split(counts)

    def run(group: Group) -> list[torch.Tensor]:
        replica, rank = divmod(group.rank, ranks_each)
        tensor = Group()
        tensor.rank, tensor.size = rank, ranks_each
        build = Build(
            CPU, torch.float32, moe_experts=experts, tensor=tensor, experts=ExpertRanks(group, len(counts)),
            all2all_backend=dispatcher,
        )
        layer = fill(MoeMlp(SPEC, WIDTH, build))
        out = []
        for _ in range(2):  # what one call leaves behind does not disturb the next
            build.step.batch = batch_of(counts if len(counts) > 1 else [])
            mine = x.split(counts)[replica]
            out.append(layer.compute_share(mine) if len(mine) else layer.take_part() or mine)
        return out

    parts = on_all_ranks(size, run)
    for replica, rows in enumerate(expected):
        for turn in range(2):
            ranks = [parts[replica * ranks_each + rank][turn] for rank in range(ranks_each)]
            torch.testing.assert_close(torch.stack(ranks).sum(0), rows, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width", "top_k"), [(1, 7, 1), (4, 16, 3), (0, 5, 2), (3, 1, 5)])
def test_a_message_has_all_that_belongs_to_a_token(dtype: torch.dtype, num_tokens: int, width: int, top_k: int):
    tokens = ChosenTokens(
        torch.randn(num_tokens, width).to(dtype), torch.randint(-1, 99, (num_tokens, top_k)),
        torch.rand(num_tokens, top_k), 99,
    )
    packed = pack_tokens(tokens)
    assert packed.shape[1] % 16 == 0
    back = unpack_tokens(packed, tokens)
    assert torch.equal(back.hidden, tokens.hidden) and torch.equal(back.ids, tokens.ids)
    assert torch.equal(back.weights, tokens.weights) and back.num_experts == 99


def test_dispatchers_are_chosen_by_where_tokens_are():
    def query(**shape: int) -> KernelQuery:
        return KernelQuery("cpu", "float32", shape={"width": 16, "expert_width": 16, **shape})

    assert choose_pair(query(ranks=1))[0] == "none"
    assert choose_pair(query(ranks=2))[0] == "replicated"
    assert choose_pair(query(ranks=4, replicas=2))[0] == "all-gather"
    assert {dispatcher for dispatcher, _ in list_pairs(query(ranks=4, replicas=2))} == {"all-gather", "all-to-all"}
    with pytest.raises(ConfigError, match=r"needs the same tokens on all ranks.*all-gather \+ stored") as caught:
        choose_pair(query(ranks=4, replicas=2), dispatcher="replicated")
    assert caught.value.param == "all2all_backend"
    with pytest.raises(ConfigError, match=r"set enable_expert_parallel.*none \+ stored"):
        choose_pair(query(ranks=1), dispatcher="all-to-all")
    with pytest.raises(ConfigError, match=r"no MoE dispatcher 'deepep', only replicated, all-gather"):
        choose_pair(query(ranks=2), dispatcher="deepep")
