"""Index tensors of steps in Triton, a kernel each: where plain torch takes some ten for each cache group.

R requests, W pages of a row of the page table.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

REQUESTS = 64
"""Requests of a program of the kernels that write a number for each."""
LISTED = 1024
"""Slots of a program that lists them."""
GROWING: dict[str, list[str]] = {
    "do_not_specialize": ["count", "table_width", "pages"], "do_not_specialize_on_alignment": ["table_ptr"],
}
"""Parameters that vary with requests, their lengths and cache groups: one compilation for all of their values, so that
the start's is that of any step."""


@triton.jit
def _find_slot(table_ptr, request, number, table_width, pages, is_there, S: tl.constexpr):
    """See `slots.find_slots`."""
    page = tl.maximum(tl.minimum(number // S, pages - 1), 0)
    return tl.load(table_ptr + request * table_width + page, mask=is_there, other=0).to(tl.int64) * S + number % S


@triton.jit(
    do_not_specialize=GROWING["do_not_specialize"][1:],
    do_not_specialize_on_alignment=GROWING["do_not_specialize_on_alignment"],
)
def _windows_kernel(
    table_ptr, kv_lens_ptr, numbers_ptr, counts_ptr, table_width, pages, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    kv_len = tl.load(kv_lens_ptr + request)
    position = tl.maximum(kv_len - 1 - at, 0)
    slot = _find_slot(table_ptr, request, position, table_width, pages, at < WINDOW, S)
    tl.store(numbers_ptr + request * WINDOW + at, slot, mask=at < WINDOW)
    tl.store(counts_ptr + request, tl.minimum(kv_len, WINDOW).to(tl.int64))


def decode_windows(
    page_table: torch.Tensor, kv_lens: torch.Tensor, *, window: int, per_page: int, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `DECODE_WINDOWS`."""
    count, pages = page_table.shape
    numbers = torch.empty((count, window), dtype=torch.int64, device=kv_lens.device)
    counts = torch.empty(count, dtype=torch.int64, device=kv_lens.device)
    assert page_table.stride(1) == 1
    if count:
        _windows_kernel[(count,)](
            page_table, kv_lens, numbers, counts, page_table.stride(0), pages, WINDOW=window,
            BLOCK=next_power_of_2(window), S=per_page, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )
    return numbers, counts


@triton.jit(do_not_specialize=["count"])
def _entries_kernel(
    kv_lens_ptr, requests_ptr, visible_ptr, count, RATIO: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    kv_len = tl.load(kv_lens_ptr + request, mask=request < count, other=0)
    tl.store(requests_ptr + request, request.to(tl.int64), mask=request < count)
    tl.store(visible_ptr + request, (kv_len // RATIO).to(tl.int64), mask=request < count)


def decode_entries(kv_lens: torch.Tensor, *, ratio: int, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See `DECODE_ENTRIES`."""
    count = len(kv_lens)
    requests, visible = (torch.empty(count, dtype=torch.int64, device=kv_lens.device) for _ in range(2))
    if count:
        _entries_kernel[(ceil_div(count, REQUESTS),)](
            kv_lens, requests, visible, count, RATIO=ratio, BLOCK=REQUESTS, PDL=pdl, num_warps=1, launch_pdl=pdl
        )
    return requests, visible


@triton.jit(**GROWING)
def _state_kernel(
    table_ptr, kv_lens_ptr, requests_ptr, windows_ptr, rows_ptr, count, table_width, pages, RATIO: tl.constexpr,
    TOKENS: tl.constexpr, RING: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_there = request < count
    wait_for_previous(PDL)
    kv_len = tl.load(kv_lens_ptr + request, mask=is_there, other=1)
    position = tl.maximum(kv_len - 1, 0)  # padding has no tokens
    row = _find_slot(
        table_ptr, request, position // TOKENS * RING + position % RING, table_width, pages, is_there, S
    )
    tl.store(requests_ptr + request, request, mask=is_there)
    tl.store(windows_ptr + request, tl.where(kv_len % RATIO == 0, kv_len // RATIO - 1, -1).to(tl.int64), mask=is_there)
    tl.store(rows_ptr + request, row, mask=is_there)


def decode_state(
    page_table: torch.Tensor, kv_lens: torch.Tensor, *, ratio: int, block: int, ring: int, per_page: int,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `DECODE_STATE`."""
    count, pages = page_table.shape
    requests, windows, rows = (torch.empty(count, dtype=torch.int64, device=kv_lens.device) for _ in range(3))
    assert page_table.stride(1) == 1
    if count:
        _state_kernel[(ceil_div(count, REQUESTS),)](
            page_table, kv_lens, requests, windows, rows, count, page_table.stride(0), pages, RATIO=ratio, TOKENS=block,
            RING=ring, S=per_page, BLOCK=REQUESTS, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )
    return requests, windows, rows


@triton.jit(**GROWING)
def _list_kernel(
    table_ptr, slots_ptr, count, table_width, pages, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    slot = _find_slot(table_ptr, request, at, table_width, pages, at < count, S)
    tl.store(slots_ptr + request * count + at, slot, mask=at < count)


def list_entries(page_table: torch.Tensor, *, count: int, per_page: int, pdl: bool = False) -> torch.Tensor:
    """See `LIST_ENTRIES`."""
    requests, pages = page_table.shape
    slots = torch.empty((requests, count), dtype=torch.int64, device=page_table.device)
    assert page_table.stride(1) == 1
    if requests:  # also without entries: the shortest request of a start has none
        _list_kernel[(max(1, ceil_div(count, LISTED)), requests)](
            page_table, slots, count, page_table.stride(0), pages, S=per_page, BLOCK=LISTED, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )
    return slots


decode_windows_pdl, decode_entries_pdl, decode_state_pdl, list_entries_pdl = (
    partial(function, pdl=True) for function in (decode_windows, decode_entries, decode_state, list_entries)
)
