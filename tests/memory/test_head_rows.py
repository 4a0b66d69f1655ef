"""Pages cut by heads: whoever divides heads among so many ranks writes the same rows, and finds its own in them."""

from __future__ import annotations

import pytest
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.step import PageMove
from headrace.kernels.attention.reference import read_codes, write_codes
from headrace.memory.head_rows import HeadRows
from headrace.memory.paging import PageCopier
from headrace.memory.peer_lane import PeerLane
from headrace.memory.pools import PagePart, Pool, build_pool
from headrace.memory.transfer.contract import Region
from headrace.memory.transfer.device_region import DeviceRegion
from headrace.parallel.share import Share, share_kv_heads

CPU = torch.device("cpu")
SPECS = {
    "plain": CacheSpec("full", 6, 8, 8, "float32"), "odd bytes": CacheSpec("full", 5, 3, 3, "bfloat16"),
    "unlike values": CacheSpec("full", 4, 12, 4, "bfloat16"), "codes": CacheSpec("full", 4, 8, 8, "int8"),
    "latent": CacheSpec("mla", 1, 24, 16, "float32"), "few heads": CacheSpec("full", 2, 8, 8, "float32"),
}


def build_ranks(spec: CacheSpec, ranks: int) -> list[tuple[Pool, Share, bool]]:
    found = []
    for rank in range(ranks):
        share = share_kv_heads(spec.num_kv_heads, ranks, rank)
        leaves = rank == 0 or share_kv_heads(spec.num_kv_heads, ranks, rank - 1).stop <= share.start
        own = CacheSpec(spec.kind, share.length, spec.head_dim, spec.value_dim, spec.dtype)
        found.append((build_pool(CacheGroup(own, [0, 3, 4], 9), 16, CPU), share, leaves))
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By bytes: some are no numbers."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def heads_of(ranks: list[tuple[Pool, Share, bool]], pages: list[int]) -> list[torch.Tensor]:
    """By part, the pages with all heads."""
    found = []
    for number, part in enumerate(ranks[0][0].parts):
        if part.head_dim is None:
            for pool, _, _ in ranks:
                assert same(pool.parts[number].tensor[pages], part.tensor[pages]), "ranks differ"
            found.append(part.tensor[pages])
            continue
        whole = list(part.tensor.shape)
        whole[part.head_dim] = ranks[0][1].size
        joined = torch.zeros(whole, dtype=part.tensor.dtype)
        for pool, share, _ in ranks:
            joined.narrow(part.head_dim, share.start, share.length).copy_(pool.parts[number].tensor)
        found.append(joined[pages])
    return found


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (3, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_pages_travel_between_other_numbers_of_ranks(name: str, counts: tuple[int, int]):
    source, target = (build_ranks(SPECS[name], count) for count in counts)
    torch.manual_seed(0)
    whole = [torch.randint(0, 256, (9, 1 << 14), dtype=torch.uint8) for _ in source[0][0].parts]
    for pool, share, _ in source:
        for part, data in zip(pool.parts, whole, strict=True):
            shape = list(part.tensor.shape)
            if part.head_dim is not None:
                shape[part.head_dim] = share.size
            size = torch.Size(shape[1:]).numel() * part.tensor.element_size()
            full = data[:, :size].contiguous().view(part.tensor.dtype).view(shape)
            part.tensor.copy_(full if part.head_dim is None else full.narrow(part.head_dim, share.start, share.length))
    region, sizes = Region.create(1 << 20), set()
    for ranks, move in (
        (source, PageMove(1, 0, "device", "peer", [7, 2, 5], [0, 1, 2], peer="1 64")),
        (target, PageMove(2, 0, "peer", "device", [0, 1, 2], [1, 8, 3], peer="1 64")),
    ):
        for pool, share, leaves in ranks:
            lane = PeerLane(CPU, [share], [leaves])
            lane.attach(PageCopier([pool], CPU))
            lane.map(region, 1)
            lane.start(move)
            assert [arrival.failed for arrival in lane.poll()] == [[]]
            sizes.add(lane.page_bytes[0])
            lane.close()
    assert len(sizes) == 1, "rows of all ranks and peers have the same length"
    assert not region.data[:64].any() and not region.data[64 + 3 * sizes.pop() :].any()
    for sent, received in zip(heads_of(source, [7, 2, 5]), heads_of(target, [1, 8, 3]), strict=True):
        assert same(sent, received)
    for pool, _, _ in target:
        for part in pool.parts:
            assert not part.tensor[[0, 2, 4, 5, 6, 7]].view(torch.uint8).any(), "another page was written"
    region.close()


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_codes_of_a_head_are_those_that_attention_reads(page_size: int):
    k, v = torch.randn(2, 2 * page_size, 4, 8)
    pages, ranks = [1, 2], {}
    for count in (1, 2):
        ranks[count] = []
        for rank in range(count):
            share = share_kv_heads(4, count, rank)
            spec = CacheSpec("full", share.length, 8, 8, "int8")
            ranks[count].append((build_pool(CacheGroup(spec, [0, 1], 3), page_size, CPU), share))
    (whole, share), = ranks[1]
    *stored, scales = whole.layer(1)
    write_codes(tuple(stored), scales, torch.arange(page_size, 3 * page_size), k, v)
    heads, copier = HeadRows(whole.parts, share), PageCopier([whole], CPU)
    own, rows = (torch.zeros(2, size, dtype=torch.uint8) for size in (copier.page_bytes(0), heads.num_bytes))
    copier.gather(0, pages, own, [0, 1])
    heads.to_peers(own, rows)
    expected = read_codes(tuple(stored), scales, torch.tensor(pages))
    for pool, share in ranks[2]:
        copier = PageCopier([pool], CPU)
        own = torch.zeros(2, copier.page_bytes(0), dtype=torch.uint8)
        HeadRows(pool.parts, share).from_peers(own, rows)
        copier.scatter(0, pages, own, [0, 1])
        *stored, scales = pool.layer(1)
        for got, wanted in zip(read_codes(tuple(stored), scales, torch.tensor(pages)), expected, strict=True):
            assert torch.equal(got, wanted[:, share.start : share.stop])


def test_heads_that_cannot_be_told_apart_are_not_divided():
    part = PagePart(0, "state", torch.zeros(4, 16, 8))
    assert HeadRows([part], Share.whole(4)).is_plain
    with pytest.raises(ConfigError, match="serve it with one rank"):
        HeadRows([part], Share(4, 0, 2))


@pytest.mark.cuda
@pytest.mark.parametrize("memory", ["host", "device"])
def test_a_gpu_cuts_pages_as_a_cpu_does(memory: str):
    device, spec = torch.device("cuda:0"), SPECS["unlike values"]
    torch.cuda.init()
    pools = [build_pool(CacheGroup(spec, [0, 3, 4], 9), 16, where) for where in (CPU, device)]
    for there, here in zip(pools[1].parts, pools[0].parts, strict=True):
        there.tensor.normal_()
        here.tensor.copy_(there.tensor)
    expected, shared = Region.create(1 << 20), Region.create(1 << 20) if memory == "host" else DeviceRegion.create(
        1 << 20, 0
    )
    lanes = []
    for pool, region, where in ((pools[0], expected, CPU), (pools[1], shared, device)):
        lane = PeerLane(where)
        lane.attach(PageCopier([pool], where))
        lane.map(region, 1)
        lane.start(PageMove(1, 0, "device", "peer", [7, 2, 5], [0, 1, 2], peer="1 64"))
        lane.start(PageMove(2, 0, "peer", "device", [0, 1, 2], [1, 8, 3], peer="1 64"))
        lanes.append(lane)
    for lane in lanes:  # what comes from a peer is brought in a piece at a time, one at each poll
        arrived: list[int] = []
        for _ in range(4):
            torch.cuda.synchronize()
            arrived += [arrival.ticket for arrival in lane.poll()]
        assert arrived == [1, 2]
    size = 3 * lanes[0].page_bytes[0]
    found = torch.from_numpy(shared.data) if memory == "host" else torch.as_tensor(shared, device=device).cpu()
    assert torch.equal(found[64 : 64 + size], torch.from_numpy(expected.data)[64 : 64 + size])
    for there, here in zip(pools[1].parts, pools[0].parts, strict=True):
        assert same(there.tensor[1:].cpu(), here.tensor[1:])
    for lane in lanes:
        lane.close()
    shared.close()
    expected.close()
