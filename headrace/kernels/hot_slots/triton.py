"""One launch each: a program finds the swaps of a row, and several copy what each of its tokens lacks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.hot_slots import EntryParts, HotSlots, Loads

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
BUSY_PROGRAMS = 2048
"""Programs that copy at a time. Reading host memory takes about 2 us and 50 GB/s need 100 KB on their way, so most of
these wait."""
LEAST_COLUMNS = 512
"""Wanted entries of a token that kernels are compiled for, at least: few compilations serve steps of all lengths."""


# K, the entries that a token wants, grows with the longest request of a step where all are wanted. Slots of a layer
# begin at any address.
@triton.jit(
    do_not_specialize=["most_entries", "num_tokens", "K"], do_not_specialize_on_alignment=[
        "entries_ptr", "order_ptr", "rows_ptr", "wanted_ptr", "kv_lens_ptr", "found_ptr", "load_entries_ptr",
        "load_places_ptr",
    ]
)
def _find_swaps_kernel(
    entries_ptr, order_ptr, marks_ptr, victims_ptr, counts_ptr, rows_ptr, wanted_ptr, kv_lens_ptr, found_ptr,
    load_entries_ptr, load_places_ptr, load_counts_ptr, most_entries, num_tokens, K, RATIO: tl.constexpr,
    B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):
    # wanted, found, loads [n, K]; entries [R, B + 1]; order, victims [R, B]; marks [R, most_entries]
    begin = tl.program_id(0)
    row, kv_len = tl.load(rows_ptr + begin), tl.load(kv_lens_ptr + begin)
    last_row = tl.load(rows_ptr + begin - 1, mask=begin > 0, other=-1)
    last_len = tl.load(kv_lens_ptr + begin - 1, mask=begin > 0, other=0)
    if (last_row != row) | (last_len + 1 != kv_len):  # else the program of the row's first token does it
        end = begin + 1
        goes_on = begin >= 0
        while goes_on:
            is_token = end < num_tokens
            next_row = tl.load(rows_ptr + end, mask=is_token, other=-1)
            next_len = tl.load(kv_lens_ptr + end, mask=is_token, other=0)
            goes_on = is_token & (next_row == row) & (next_len == kv_len + end - begin)
            end += goes_on.to(tl.int32)
        length, written = (kv_len + end - begin - 1) // RATIO, tl.maximum(kv_len - 1, 0) // RATIO
        column, slot_number = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B)
        is_column, is_slot = column < K, slot_number < B
        entries_ptr += row * (B + 1)
        order_ptr += row * B
        victims_ptr += row * B
        marks_ptr += row * most_entries
        # what was written since, and of a row with few entries what is in another's place
        held = tl.load(entries_ptr + slot_number, mask=is_slot, other=-1)
        is_void = (held >= written) | ((length <= B) & (held != slot_number))
        newest = tl.load(entries_ptr + B)
        tl.debug_barrier()  # the newest has been read by all threads
        tl.store(entries_ptr + slot_number, tl.full((BLOCK_B,), -1, tl.int32), mask=is_slot & is_void)
        tl.store(entries_ptr + B, -1, mask=(newest >= written) | (length <= B))
        tl.debug_barrier()
        ordered = tl.load(order_ptr + slot_number, mask=is_slot, other=0).to(tl.int32)
        held = tl.load(entries_ptr + ordered, mask=is_slot, other=-1)
        is_hit = is_slot & (held < -1)  # none
        if length > B:
            # Marks: 1 for what is wanted, then 2 + its slot.
            for token in range(begin, end):
                entry = tl.load(wanted_ptr + token * K + column, mask=is_column, other=-1)
                is_old = (entry >= 0) & (entry != length - 1)
                tl.store(marks_ptr + entry, tl.full((BLOCK_K,), 1, tl.int16), mask=is_old)
            tl.debug_barrier()  # marks are seen by all threads
            is_hit = tl.load(marks_ptr + held, mask=is_slot & (held >= 0), other=0) > 0
            tl.debug_barrier()  # marks have been read by all threads
            tl.store(marks_ptr + held, (ordered + 2).to(tl.int16), mask=is_hit)
        is_victim = is_slot & (is_hit == 0)
        hit_rank = tl.cumsum(is_hit.to(tl.int32), 0) - 1
        victim_rank = tl.cumsum(is_victim.to(tl.int32), 0) - 1
        num_victims = tl.sum(is_victim.to(tl.int32), 0)
        if length > B:
            tl.store(victims_ptr + victim_rank, ordered.to(tl.int16), mask=is_victim)
        tl.debug_barrier()  # victims and marks are seen by all threads
        num_taken, num_wanted, num_loaded = num_victims * 0, num_victims * 0, num_victims * 0
        for token in range(begin, end):
            entry = tl.load(wanted_ptr + token * K + column, mask=is_column, other=-1)
            is_real = entry >= 0
            is_newest = is_real & (entry == length - 1) & (length > B)
            is_old = is_real & (is_newest == 0) & (length > B)
            # of at most B entries, each has the slot of its number
            mark = tl.load(marks_ptr + entry, mask=is_old, other=0).to(tl.int64)
            lacks = is_old & (mark == 1)
            lack_rank = num_taken + tl.cumsum(lacks.to(tl.int32), 0) - 1
            victim = tl.load(victims_ptr + lack_rank, mask=lacks, other=0).to(tl.int64)
            slot = tl.where(is_newest, B, tl.where(is_old, tl.where(lacks, victim, mark - 2), entry))
            is_missing = is_real & (tl.load(entries_ptr + slot, mask=is_real, other=-1) != entry)
            place = tl.where(is_real, row * (B + 1) + slot, -1)
            tl.debug_barrier()  # marks and entries have been read by all threads
            tl.store(marks_ptr + entry, (slot + 2).to(tl.int16), mask=lacks)
            tl.store(entries_ptr + slot, entry.to(tl.int32), mask=is_missing)
            tl.store(found_ptr + token * K + column, place, mask=is_column)
            # the newest last
            is_early = is_missing & (is_newest == 0)
            num_early = tl.sum(is_early.to(tl.int32), 0)
            number = token * K + tl.where(is_newest, num_early, tl.cumsum(is_early.to(tl.int32), 0) - 1)
            tl.store(load_entries_ptr + number, entry.to(tl.int32), mask=is_missing)
            tl.store(load_places_ptr + number, place.to(tl.int32), mask=is_missing)
            num_loads = tl.sum(is_missing.to(tl.int32), 0)
            tl.store(load_counts_ptr + token, num_loads)
            num_taken += tl.sum(lacks.to(tl.int32), 0)
            num_wanted += tl.sum(is_real.to(tl.int32), 0)
            num_loaded += num_loads
            tl.debug_barrier()  # marks and entries are seen by all threads
        if length > B:
            # not wanted, then loaded, then those that stayed
            is_taken = is_victim & (victim_rank < num_taken)
            target = tl.where(is_taken, num_victims - num_taken + victim_rank, victim_rank - num_taken)
            target = tl.where(is_hit, num_victims + hit_rank, target)
            tl.store(order_ptr + target, ordered.to(tl.int16), mask=is_slot)
            for token in range(begin, end):
                entry = tl.load(wanted_ptr + token * K + column, mask=is_column, other=-1)
                is_old = (entry >= 0) & (entry != length - 1)
                tl.store(marks_ptr + entry, tl.full((BLOCK_K,), 0, tl.int16), mask=is_old)
        tl.atomic_add(counts_ptr, num_wanted.to(tl.int64))
        tl.atomic_add(counts_ptr + 1, num_loaded.to(tl.int64))


@triton.jit(
    do_not_specialize=["table_width", "K"],
    do_not_specialize_on_alignment=["page_table_ptr", "load_entries_ptr", "load_places_ptr"],
)
def _load_entries_kernel(
    parts_ptr, page_table_ptr, load_entries_ptr, load_places_ptr, load_counts_ptr, table_width, K,
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
    hot: HotSlots, rows: torch.Tensor, wanted: torch.Tensor, kv_lens: torch.Tensor, found: torch.Tensor, loads: Loads
) -> None:
    """See `headrace.kernels.hot_slots.FIND_SWAPS`."""
    if not len(rows):
        return
    count, slots = wanted.shape[1], hot.num_slots
    _find_swaps_kernel[(len(rows),)](
        hot.entries, hot.order, hot.marks, hot.victims, hot.counts, rows, wanted, kv_lens, found, loads.entries,
        loads.places, loads.counts, hot.marks.shape[1], len(rows), count, RATIO=hot.ratio, B=slots,
        BLOCK_K=max(LEAST_COLUMNS, triton.next_power_of_2(count)), BLOCK_B=triton.next_power_of_2(slots), num_warps=8,
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
        parts.table, page_table, loads.entries, loads.places, loads.counts, page_table.stride(0), most,
        WORD=WORDS[parts.word], BLOCK=min(256, triton.next_power_of_2(widest)), num_warps=1,
    )
