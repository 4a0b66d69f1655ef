"""One launch each: a program finds the swaps of a row, and one copies an entry."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.hot_slots import EntryParts, HotSlots

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["most_entries"])
def _find_swaps_kernel(
    places_ptr, entries_ptr, order_ptr, slot_of_ptr, marks_ptr, victims_ptr, rows_ptr, wanted_ptr, lengths_ptr,
    found_ptr, loads_ptr, most_entries, K: tl.constexpr, B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):
    # wanted, found, loads [n, K]; places [R, B + 1]; entries, order, victims [R, B]; slot_of, marks [R, most_entries]
    step = tl.program_id(0)
    row = tl.load(rows_ptr + step)
    length = tl.load(lengths_ptr + step)
    column, slot_number = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B)
    is_column, is_slot = column < K, slot_number < B
    entry = tl.load(wanted_ptr + step * K + column, mask=is_column, other=-1)
    is_real = entry >= 0
    places_ptr += row * (B + 1)
    if length <= B:
        found = tl.load(places_ptr + entry, mask=is_real, other=-1)
        tl.store(found_ptr + step * K + column, found, mask=is_column)
        tl.store(loads_ptr + step * K + column, tl.full((BLOCK_K,), -1, tl.int32), mask=is_column)
    else:
        entries_ptr += row * B
        order_ptr += row * B
        victims_ptr += row * B
        slot_of_ptr += row * most_entries
        marks_ptr += row * most_entries
        is_newest = is_real & (entry == length - 1)
        is_looked_up = is_real & (entry != length - 1)
        tl.store(marks_ptr + entry, tl.full((BLOCK_K,), 1, tl.int32), mask=is_looked_up)
        slot = tl.load(slot_of_ptr + entry, mask=is_looked_up, other=-1).to(tl.int32)
        is_missing = is_looked_up & (slot < 0)
        miss_rank = tl.cumsum(is_missing.to(tl.int32), 0) - 1
        num_missing = tl.sum(is_missing.to(tl.int32), 0)
        tl.debug_barrier()  # marks are seen by all threads
        ordered = tl.load(order_ptr + slot_number, mask=is_slot, other=0).to(tl.int32)
        held = tl.load(entries_ptr + ordered, mask=is_slot, other=-1)
        is_hit = is_slot & (held >= 0) & (tl.load(marks_ptr + held, mask=is_slot & (held >= 0), other=0) != 0)
        is_victim = is_slot & (is_hit == 0)
        hit_rank = tl.cumsum(is_hit.to(tl.int32), 0) - 1
        victim_rank = tl.cumsum(is_victim.to(tl.int32), 0) - 1
        num_victims = tl.sum(is_victim.to(tl.int32), 0)
        is_taken = is_victim & (victim_rank < num_missing)
        tl.store(victims_ptr + victim_rank, ordered.to(tl.int16), mask=is_taken)
        tl.store(slot_of_ptr + held, tl.full((BLOCK_B,), -1, tl.int16), mask=is_taken & (held >= 0))
        # not wanted, then loaded, then those that stayed
        target = tl.where(is_taken, num_victims - num_missing + victim_rank, victim_rank - num_missing)
        target = tl.where(is_hit, num_victims + hit_rank, target)
        tl.debug_barrier()  # the order has been read, and victims are seen by all threads
        tl.store(order_ptr + target, ordered.to(tl.int16), mask=is_slot)
        own = tl.load(victims_ptr + miss_rank, mask=is_missing, other=0).to(tl.int32)
        slot = tl.where(is_missing, own, slot)
        tl.store(slot_of_ptr + entry, slot.to(tl.int16), mask=is_missing)
        tl.store(entries_ptr + slot, entry, mask=is_missing)
        tl.store(marks_ptr + entry, tl.full((BLOCK_K,), 0, tl.int32), mask=is_looked_up)
        slot = tl.where(is_newest, B, slot)
        found = tl.load(places_ptr + slot, mask=is_real, other=-1)
        tl.store(found_ptr + step * K + column, found, mask=is_column)
        tl.store(loads_ptr + step * K + column, tl.where(is_missing, entry, -1), mask=is_column)


@triton.jit
def _load_entries_kernel(
    table_ptr, origins_ptr, found_ptr, loads_ptr, WORD: tl.constexpr, BLOCK: tl.constexpr,
):
    # table [pairs, 7]: addresses of source and target, their page strides, entry stride, entries of a page, words
    index, pair = tl.program_id(0), tl.program_id(1)
    if tl.load(loads_ptr + index) >= 0:
        table_ptr += pair * 7
        source = tl.load(table_ptr).to(tl.pointer_type(WORD))
        target = tl.load(table_ptr + 1).to(tl.pointer_type(WORD))
        size, num_words = tl.load(table_ptr + 5), tl.load(table_ptr + 6)
        stride = tl.load(table_ptr + 4)
        origin, place = tl.load(origins_ptr + index), tl.load(found_ptr + index).to(tl.int64)
        source += (origin // size) * tl.load(table_ptr + 2) + (origin % size) * stride
        target += (place // size) * tl.load(table_ptr + 3) + (place % size) * stride
        for begin in range(0, num_words, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            is_inside = word < num_words
            tl.store(target + word, tl.load(source + word, mask=is_inside), mask=is_inside)


def find_swaps(
    hot: HotSlots, rows: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor,
    loads: torch.Tensor,
) -> None:
    """See `headrace.kernels.hot_slots.FIND_SWAPS`."""
    if not len(rows):
        return
    count, slots = wanted.shape[1], hot.num_slots
    _find_swaps_kernel[(len(rows),)](
        hot.places, hot.entries, hot.order, hot.slot_of, hot.marks, hot.victims, rows, wanted, lengths, found, loads,
        hot.slot_of.shape[1], K=count, B=slots, BLOCK_K=triton.next_power_of_2(count),
        BLOCK_B=triton.next_power_of_2(slots), num_warps=8,
    )


def load_entries(
    parts: EntryParts, origins: torch.Tensor, found: torch.Tensor, loads: torch.Tensor
) -> None:
    """See `headrace.kernels.hot_slots.LOAD_ENTRIES`."""
    if not loads.numel():
        return
    widest = max(source.shape[2] for source in parts.sources) // parts.word
    _load_entries_kernel[(loads.numel(), len(parts.sources))](
        parts.table, origins, found, loads, WORD=WORDS[parts.word], BLOCK=min(256, triton.next_power_of_2(widest)),
        num_warps=1,
    )
