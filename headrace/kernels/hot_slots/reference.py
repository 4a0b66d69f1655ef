"""The operations of this package in plain torch: the oracle, row by row."""

from __future__ import annotations

import torch

from headrace.kernels.hot_slots import NONE, EntryParts, HotSlots, Loads


def find_swaps(
    hot: HotSlots, rows: torch.Tensor, wanted: torch.Tensor, kv_lens: torch.Tensor, found: torch.Tensor, loads: Loads
) -> None:
    """See `headrace.kernels.hot_slots.FIND_SWAPS`."""
    found.fill_(NONE)
    owners, lengths, wants = list(map(int, rows)), list(map(int, kv_lens)), [list(map(int, own)) for own in wanted]
    begin = 0
    for end in range(1, len(owners) + 1):
        if end == len(owners) or (owners[end], lengths[end]) != (owners[begin], lengths[begin] + end - begin):
            row, tokens = owners[begin], range(begin, end)
            slots = _place(hot, row, lengths[begin], lengths[end - 1], [wants[token] for token in tokens])
            _load(hot, row, slots, {token: wants[token] for token in tokens}, found, loads)
            begin = end


def _place(hot: HotSlots, row: int, first_len: int, last_len: int, wanted: list[list[int]]) -> dict[int, int]:
    """Slots by entry, of all that tokens of a row want."""
    num_slots, length, written = hot.num_slots, last_len // hot.ratio, max(0, first_len - 1) // hot.ratio
    entries = list(map(int, hot.entries[row]))
    is_short = length <= num_slots
    for slot, entry in enumerate(entries):
        if entry >= written or (is_short and entry != slot):
            entries[slot] = NONE
    hot.entries[row] = torch.tensor(entries, dtype=torch.int32)
    union = [entry for entry in dict.fromkeys(entry for own in wanted for entry in own) if entry != NONE]
    if is_short:
        return {entry: entry for entry in union}
    slots, order = _swap(entries, list(map(int, hot.order[row])), union, length)
    hot.order[row] = torch.tensor(order, dtype=torch.int16)
    return slots


def _swap(entries: list[int], order: list[int], wanted: list[int], length: int) -> tuple[dict[int, int], list[int]]:
    """Of a row with more entries than slots: slots by entry of ``wanted``, and the new order."""
    places = {entry: slot for slot, entry in enumerate(entries[:-1])}
    old = [entry for entry in wanted if entry != length - 1]
    hits = {places[entry] for entry in old if entry in places}
    victims = iter([slot for slot in order if slot not in hits])
    taken = {entry: next(victims) for entry in old if entry not in places}
    slots = {entry: taken[entry] if entry in taken else places[entry] for entry in old} | {length - 1: len(entries) - 1}
    return slots, [*victims, *taken.values(), *(slot for slot in order if slot in hits)]


def _load(
    hot: HotSlots, row: int, slots: dict[int, int], wanted: dict[int, list[int]], found: torch.Tensor, loads: Loads
) -> None:
    """Write what a row's tokens find, and load what their slots do not hold."""
    entries = list(map(int, hot.entries[row]))
    begin = row * len(entries)
    for token, own in wanted.items():
        count = 0
        for column, entry in enumerate(own):
            if entry == NONE:
                continue
            found[token, column] = begin + slots[entry]
            if entries[slots[entry]] != entry:
                entries[slots[entry]] = entry
                loads.entries[token, count], loads.places[token, count] = entry, begin + slots[entry]
                count += 1
        loads.counts[token] = count
        num_wanted = sum(entry != NONE for entry in own)
        hot.counts.add_(torch.tensor([num_wanted, count], device=hot.counts.device))
    hot.entries[row] = torch.tensor(entries, dtype=torch.int32)


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
