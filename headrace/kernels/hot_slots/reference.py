"""The operations of this package in plain torch: the oracle, row by row."""

from __future__ import annotations

import torch

from headrace.kernels.hot_slots import NONE, EntryParts, HotSlots


def find_swaps(
    hot: HotSlots, rows: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor,
    loads: torch.Tensor,
) -> None:
    """See `headrace.kernels.hot_slots.FIND_SWAPS`."""
    found.fill_(NONE)
    loads.fill_(NONE)
    for index in range(len(rows)):
        row, length = int(rows[index]), int(lengths[index])
        places, entries, slot_of = hot.places[row], hot.entries[row], hot.slot_of[row]
        if length <= hot.num_slots:
            is_real = wanted[index] >= 0
            found[index, is_real] = places[wanted[index, is_real].long()]
            continue
        columns = [j for j, entry in enumerate(map(int, wanted[index])) if entry not in (NONE, length - 1)]
        hits = {int(slot_of[int(wanted[index, j])]) for j in columns} - {NONE}
        order = [int(slot) for slot in hot.order[row]]
        victims = iter(slot for slot in order if slot not in hits)
        loaded = []
        for j in columns:
            entry = int(wanted[index, j])
            slot = int(slot_of[entry])
            if slot == NONE:
                slot = next(victims)
                if entries[slot] >= 0:
                    slot_of[int(entries[slot])] = NONE
                entries[slot], slot_of[entry] = entry, slot
                loads[index, j] = entry
                loaded.append(slot)
            found[index, j] = places[slot]
        found[index, wanted[index] == length - 1] = places[-1]
        new = [*victims, *loaded, *(slot for slot in order if slot in hits)]
        hot.order[row] = torch.tensor(new, dtype=torch.int16, device=hot.order.device)


def load_entries(
    parts: EntryParts, origins: torch.Tensor, found: torch.Tensor, loads: torch.Tensor
) -> None:
    """See `headrace.kernels.hot_slots.LOAD_ENTRIES`."""
    is_load = loads >= 0
    origin, place = origins[is_load].to("cpu"), found[is_load].long()
    for source, target in zip(parts.sources, parts.targets, strict=True):
        size = source.shape[1]
        target[place // size, place % size] = source[origin // size, origin % size].to(target.device)
