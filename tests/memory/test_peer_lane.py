"""Pages between a device's pools and the region that is shared with a transfer agent."""

from __future__ import annotations

import pytest
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.step import Arrival, PageMove
from headrace.memory.paging import PageCopier
from headrace.memory.peer_lane import PeerLane
from headrace.memory.pools import build_pool
from headrace.memory.transfer.contract import Region

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device_name", DEVICES)
def test_a_new_region_ends_what_was_under_way_with_the_old_one(device_name: str):
    device = torch.device(device_name)
    pool = build_pool(CacheGroup(CacheSpec("full", 3, 8, 8, "float32"), [0, 1], 12), 16, device)
    copier = PageCopier([pool], device)
    for part in pool.parts:
        part.tensor.view(torch.uint8).fill_(7)
    lane, size = PeerLane(device), 4 * copier.page_bytes(0)
    lane.attach(copier)
    old, new = Region.create(size), Region.create(size)
    lane.map(old, 5)
    lane.start(PageMove(1, 0, "device", "peer", [3, 4], [0, 1], peer="5 0"))
    lane.map(new, 6)
    lane.start(PageMove(2, 0, "device", "peer", [3], [0], peer="5 0"))
    assert sorted(lane.poll(), key=lambda arrival: arrival.ticket) == [Arrival(1), Arrival(2, [0])]
    assert old.data[: size // 2].min() == 7 and new.data.max() == 0
    lane.close()
    assert lane.poll() == []
