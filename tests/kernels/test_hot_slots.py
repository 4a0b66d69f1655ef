"""Hot slots: what is wanted is on the device, with the host's bytes, and what was wanted longest ago has gone."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.kernels.hot_slots import FIND_SWAPS, LOAD_ENTRIES, NONE, EntryParts, HotSlots
from headrace.models.deepseek_v4.packed_pools import PackedVectorPool

SLOTS, MOST, WANTED, PAGE = 24, 150, 10, 256
SOLUTIONS = [
    ("reference", "cpu"), pytest.param("triton", "cpu", marks=pytest.mark.interpreted),
    pytest.param("triton", "cuda", marks=pytest.mark.cuda),
]


class Row:
    """A row as its contract describes it, in lists."""

    def __init__(self, length: int):
        self.order = list(range(SLOTS))
        self.entries = [n if n < length else NONE for n in range(SLOTS)]
        self.length = length

    def want(self, wanted: list[int]) -> tuple[list[int], list[int]]:
        """The slot of each, and what is loaded."""
        if self.length <= SLOTS:
            return wanted, []
        stay = [s for s in self.order if self.entries[s] in wanted and self.entries[s] != NONE]
        stay = [s for s in stay if self.entries[s] != self.length - 1]
        go = [s for s in self.order if s not in stay]
        missing = [e for e in wanted if e not in (NONE, self.length - 1) and e not in [self.entries[s] for s in stay]]
        for entry, slot in zip(missing, go, strict=False):
            self.entries[slot] = entry
        self.order = go[len(missing) :] + go[: len(missing)] + stay
        slots = [SLOTS if e == self.length - 1 else NONE if e == NONE else self.entries.index(e) for e in wanted]
        return slots, missing


@pytest.mark.parametrize(("solution", "device"), SOLUTIONS)
def test_the_least_recently_wanted_give_way(solution: str, device: str):
    find, load, dice = FIND_SWAPS.load(solution), LOAD_ENTRIES.load(solution), random.Random(1)
    spec = CacheSpec("packed", 1, 512, 512, "uint8", compress_ratio=4)
    pools = [PackedVectorPool(CacheGroup(spec, [0], count), PAGE, torch.device(where)) for count, where in
             ((9, "cpu"), (4, device))]
    host = [part.pin_memory() if device == "cuda" else part for part in pools[0].layer(0)]
    for part in host:
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    parts = EntryParts.of(host, pools[1].layer(0))
    places = torch.randperm(4 * PAGE // 4, generator=torch.Generator().manual_seed(0))[: 3 * (SLOTS + 1)]
    hot = HotSlots.allocate(places.to(torch.int32).view(3, SLOTS + 1).to(device), MOST)
    origin = torch.randperm(9 * PAGE // 4, generator=torch.Generator().manual_seed(1))[: 3 * MOST].view(3, MOST)
    models = {}
    for row, length in ((0, 5), (2, SLOTS + 30)):
        hot.reset(row, length)
        models[row] = Row(length)
    everything = [part.clone() for part in pools[1].layer(0)]

    def bring(place: int, entry: torch.Tensor) -> None:
        """What the owner of the slots does beside the operations: the first entries, and each newest one."""
        size = parts.targets[0].shape[1]
        for source, target, whole in zip(host, pools[1].layer(0), everything, strict=True):
            target[place // size, place % size] = source[int(entry) // size, int(entry) % size].to(device)
            whole[place // size, place % size] = target[place // size, place % size]

    for row, length in ((0, 5), (2, SLOTS)):
        for entry in range(length):
            bring(int(hot.places[row, entry]), origin[row, entry])
    num_loads = 0
    for _ in range(40):
        rows = dice.sample([0, 2], dice.randrange(1, 3))
        wanted = torch.full((len(rows), WANTED), NONE, dtype=torch.int32)
        for index, row in enumerate(rows):
            model = models[row]
            model.length = min(MOST, model.length + dice.randrange(3))
            newest = SLOTS if model.length > SLOTS else model.length - 1
            if model.length <= SLOTS:  # it grows into its slots
                for entry in range(model.length):
                    bring(int(hot.places[row, entry]), origin[row, entry])
                hot.reset(row, model.length)
                models[row] = model = Row(model.length)
            else:
                bring(int(hot.places[row, newest]), origin[row, model.length - 1])
            near = dice.randrange(model.length)
            pool = [e for e in range(near - 12, near + 12) if 0 <= e < model.length] + [model.length - 1]
            chosen = dice.sample(sorted(set(pool)), min(len(set(pool)), dice.randrange(1, WANTED + 1)))
            for entry in chosen:
                wanted[index, dice.choice([c for c in range(WANTED) if wanted[index, c] == NONE])] = entry
        lengths = torch.tensor([models[row].length for row in rows], dtype=torch.int32, device=device)
        at = torch.tensor(rows, device=device)
        found, loads = (torch.full_like(wanted, 77).to(device) for _ in range(2))
        find(hot, at, wanted.to(device), lengths, found, loads)
        origins = torch.stack([origin[row][wanted[i].clamp(min=0).long()] for i, row in enumerate(rows)]).to(device)
        load(parts, origins, found, loads)
        for index, row in enumerate(rows):
            slots, missing = models[row].want(wanted[index].tolist())
            expected = [NONE if slot == NONE else int(hot.places[row, slot]) for slot in slots]
            assert found[index].tolist() == expected
            assert [entry for entry in loads[index].tolist() if entry != NONE] == missing
            assert hot.order[row].tolist() == models[row].order and hot.entries[row].tolist() == models[row].entries
            assert sorted(hot.order[row].tolist()) == list(range(SLOTS))
            num_loads += len(missing)
            for column, entry in enumerate(wanted[index].tolist()):
                if entry != NONE:
                    place, size = expected[column], parts.targets[0].shape[1]
                    for source, target, whole in zip(host, pools[1].layer(0), everything, strict=True):
                        bytes_there = target[place // size, place % size].cpu()
                        number = int(origin[row, entry])
                        assert torch.equal(bytes_there, source[number // size, number % size])
                        whole[place // size, place % size] = bytes_there.to(device)
        again = loads.clone()
        find(hot, at, wanted.to(device), lengths, found, again)
        assert (again == NONE).all(), "what was just loaded is there"
        for row, index in ((row, i) for i, row in enumerate(rows)):
            models[row].want(wanted[index].tolist())
        assert not hot.marks.any()
    for part, whole in zip(pools[1].layer(0), everything, strict=True):
        assert torch.equal(part, whole), "an entry beside those was written"
    assert num_loads > 50 and (hot.entries[1] == NONE).all()
