"""The benchmark of ways to a decode engine's host memory: which bytes it moves, that it sees wrong ones, and shares."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hosted_transfers import Rig, Times, divide, list_groups, tell

CPU = torch.device("cpu")


def test_the_bytes_are_those_of_flash():
    four, wide = list_groups(28, [4, 128], 8)
    assert four.layers == list(range(2, 28, 2)) and wide.layers == list(range(3, 28, 2))
    rig = Rig([four, wide], 128, (CPU, CPU))
    # 584 bytes of an entry, 32 and 1 of them in a page, which is a whole number of 576 bytes
    assert rig.source.widths == [13 * 33 * 576, 13 * 2 * 576]


@pytest.mark.parametrize("way", ["direct", "staged", "region"])
def test_all_ways_bring_the_same_pages_and_wrong_ones_are_seen(way: str):
    rig = Rig(list_groups(5, [4, 128], 6), 128, (CPU, CPU))
    for begin, end in divide(5, 2):
        for copy in rig.ways.values():
            copy(begin, end)
    rig.check(5)
    with pytest.raises(ValueError, match=r"'direct', 'staged', 'region'"):
        rig.check(5)  # it has forgotten them
    for name, copy in rig.ways.items():
        copy(0, 5 if name != way else 4)
    with pytest.raises(ValueError, match=rf"by the ways \['{way}'\]"):
        rig.check(5)


def test_chunks_cover_all_pages():
    assert divide(5, 2) == [(0, 2), (2, 4), (4, 5)] and divide(64, 64) == [(0, 64)]


def test_shares_are_of_the_computation():
    direct, staged = Times(0.004, 0.005, 0.001), Times(0.013, 0.014, 0.0028)
    line = tell("staged", staged, direct, 26_000_000, 0.9)
    assert "whole  13.000 ms (  2.0 GB/s)" in line and "the last  2.800" in line
    assert "beyond direct +9.000 ms (+1.000 % of 0.90 s) and, by the last chunk, +1.800 ms (+0.200 %)" in line
    assert "beyond" not in tell("direct", direct, direct, 26_000_000, 0.9)
