"""The operations of this package in plain torch: the oracle, row by row."""

from __future__ import annotations

import torch

from headrace.kernels.hot_slots import NONE, EntryParts, HotSlots, Loads


def find_swaps(
    hot: HotSlots, rows: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor, loads: Loads
) -> None:
    """See `headrace.kernels.hot_slots.FIND_SWAPS`."""
    found.fill_(NONE)
    num_slots = hot.num_slots
    for index, (row, length, asked) in enumerate(zip(map(int, rows), map(int, lengths), wanted, strict=True)):
        own, entries, order = (list(map(int, numbers)) for numbers in (asked, hot.entries[row], hot.order[row]))
        columns = [column for column, entry in enumerate(own) if entry != NONE]
        if length <= num_slots:
            slots = {column: own[column] for column in columns}
        else:
            slots, order = _swap(entries, order, own, length)
        loaded = [column for column in columns if entries[slots[column]] != own[column]]
        for number, column in enumerate(loaded):
            entries[slots[column]] = own[column]
            loads.entries[index, number] = own[column]
            loads.places[index, number] = row * (num_slots + 1) + slots[column]
        loads.counts[index] = len(loaded)
        for column in columns:
            found[index, column] = row * (num_slots + 1) + slots[column]
        hot.entries[row] = torch.tensor(entries, dtype=torch.int32)
        hot.order[row] = torch.tensor(order, dtype=torch.int16)
        hot.counts.add_(torch.tensor([len(columns), len(loaded)], device=hot.counts.device))


def _swap(entries: list[int], order: list[int], wanted: list[int], length: int) -> tuple[dict[int, int], list[int]]:
    """Of a row with more entries than slots: slots by column of ``wanted``, and the new order."""
    places = {entry: slot for slot, entry in enumerate(entries[:-1])}
    columns = {column: entry for column, entry in enumerate(wanted) if entry not in (NONE, length - 1)}
    hits = {places[entry] for entry in columns.values() if entry in places}
    victims = iter([slot for slot in order if slot not in hits])
    slots, taken = {}, []
    for column, entry in columns.items():
        if entry in places:
            slots[column] = places[entry]
        else:
            slots[column] = next(victims)
            taken.append(slots[column])
    slots |= {column: len(entries) - 1 for column, entry in enumerate(wanted) if entry == length - 1}
    return slots, [*victims, *taken, *(slot for slot in order if slot in hits)]


def load_entries(parts: EntryParts, page_table: torch.Tensor, loads: Loads) -> None:
    """See `headrace.kernels.hot_slots.LOAD_ENTRIES`."""
    for index, count in enumerate(map(int, loads.counts)):
        if not count:
            continue
        entries, places = loads.entries[index, :count].long(), loads.places[index, :count].long()
        for source, target in zip(parts.sources, parts.targets, strict=True):
            size = source.shape[1]
            pages = page_table[index, entries // size].long()
            target[places // size, places % size] = source[pages, entries % size].to(target.device)
