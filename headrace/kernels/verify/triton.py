"""One launch per operation. B entries, R rows, G cache groups, N drafts that a row has room for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.verify import DecodeInputs, RowTensors

TABLE_BLOCK = 512
"""Page-table columns copied at a time."""


@triton.jit(
    do_not_specialize=["num_rows", "pages", "longest"], do_not_specialize_on_alignment=["entries_ptr", "positions_ptr"]
)
def _decode_inputs_kernel(
    entries_ptr, last_token_ptr, computed_len_ptr, drafts_ptr, tables_ptr, token_ids_ptr, positions_ptr, kv_lens_ptr,
    slots_ptr, page_tables_ptr, num_rows, pages, longest, N: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    # entries [2, B], tables [G, rows, pages], slots [G, B], page_tables [G, B, pages]; B is ``size``
    entry, group, size = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(entries_ptr + entry)
    offset = tl.load(entries_ptr + size + entry)
    position = tl.maximum(tl.load(computed_len_ptr + row) + offset - BACK, 0)
    position = tl.where(longest > 0, tl.minimum(position, longest - 1), position)
    table = tables_ptr + (group.to(tl.int64) * num_rows + row) * pages
    page = tl.load(table + position // PAGE).to(tl.int64)
    tl.store(slots_ptr + group * size + entry, page * PAGE + position % PAGE)
    # once per entry, not per cache group
    if group == 0:
        draft = tl.load(drafts_ptr + row * N + offset - 1, mask=offset > 0, other=0)
        last = tl.load(last_token_ptr + row)
        tl.store(token_ids_ptr + entry, tl.where(offset > 0, tl.maximum(draft, 0), last))
        tl.store(positions_ptr + entry, position)
        tl.store(kv_lens_ptr + entry, (position + 1).to(tl.int32))
    target = page_tables_ptr + (group.to(tl.int64) * size + entry) * pages
    # only columns in use are copied: the rest of the row keeps old values, which nothing reads
    used = position // PAGE + 1
    for at in range(0, used, BLOCK):
        column = at + tl.arange(0, BLOCK)
        tl.store(target + column, tl.load(table + column, mask=column < used, other=0), mask=column < used)


def decode_inputs(
    entries: torch.Tensor, rows: RowTensors, tables: torch.Tensor, page_size: int, out: DecodeInputs, *,
    back: int = 0, longest: int = 0,
) -> None:
    """See `headrace.kernels.verify.DECODE_INPUTS`."""
    groups, num_rows, pages = tables.shape
    _decode_inputs_kernel[(entries.shape[1], groups)](
        entries, rows.last_token, rows.computed_len, rows.drafts, tables, out.token_ids, out.positions, out.kv_lens,
        out.slots, out.page_tables, num_rows, pages, longest, N=rows.drafts.shape[1], PAGE=page_size,
        BLOCK=TABLE_BLOCK, BACK=back,
    )


@triton.jit(
    do_not_specialize=["null_row"], do_not_specialize_on_alignment=["sampled_ptr", "entries_ptr", "positions_ptr"]
)
def _accept_kernel(
    sampled_ptr, entries_ptr, positions_ptr, last_token_ptr, computed_len_ptr, drafts_ptr, out_ptr, null_row,
    N: tl.constexpr,
):
    # sampled [2, B], entries [2, B], positions [B], out [3, B]; one program per entry, but only first ones (offset 0)
    # do more than to copy: they go through their row's other entries
    entry, size = tl.program_id(0), tl.num_programs(0)
    token = tl.load(sampled_ptr + entry)
    tl.store(out_ptr + entry, token)
    tl.store(out_ptr + size + entry, tl.load(sampled_ptr + size + entry))
    if tl.load(entries_ptr + size + entry) == 0:
        row = tl.load(entries_ptr + entry)
        count = tl.full((), 1, tl.int64)
        length = tl.full((), 1, tl.int64)
        is_right = tl.full((), 1, tl.int1)
        is_own = tl.load(entries_ptr + size + entry + 1, mask=entry + 1 < size, other=0) == 1
        while is_own:
            draft = tl.load(drafts_ptr + row * N + length - 1)
            is_right = is_right & (draft == token)
            if is_right:
                token = tl.load(sampled_ptr + entry + length)
                count += 1
            length += 1
            following = entry + length
            is_own = tl.load(entries_ptr + size + following, mask=following < size, other=0) == length
        tl.store(last_token_ptr + row, token)
        length_after = tl.load(positions_ptr + entry) + count
        tl.store(computed_len_ptr + row, tl.where(row == null_row, 0, length_after))
        index = tl.arange(0, 2 * N)  # a row has at most N + 1 entries
        tl.store(out_ptr + 2 * size + entry + index, count, mask=index < length)


def accept(
    sampled: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, rows: RowTensors, most: int
) -> torch.Tensor:
    """See `headrace.kernels.verify.ACCEPT`."""
    count = entries.shape[1]
    assert sampled.shape == (2, count) and sampled.is_contiguous() and entries.is_contiguous()
    out = torch.empty((3, count), dtype=torch.int64, device=sampled.device)
    if count:
        _accept_kernel[(count,)](
            sampled, entries, positions, rows.last_token, rows.computed_len, rows.drafts, out,
            len(rows.last_token) - 1, N=rows.drafts.shape[1], num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["guesses_ptr"])
def _place_drafts_kernel(
    guesses_ptr, last_token_ptr, computed_len_ptr, drafts_ptr, width, N: tl.constexpr
):
    # guesses [n, 2 + width]: row, position, tokens
    guess = guesses_ptr + tl.program_id(0) * (2 + width)
    row = tl.load(guess)
    at = tl.load(computed_len_ptr + row) + 1 - tl.load(guess + 1)  # index of the row's next token
    before = tl.load(guess + 2 + at - 1, mask=(at > 0) & (at <= width), other=-1)
    is_right = (at == 0) | ((at > 0) & (at <= width) & (before == tl.load(last_token_ptr + row)))
    index = tl.arange(0, N)
    tokens = tl.load(guess + 2 + at + index, mask=is_right & (at + index < width), other=-1)
    tl.store(drafts_ptr + row * N + index, tokens)


def place_drafts(guesses: torch.Tensor, rows: RowTensors) -> None:
    """See `headrace.kernels.verify.PLACE_DRAFTS`."""
    if len(guesses):
        _place_drafts_kernel[(len(guesses),)](
            guesses, rows.last_token, rows.computed_len, rows.drafts, guesses.shape[1] - 2, N=rows.drafts.shape[1],
            num_warps=1,
        )
