"""One launch per copy: a program moves up to `BLOCK` words of one part of one page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.pages import PageParts

BLOCK = 2048
WORDS = {1: (torch.int8, tl.int8), 2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32), 8: (torch.int64, tl.int64)}
"""By bytes of a word, its torch and Triton dtype."""


@triton.jit(do_not_specialize=["row_words"])
def _copy_pages_kernel(
    table_ptr, pages_ptr, rows_ptr, places_ptr, row_words, WORD: tl.constexpr, BYTES: tl.constexpr,
    BLOCK: tl.constexpr, GATHERS: tl.constexpr,
):
    # table [parts, 3]: address, bytes of a page, byte in the row; grid (pages, parts, blocks of the widest part)
    index, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    address = tl.load(table_ptr + part * 3)
    num_words = tl.load(table_ptr + part * 3 + 1) // BYTES
    begin = tl.load(table_ptr + part * 3 + 2) // BYTES
    word = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = word < num_words
    stored = address.to(tl.pointer_type(WORD)) + tl.load(pages_ptr + index) * num_words + word
    row = rows_ptr + tl.load(places_ptr + index) * row_words + begin + word
    if GATHERS:
        tl.store(row, tl.load(stored, mask=is_inside), mask=is_inside)
    else:
        tl.store(stored, tl.load(row, mask=is_inside), mask=is_inside)


def _copy(
    parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, *, gathers: bool
) -> None:
    if not len(pages) or not parts.tensors:
        return
    size = min(parts.word, rows.data_ptr() & -rows.data_ptr(), 8)
    dtype, word = WORDS[size]
    widest = max(part.shape[1] for part in parts.tensors) // size
    block = min(BLOCK, triton.next_power_of_2(widest))
    grid = (len(pages), len(parts.tensors), triton.cdiv(widest, block))
    words = rows.view(dtype)
    _copy_pages_kernel[grid](
        parts.table, pages, words, places, words.shape[1], WORD=word, BYTES=size, BLOCK=block, GATHERS=gathers,
    )


def gather_pages(parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    """See `headrace.kernels.pages.GATHER_PAGES`."""
    _copy(parts, pages, rows, places, gathers=True)


def scatter_pages(parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    """See `headrace.kernels.pages.SCATTER_PAGES`."""
    _copy(parts, pages, rows, places, gathers=False)
