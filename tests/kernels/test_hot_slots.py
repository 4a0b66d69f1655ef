"""Hot slots: what is wanted is on the device, with the host's bytes, and what was wanted longest ago has gone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.kernels.hot_slots import FIND_SWAPS, LOAD_ENTRIES, NONE, EntryParts, HotSlots, Loads
from headrace.models.deepseek_v4.packed_pools import PackedVectorPool

SLOTS, MOST, WANTED, PAGE, ROWS, LAYER = 24, 150, 10, 256, 3, 1
RATIO, MOST_TOKENS = 4, 2
SOLUTIONS = [
    ("reference", "cpu"), pytest.param("triton", "cpu", marks=pytest.mark.interpreted),
    pytest.param("triton", "cuda", marks=pytest.mark.cuda),
]
SPEC = CacheSpec("packed", 1, 512, 512, "uint8", compress_ratio=4)


def count_tokens(lengths: list[int]) -> torch.Tensor:
    """Of rows with so many entries, whose last token is part of the next one."""
    return torch.tensor([RATIO * length + 1 for length in lengths], dtype=torch.int32)


class Row:
    """A row as its contract describes it, in lists."""

    def __init__(self) -> None:
        self.order, self.entries = list(range(SLOTS)), [NONE] * (SLOTS + 1)

    def want(self, wanted: list[int], length: int, written: int) -> tuple[list[int], list[int]]:
        """The slot of each, and what is loaded."""
        for slot, entry in enumerate(self.entries):
            if entry >= written or (length <= SLOTS and slot != entry):
                self.entries[slot] = NONE
        if length <= SLOTS:
            slots = list(wanted)
        else:
            old = [e for e in wanted if e not in (NONE, length - 1)]
            stay = [s for s in self.order if self.entries[s] in old]
            go = [s for s in self.order if s not in stay]
            lacking = [e for e in old if e not in [self.entries[s] for s in stay]]
            place = {self.entries[s]: s for s in stay} | dict(zip(lacking, go, strict=False)) | {length - 1: SLOTS}
            self.order = go[len(lacking) :] + go[: len(lacking)] + stay
            slots = [NONE if e == NONE else place[e] for e in wanted]
        missing = [e for e, s in zip(wanted, slots, strict=True) if e != NONE and self.entries[s] != e]
        for entry, slot in zip(wanted, slots, strict=True):
            if entry != NONE:
                self.entries[slot] = entry
        return slots, missing


class Rig:
    """Packed pages on the host, slots on a device, and a model of each row."""

    def __init__(self, solution: str, device: str):
        self.find, self.load = FIND_SWAPS.load(solution), LOAD_ENTRIES.load(solution)
        self.device = device
        per_page, slots = PAGE // 4, ROWS * (SLOTS + 1)
        num_host, num_device = 3 * ROWS + 1, -(-slots // per_page) + 1
        host, own = (
            PackedVectorPool(CacheGroup(SPEC, [0], count), PAGE, torch.device(where)).layer(0)
            for count, where in ((num_host, "cpu"), (num_device, device))
        )
        self.host = [part.pin_memory() if device == "cuda" else part for part in host]
        for part in self.host:
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
        self.slots, self.parts = own, EntryParts.of(self.host, own)
        self.hot = HotSlots.allocate(2, ROWS, SLOTS, MOST, torch.device(device), ratio=RATIO).layer(LAYER)
        pages = torch.randperm(num_host - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = pages[: 3 * ROWS].view(ROWS, 3).to(torch.int32)
        self.models = [Row() for _ in range(ROWS)]
        self.expected = [part.cpu().clone() for part in own]
        self.num_wanted = self.num_loads = 0

    def clear(self, row: int) -> None:
        """The row begins anew."""
        self.hot.entries[row], self.hot.order[row] = NONE, torch.arange(SLOTS, dtype=torch.int16)
        self.models[row] = Row()

    def step(self, lengths: dict[int, int], wanted: dict[int, list[int]]) -> None:
        """One call for some rows, compared with their models; then the same call, which copies nothing."""
        rows = list(lengths)
        at, own = torch.tensor(rows, device=self.device), torch.tensor([wanted[r] for r in rows], device=self.device)
        sizes = count_tokens([lengths[r] for r in rows]).to(self.device)
        found, loads = torch.full_like(own, 77), Loads.allocate(len(rows), WANTED, at.device)
        self.find(self.hot, at, own, sizes, found, loads)
        self.load(self.parts, self.tables[rows].to(self.device), loads)
        for index, row in enumerate(rows):
            slots, missing = self.models[row].want(wanted[row], lengths[row], lengths[row])
            places = [NONE if slot == NONE else row * (SLOTS + 1) + slot for slot in slots]
            assert found[index].tolist() == places
            assert sorted(loads.entries[index, : loads.counts[index]].tolist()) == sorted(missing)
            assert self.hot.order[row].tolist() == self.models[row].order
            assert sorted(self.hot.order[row].tolist()) == list(range(SLOTS)), "a permutation"
            assert self.hot.entries[row].tolist() == self.models[row].entries
            for entry, place in zip(wanted[row], places, strict=True):
                if entry != NONE:
                    self._expect(row, entry, place)
            self.num_wanted += sum(entry != NONE for entry in wanted[row])
            self.num_loads += len(missing)
        assert not self.hot.marks.any()
        before = self.hot.counts.clone()
        assert before.tolist() == [self.num_wanted, self.num_loads]
        self.find(self.hot, at, own, sizes, found, loads)
        assert not loads.counts.any(), "what was just loaded is there"
        self.hot.counts.copy_(before)
        for row in rows:
            self.models[row].want(wanted[row], lengths[row], lengths[row])

    def _expect(self, row: int, entry: int, place: int) -> None:
        """The entry's bytes are in that slot."""
        for source, target, whole in zip(self.host, self.slots, self.expected, strict=True):
            size = source.shape[1]
            there = target[place // size, place % size].cpu()
            assert torch.equal(there, source[int(self.tables[row, entry // size]), entry % size])
            whole[place // size, place % size] = there

    def check(self) -> None:
        """No other slot was written."""
        for part, whole in zip(self.slots, self.expected, strict=True):
            assert torch.equal(part.cpu(), whole), "an entry beside those was written"


def draw_steps(dice: random.Random) -> Iterator[tuple[dict[int, int], dict[int, list[int]]]]:
    """Rows 0 and 2 in turns or together: one begins short and grows beyond its slots, one begins long."""
    lengths = {0: 3, 2: SLOTS + 30}
    for _ in range(60):
        rows = dice.sample([0, 2], dice.randrange(1, 3))
        wanted = {}
        for row in rows:
            lengths[row] = min(MOST, lengths[row] + dice.randrange(3))
            near = dice.randrange(lengths[row])
            pool = sorted({*(e for e in range(near - 12, near + 12) if 0 <= e < lengths[row]), lengths[row] - 1})
            chosen = dice.sample(pool, min(len(pool), dice.randrange(WANTED + 1)))
            wanted[row] = dice.sample(chosen + [NONE] * (WANTED - len(chosen)), WANTED)
        yield {row: lengths[row] for row in rows}, wanted


@pytest.mark.parametrize(("solution", "device"), SOLUTIONS)
def test_the_least_recently_wanted_give_way(solution: str, device: str):
    rig = Rig(solution, device)
    for number, (lengths, wanted) in enumerate(draw_steps(random.Random(1))):
        rig.step(lengths, wanted)
        if number == 40:
            rig.clear(2)
    rig.check()
    assert rig.num_loads > 50 and (rig.hot.entries[1] == NONE).all(), "row 1 was never in a step"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_wants(data: st.DataObject):
    """Rows begin, grow and begin again at will."""
    rig, lengths = Rig("reference", "cpu"), [1] * ROWS
    for _ in range(data.draw(st.integers(1, 12))):
        rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1))
        wanted = {}
        for row in rows:
            if data.draw(st.integers(0, 9)) == 0:
                rig.clear(row)
                lengths[row] = 1
            lengths[row] = min(MOST, lengths[row] + data.draw(st.integers(0, 40)))
            own = data.draw(st.lists(st.integers(0, lengths[row] - 1), unique=True, max_size=WANTED))
            wanted[row] = data.draw(st.permutations(own + [NONE] * (WANTED - len(own))))
        rig.step({row: lengths[row] for row in rows}, wanted)
    rig.check()


@pytest.mark.parametrize(("solution", "device"), SOLUTIONS)
def test_padding_of_a_step(solution: str, device: str):
    """Programs of the null row, all alike, and rows that want nothing."""
    rig = Rig(solution, device)
    rows = torch.tensor([2, 2, 0], device=device)
    wanted = torch.tensor([[0, NONE], [0, NONE], [NONE, NONE]], device=device)
    found, loads = torch.full_like(wanted, 77), Loads.allocate(3, 2, rows.device)
    rig.find(rig.hot, rows, wanted, count_tokens([1, 1, MOST]).to(device), found, loads)
    assert found.tolist() == [[2 * (SLOTS + 1), NONE], [2 * (SLOTS + 1), NONE], [NONE, NONE]]
    assert loads.counts[0] + loads.counts[1] >= 1 and loads.counts[2] == 0
    assert rig.hot.order[0].tolist() == list(range(SLOTS)) and (rig.hot.entries[0] == NONE).all()


@pytest.mark.parametrize(("solution", "device"), SOLUTIONS)
@pytest.mark.parametrize("num_entries", [1, 63, 64, 65, 130])
def test_any_number_of_entries_is_copied_and_no_neighbour(num_entries: int, solution: str, device: str):
    """For two tokens, to pages of the device that others share, as many as no tile, page or block holds evenly."""
    rig, dice = Rig(solution, device), random.Random(num_entries)
    per_page = rig.host[0].shape[1]
    num_slots = rig.slots[0].shape[0] * per_page
    entries = [dice.sample(range(3 * per_page), num_entries) for _ in range(2)]
    places = dice.sample(range(num_slots), min(num_slots, 2 * num_entries))
    counts = [num_entries, min(num_entries, len(places) - num_entries)]
    loads = Loads.allocate(2, 3 * per_page, torch.device(device))
    for token, begin in enumerate((0, num_entries)):
        own = places[begin : begin + counts[token]]
        loads.entries[token, : len(own)] = torch.tensor(entries[token][: len(own)], dtype=torch.int32)
        loads.places[token, : len(own)] = torch.tensor(own, dtype=torch.int32)
        loads.counts[token] = len(own)
        for entry, place in zip(entries[token], own, strict=False):
            for source, whole in zip(rig.host, rig.expected, strict=True):
                page = int(rig.tables[token, entry // per_page])
                whole[place // per_page, place % per_page] = source[page, entry % per_page]
    rig.load(rig.parts, rig.tables[:2].to(device), loads)
    rig.check()


class Drafted:
    """One row whose tokens are rewritten behind wrong drafts, and what each of its entries holds by now."""

    def __init__(self, rig: Rig, row: int, tokens: int):
        self.rig, self.row, self.tokens = rig, row, tokens

    def write(self, begin: int, end: int) -> None:
        """The tokens ``[begin, end)`` are computed: entries that end with one of them get new contents."""
        for entry in range((begin + RATIO - 1) // RATIO - (begin % RATIO > 0), end // RATIO):
            page = int(self.rig.tables[self.row, entry // self.rig.host[0].shape[1]])
            for part in self.rig.host:
                place = part[page, entry % part.shape[1]]
                place.copy_(torch.randint(0, 256, place.shape, dtype=torch.uint8))

    def inputs(self, dice: random.Random, num_tokens: int) -> tuple[list[int], list[int], list[list[int]]]:
        """Of the next step, with ``num_tokens`` - 1 drafts: for each token the row, its length, and what is wanted."""
        self.write(self.tokens, self.tokens + num_tokens)
        lens = [self.tokens + 1 + number for number in range(num_tokens)]
        wants = []
        for length in lens:
            visible = length // RATIO
            near = dice.randrange(max(1, visible))
            pool = sorted({*(e for e in range(near - 12, near + 12) if 0 <= e < visible), *range(visible)[-2:]})
            chosen = dice.sample(pool, min(len(pool), dice.randrange(WANTED + 1)))
            wants.append(dice.sample(chosen + [NONE] * (WANTED - len(chosen)), WANTED))
        return [self.row] * num_tokens, lens, wants


def check_drafts(rig: Rig, dice: random.Random, num_steps: int) -> None:
    """Each token finds the host's bytes of all that it wants, while those of the others are there too."""
    rows = [Drafted(rig, 0, 3), Drafted(rig, 2, RATIO * (SLOTS - 4))]
    for _ in range(num_steps):
        batch: list[tuple[Drafted, int]] = [(own, dice.randint(1, MOST_TOKENS)) for own in rows]
        at, lens, wants = (list(chain(*part)) for part in zip(*(o.inputs(dice, n) for o, n in batch), strict=True))
        at, lens, wants = [*at, 1, 1], [*lens, 1, 1], [*wants, *[[NONE] * WANTED] * 2]  # padding
        own = torch.tensor(wants, device=rig.device)
        found, loads = torch.full_like(own, 77), Loads.allocate(len(at), WANTED, own.device)
        orders = rig.hot.order.tolist()
        rig.find(
            rig.hot, torch.tensor(at, device=own.device), own,
            torch.tensor(lens, dtype=torch.int32, device=own.device), found, loads
        )
        rig.load(rig.parts, rig.tables[at].to(own.device), loads)
        for token, row in enumerate(at):
            for entry, place in zip(wants[token], found[token].tolist(), strict=True):
                assert (entry == NONE) == (place == NONE)
                if entry != NONE:
                    assert row * (SLOTS + 1) <= place < (row + 1) * (SLOTS + 1)
                    rig._expect(row, entry, place)
        for drafted, num_tokens in batch:
            row, length = drafted.row, (drafted.tokens + num_tokens) // RATIO
            assert sorted(rig.hot.order[row].tolist()) == list(range(SLOTS)), "a permutation"
            union = {e for token, r in enumerate(at) if r == row for e in wants[token] if e not in (NONE, length - 1)}
            order, held = rig.hot.order[row].tolist(), rig.hot.entries[row].tolist()
            if length <= SLOTS:
                assert order == orders[row]
            else:
                last = len(union)
                assert {held[slot] for slot in order[SLOTS - last :]} == union, "wanted ones are the latest"
                others = order[: SLOTS - last]
                assert others == [slot for slot in orders[row] if slot in others], "and the rest as before"
            assert len({entry for entry in held[:-1] if entry != NONE}) == sum(entry != NONE for entry in held[:-1])
            accepted = dice.randint(1, num_tokens)
            drafted.tokens = min(RATIO * MOST - MOST_TOKENS, drafted.tokens + accepted)
        assert not rig.hot.marks.any()


@pytest.mark.parametrize(("solution", "device"), [
    SOLUTIONS[0], pytest.param("triton", "cpu", marks=[pytest.mark.interpreted, pytest.mark.slow]), SOLUTIONS[2]
])
def test_what_wrong_drafts_left_is_never_found(solution: str, device: str):
    """Beside the slots' limit too, from which a row may go back. The interpreted kernels agree with the reference,
    below."""
    rig = Rig(solution, device)
    check_drafts(rig, random.Random(7), 150)
    assert rig.hot.counts[1] < rig.hot.counts[0]


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_drafts_in_any_order(dice: random.Random):
    check_drafts(Rig("reference", "cpu"), dice, 40)


@pytest.mark.interpreted
def test_solutions_agree_on_drafts():
    """To the last slot."""
    rigs = [Rig(solution, "cpu") for solution in ("reference", "triton")]
    for rig in rigs:
        torch.manual_seed(0)
        check_drafts(rig, random.Random(3), 60)
    first, second = (rig.hot for rig in rigs)
    assert torch.equal(first.order, second.order) and torch.equal(first.counts, second.counts)
    for row in (0, 2):
        assert first.entries[row].tolist() == second.entries[row].tolist()
