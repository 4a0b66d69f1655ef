"""Token masks in one pass over the masked rows. G masked rows, V vocabulary."""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div

BLOCK = 4096


@triton.jit
def _mask_kernel(logits_ptr, masks_ptr, rows_ptr, logits_stride, num_words, V, BLOCK: tl.constexpr):
    mask_row = tl.program_id(0)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    word = tl.load(masks_ptr + mask_row.to(tl.int64) * num_words + cols // 32, mask=inside, other=-1)
    is_forbidden = ((word >> (cols % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + cols, float("-inf"), mask=inside & is_forbidden)


def token_mask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """See `TOKEN_MASK`."""
    vocab_size = logits.shape[1]
    grid = (len(masks), ceil_div(vocab_size, BLOCK))
    _mask_kernel[grid](logits, masks, rows, logits.stride(0), masks.shape[1], vocab_size, BLOCK=BLOCK, num_warps=8)
