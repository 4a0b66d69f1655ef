"""Attention of each text of a step over itself, both ways. T tokens, n texts of like length, L the longest of them.

Refuses: pages and anything kept between steps. On a GPU its index tensors are copied step by step: right, not yet fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

MOST_PADDING = 1.25
"""The longest text of a batch is at most so many times as long as its shortest."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """n texts side by side. ``tokens`` [n * L] are their places in the step, any place where there is padding; ``mask``
    [n, 1, 1, L] is added to the logits (None: no padding); ``real`` are the places of [n * L] that are no padding."""

    num_texts: int
    tokens: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor | None


class TextSpans:
    """The texts of a step by their ``lengths`` in tokens; made once, used by every layer."""

    def __init__(self, lengths: list[int], *, dtype: torch.dtype, device: torch.device):
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self._batches = [
            _make_batch([(starts[i], lengths[i]) for i in chosen], dtype, device) for chosen in group_lengths(lengths)
        ]

    def attend(self, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """``qkv`` [T, 3 * D], queries first, to [T, D]; logits are divided by the root of a head's width."""
        width = qkv.shape[1] // 3
        out = qkv.new_empty(qkv.shape[0], width)
        for batch in self._batches:
            heads = qkv.index_select(0, batch.tokens).view(batch.num_texts, -1, 3, num_heads, width // num_heads)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v, batch.mask).transpose(1, 2).reshape(-1, width)
            if batch.real is None:
                out.index_copy_(0, batch.tokens, found)
            else:
                out.index_copy_(0, batch.tokens[batch.real], found[batch.real])
        return out


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Indices of texts by batches of like length."""
    groups: list[list[int]] = []
    shortest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[index] > shortest * MOST_PADDING:
            groups.append([])
            shortest = lengths[index]
        groups[-1].append(index)
    return groups


def _make_batch(spans: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> TextBatch:
    longest = max(length for _, length in spans)
    begin, length = (torch.tensor(column, device=device)[:, None] for column in zip(*spans, strict=True))
    places = torch.arange(longest, device=device)
    if all(length == longest for _, length in spans):
        return TextBatch(len(spans), (begin + places).flatten(), None, None)
    is_real = places < length
    mask = torch.zeros(is_real.shape, dtype=dtype, device=device).masked_fill_(~is_real, float("-inf"))
    return TextBatch(
        len(spans), (begin + places.clamp(max=length - 1)).flatten(), mask[:, None, None],
        torch.where(is_real.flatten())[0]
    )
