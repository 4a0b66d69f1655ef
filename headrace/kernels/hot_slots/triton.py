"""One launch each: a program finds the swaps of a row, and several copy what it lacks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.hot_slots import EntryParts, HotSlots, Loads

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
BUSY_PROGRAMS = 2048
"""Programs that copy at a time. Reading host memory takes about 2 us and 50 GB/s need 100 KB on their way, so most of
these wait."""


@triton.jit(do_not_specialize=["most_entries"])
def _find_swaps_kernel(
    entries_ptr, order_ptr, marks_ptr, victims_ptr, counts_ptr, rows_ptr, wanted_ptr, lengths_ptr, found_ptr,
    load_entries_ptr, load_places_ptr, load_counts_ptr, most_entries, K: tl.constexpr, B: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):
    # wanted, found, loads [n, K]; entries [R, B + 1]; order, victims [R, B]; marks [R, most_entries]
    step = tl.program_id(0)
    row = tl.load(rows_ptr + step)
    length = tl.load(lengths_ptr + step)
    column, slot_number = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B)
    is_column, is_slot = column < K, slot_number < B
    wanted_ptr += step * K
    found_ptr += step * K
    entries_ptr += row * (B + 1)
    entry = tl.load(wanted_ptr + column, mask=is_column, other=-1)
    is_real = entry >= 0
    is_newest = is_real & (entry == length - 1) & (length > B)
    is_looked_up = is_real & (is_newest == 0)
    slot = tl.where(is_newest, B, entry)
    if length > B:
        order_ptr += row * B
        victims_ptr += row * B
        marks_ptr += row * most_entries
        # A mark is the column that wants an entry, from 1 on; ``found`` takes the slots of those that stay meanwhile.
        tl.store(marks_ptr + entry, (column + 1).to(tl.int16), mask=is_looked_up)
        tl.store(found_ptr + column, tl.full((BLOCK_K,), -1, tl.int64), mask=is_column)
        tl.debug_barrier()  # marks are seen by all threads
        ordered = tl.load(order_ptr + slot_number, mask=is_slot, other=0).to(tl.int32)
        held = tl.load(entries_ptr + ordered, mask=is_slot, other=-1)
        mark = tl.load(marks_ptr + held, mask=is_slot & (held >= 0), other=0).to(tl.int32)
        is_hit = mark > 0
        is_victim = is_slot & (is_hit == 0)
        tl.store(found_ptr + mark - 1, ordered.to(tl.int64), mask=is_hit)
        hit_rank = tl.cumsum(is_hit.to(tl.int32), 0) - 1
        victim_rank = tl.cumsum(is_victim.to(tl.int32), 0) - 1
        num_victims = tl.sum(is_victim.to(tl.int32), 0)
        num_missing = tl.sum(is_looked_up.to(tl.int32), 0) - tl.sum(is_hit.to(tl.int32), 0)
        is_taken = is_victim & (victim_rank < num_missing)
        tl.store(victims_ptr + victim_rank, ordered.to(tl.int16), mask=is_taken)
        # not wanted, then loaded, then those that stayed
        target = tl.where(is_taken, num_victims - num_missing + victim_rank, victim_rank - num_missing)
        target = tl.where(is_hit, num_victims + hit_rank, target)
        tl.debug_barrier()  # the order and the marks have been read; victims and hits are seen by all threads
        tl.store(order_ptr + target, ordered.to(tl.int16), mask=is_slot)
        tl.store(marks_ptr + entry, tl.full((BLOCK_K,), 0, tl.int16), mask=is_looked_up)
        slot = tl.where(is_looked_up, tl.load(found_ptr + column, mask=is_looked_up, other=-1), slot)
        lacks = is_looked_up & (slot < 0)
        lack_rank = tl.cumsum(lacks.to(tl.int32), 0) - 1
        slot = tl.where(lacks, tl.load(victims_ptr + lack_rank, mask=lacks, other=0).to(tl.int64), slot)
    # The slots of those that stay hold what is wanted, all others do not. Of at most B entries, slots may be empty.
    is_missing = is_real & (tl.load(entries_ptr + slot, mask=is_real, other=-1) != entry)
    place = tl.where(is_real, row * (B + 1) + slot, -1)
    tl.debug_barrier()  # slots of those that stay have been read from ``found``
    tl.store(found_ptr + column, place, mask=is_column)
    tl.store(entries_ptr + slot, entry.to(tl.int32), mask=is_missing)
    # the newest last
    is_old = is_missing & (is_newest == 0)
    num_old = tl.sum(is_old.to(tl.int32), 0)
    number = step * K + tl.where(is_newest, num_old, tl.cumsum(is_old.to(tl.int32), 0) - 1)
    tl.store(load_entries_ptr + number, entry.to(tl.int32), mask=is_missing)
    tl.store(load_places_ptr + number, place.to(tl.int32), mask=is_missing)
    num_loads = tl.sum(is_missing.to(tl.int32), 0)
    tl.store(load_counts_ptr + step, num_loads)
    tl.atomic_add(counts_ptr, tl.sum(is_real.to(tl.int32), 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 1, num_loads.to(tl.int64))


@triton.jit(do_not_specialize=["table_width"])
def _load_entries_kernel(
    parts_ptr, page_table_ptr, load_entries_ptr, load_places_ptr, load_counts_ptr, table_width, K: tl.constexpr,
    WORD: tl.constexpr, BLOCK: tl.constexpr,
):
    # parts [pairs, 7]: addresses of source and target, their page strides, entry stride, entries of a page, words
    step, first, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(load_counts_ptr + step)
    parts_ptr += pair * 7
    source = tl.load(parts_ptr).to(tl.pointer_type(WORD))
    target = tl.load(parts_ptr + 1).to(tl.pointer_type(WORD))
    source_page, target_page, stride = tl.load(parts_ptr + 2), tl.load(parts_ptr + 3), tl.load(parts_ptr + 4)
    size, num_words = tl.load(parts_ptr + 5), tl.load(parts_ptr + 6)
    for number in range(first, count, tl.num_programs(1)):
        entry = tl.load(load_entries_ptr + step * K + number).to(tl.int64)
        place = tl.load(load_places_ptr + step * K + number).to(tl.int64)
        page = tl.load(page_table_ptr + step * table_width + entry // size).to(tl.int64)
        origin = source + page * source_page + (entry % size) * stride
        there = target + (place // size) * target_page + (place % size) * stride
        for begin in range(0, num_words, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            is_inside = word < num_words
            tl.store(there + word, tl.load(origin + word, mask=is_inside), mask=is_inside)


def find_swaps(
    hot: HotSlots, rows: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor, loads: Loads
) -> None:
    """See `headrace.kernels.hot_slots.FIND_SWAPS`."""
    if not len(rows):
        return
    count, slots = wanted.shape[1], hot.num_slots
    _find_swaps_kernel[(len(rows),)](
        hot.entries, hot.order, hot.marks, hot.victims, hot.counts, rows, wanted, lengths, found, loads.entries,
        loads.places, loads.counts, hot.marks.shape[1], K=count, B=slots, BLOCK_K=triton.next_power_of_2(count),
        BLOCK_B=triton.next_power_of_2(slots), num_warps=8,
    )


def load_entries(parts: EntryParts, page_table: torch.Tensor, loads: Loads) -> None:
    """See `headrace.kernels.hot_slots.LOAD_ENTRIES`."""
    rows, most = loads.entries.shape
    if not rows:
        return
    assert page_table.stride(1) == 1
    widest = max(source.shape[2] for source in parts.sources) // parts.word
    programs = max(1, min(most, BUSY_PROGRAMS // rows))
    _load_entries_kernel[(rows, programs, len(parts.sources))](
        parts.table, page_table, loads.entries, loads.places, loads.counts, page_table.stride(0), K=most,
        WORD=WORDS[parts.word], BLOCK=min(256, triton.next_power_of_2(widest)), num_warps=1,
    )
