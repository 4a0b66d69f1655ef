"""Token masks and the search for the greatest logit, before and after, in one pass. S rows, V vocabulary."""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div
from headrace.kernels.sample.triton import find_first, greatest, join_parts

BLOCK = 4096
NEGATIVE = tl.constexpr(-float("inf"))


@triton.jit
def _mask_part(
    logits_ptr, masks_ptr, mask_of_row_ptr, raws_ptr, values_ptr, ids_ptr, logits_stride, num_words, V, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    index = part * BLOCK + tl.arange(0, BLOCK)
    inside = index < V
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    x = tl.load(row_ptr + index, mask=inside, other=NEGATIVE)
    tl.store(raws_ptr + row * PARTS + part, greatest(x))
    place = tl.load(mask_of_row_ptr + row).to(tl.int64)
    if place >= 0:
        word = tl.load(masks_ptr + place * num_words + index // 32, mask=inside, other=-1)
        is_forbidden = ((word >> (index % 32)) & 1) == 0
        tl.store(row_ptr + index, NEGATIVE, mask=inside & is_forbidden)
        x = tl.where(is_forbidden, NEGATIVE, x)
    tl.store(values_ptr + row * PARTS + part, greatest(x))
    tl.store(ids_ptr + row * PARTS + part, find_first(x, index, V - 1))


@triton.jit
def _join(part_raws_ptr, part_values_ptr, part_ids_ptr, raws_ptr, values_ptr, ids_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(raws_ptr + row, greatest(tl.load(part_raws_ptr + row * PARTS + part, mask=part < PARTS, other=NEGATIVE)))
    best, token = join_parts(part_values_ptr, part_ids_ptr, row, PARTS, BLOCK)
    tl.store(values_ptr + row, best)
    tl.store(ids_ptr + row, token)


def token_mask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `TOKEN_MASK`."""
    num_rows, vocab_size = logits.shape
    parts = ceil_div(vocab_size, BLOCK)
    part_reals = torch.empty((2, num_rows, parts), dtype=torch.float32, device=logits.device)
    part_ids = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    _mask_part[(num_rows, parts)](
        logits, masks, mask_of_row, part_reals[0], part_reals[1], part_ids, logits.stride(0), masks.shape[1], vocab_size, PARTS=parts, BLOCK=BLOCK, num_warps=8,
    )
    raw, values = torch.empty((2, num_rows), dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _join[(num_rows,)](part_reals[0], part_reals[1], part_ids, raw, values, ids, PARTS=parts, BLOCK=1 << (parts - 1).bit_length(), num_warps=1)
    return raw, values, ids
