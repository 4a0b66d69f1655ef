"""Hot slots: entries of a long sparse cache stay in host memory, and a device keeps those of each row that were wanted
latest (HiSparse, https://github.com/sgl-project/sglang/pull/24880). One layer; its indexer has chosen which entries of
a row are read next, and those that are not on the device take the place of what was wanted longest ago.

R rows, B hot slots of a row, M entries that a row can have, n rows of a step, k entries wanted by each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires

NONE = -1


@dataclass(frozen=True, slots=True)
class HotSlots:
    """``places`` [R, B + 1] int32: where hot slots lie on the device, the last one being for a row's newest entry,
    which is always there. ``entries`` [R, B] int32: what each holds, `NONE` for nothing. ``order`` [R, B] int16: slots,
    what was wanted longest ago first. ``slot_of`` [R, M] int16: the reverse of ``entries``. ``marks`` [R, M] int32,
    zeros between calls, and ``victims`` [R, B] int16: for solutions."""

    places: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor
    slot_of: torch.Tensor
    marks: torch.Tensor
    victims: torch.Tensor

    @classmethod
    def allocate(cls, places: torch.Tensor, most_entries: int) -> HotSlots:
        """For ``places`` [R, B + 1] int32 on their device, with nothing in them."""
        (rows, slots), device = places.shape, places.device
        hot = cls(
            places, torch.empty((rows, slots - 1), dtype=torch.int32, device=device),
            torch.empty((rows, slots - 1), dtype=torch.int16, device=device),
            torch.empty((rows, most_entries), dtype=torch.int16, device=device),
            torch.zeros((rows, most_entries), dtype=torch.int32, device=device),
            torch.zeros((rows, slots - 1), dtype=torch.int16, device=device),
        )
        hot.reset(slice(None), 0)
        return hot

    @property
    def num_slots(self) -> int:
        """B."""
        return self.order.shape[1]

    def reset(self, rows: int | slice, length: int) -> None:
        """A row begins: its first ``length`` entries, at most B of them, are in the slots of their numbers."""
        count = min(length, self.num_slots)
        numbers = torch.arange(self.num_slots, device=self.order.device)
        self.order[rows] = numbers.to(torch.int16)
        self.entries[rows] = torch.where(numbers < count, numbers, NONE).to(torch.int32)
        self.slot_of[rows] = NONE
        self.slot_of[rows, :count] = numbers[:count].to(torch.int16)


@dataclass(frozen=True, slots=True)
class EntryParts:
    """What an entry consists of: pairs of tensors [pages, entries of a page, bytes] uint8, alike in the last two dims,
    contiguous in the last. ``sources`` are in host memory, pinned for a GPU. ``table`` [pairs, 7] int64 on the device:
    addresses of source and target; in words the strides of their pages and of an entry; entries of a page; words of an
    entry. ``word``: bytes of a word, the largest power of two up to 8 that divides all of these."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    table: torch.Tensor
    word: int

    @classmethod
    def of(cls, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> EntryParts:
        """Of pairs of tensors."""
        rows, word = [], 8
        for source, target in zip(sources, targets, strict=True):
            assert source.shape[1:] == target.shape[1:] and source.stride()[1:] == target.stride()[1:]
            sizes = (source.stride(0), target.stride(0), source.stride(1), source.shape[2])
            word = math.gcd(word, source.data_ptr(), target.data_ptr(), *sizes)
            rows.append((source, target, sizes))
        table = [
            [s.data_ptr(), t.data_ptr(), sizes[0] // word, sizes[1] // word, sizes[2] // word, s.shape[1],
             sizes[3] // word]
            for s, t, sizes in rows
        ]
        return cls(sources, targets, torch.tensor(table, dtype=torch.int64).to(targets[0].device), word)


FIND_SWAPS = Operation("find_swaps kernel")
"""``find_swaps(hot: HotSlots, rows [n] int64, wanted [n, k] int32, lengths [n] int32, found [n, k] int32, loads [n, k]
int32)``: writes where each wanted entry is to be read, ``found``, and which entries must be copied there before,
``loads``, `NONE` for the others; changes ``hot`` accordingly. ``lengths`` are entries of each row, the newest included;
``wanted`` holds no entry twice, `NONE` at will, and k is at most B. Rows of a call differ.

A row with at most B entries has each in the slot of its number, and nothing changes. Otherwise the newest entry is in
the last place; wanted ones in slots stay; the others get, in their order, the slots that were wanted longest ago and
are not now. ``order`` is then: slots not wanted, as before; loaded ones; those that stayed, as before."""

LOAD_ENTRIES = Operation("load_entries kernel")
"""``load_entries(parts: EntryParts, origins [n, k] int64, found [n, k] int32, loads [n, k] int32)``: copies what
`FIND_SWAPS` asks for. Entry ``loads[i, j]`` comes from number ``origins[i, j]`` of the sources, counted over pages, and
goes to number ``found[i, j]`` of the targets."""

for _operation, _name in ((FIND_SWAPS, "find_swaps"), (LOAD_ENTRIES, "load_entries")):
    _operation.add("reference", f"headrace.kernels.hot_slots.reference:{_name}", doc="plain torch")
    _operation.add(
        "triton", f"headrace.kernels.hot_slots.triton:{_name}", supports=requires(device="cuda"), priority=10,
        doc="one launch"
    )
