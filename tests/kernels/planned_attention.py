"""What own CUDA C++ for chunks does with a plan, in plain torch: each entry by itself, splits merged at the end."""

from __future__ import annotations

import torch

from headrace.kernels.attention.blocks import LOG2_E, Head
from headrace.kernels.attention.prefill import PrefillPlan
from headrace.kernels.attention.splits import KEYS


def find_blocks(first: int, tokens: int, query_len: int, kv_len: int, window: int) -> tuple[int, int]:
    """The first block of keys that a tile reads, and the one behind its last."""
    place = kv_len - query_len + first
    low = max(place - window + 1, 0) if window else 0
    return low // KEYS, -(-min(place + tokens, kv_len) // KEYS)


def attend_by_plan(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, plan: PrefillPlan, head: Head,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """See `headrace.kernels.attention.hopper.prefill`."""
    entries, parts = plan.blocks.tolist(), dict[int, tuple[torch.Tensor, ...]]()
    for at, (request, first, *share) in enumerate(entries):
        if request < 0:
            assert all(other[0] < 0 for other in entries[at:])
            break
        split, splits = share or (0, 1)
        begin, rest, kv_len = int(step[0][request]), int(step[0][request + 1]), int(step[1][request])
        query_len = rest - begin
        rows = slice(begin + first, begin + min(first + plan.tokens, query_len))
        least, last = find_blocks(first, plan.tokens, query_len, kv_len, head.window)
        keys = [least + (last - least) * i // splits for i in (split, split + 1)]
        assert keys[0] < keys[1], "no split is empty"
        key = torch.arange(keys[0] * KEYS, min(keys[1] * KEYS, kv_len))
        part = _attend(q[rows], pages, step[2][request], key, kv_len - query_len + first, head)
        parts[at] = part
        if split == splits - 1:
            out[rows] = _merge([parts[at - splits + 1 + i] for i in range(splits)], head).to(out.dtype)


def _attend(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, key: torch.Tensor, place: int,
    head: Head,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Highest logit in base 2 [T, H, 1], denominator, sums [T, H, E]; float64."""
    size, group = pages[0].shape[1], q.shape[1] // pages[0].shape[2]
    position = place + torch.arange(len(q))[:, None]
    seen = (key <= position) & (key > position - (head.window or 1 << 30))
    k, v = (  # as the kernel, it reads no page before the window
        torch.where(seen.any(0)[:, None, None], p[table[key // size].long(), key % size].double(), 0.0)
        .repeat_interleave(group, 1)
        for p in pages
    )
    logits = torch.einsum("the,she->ths", q.double(), k) * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = (logits * LOG2_E).masked_fill(~seen[:, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp2(logits - top.clamp(min=-1e30))
    return top, weights.sum(-1, keepdim=True), torch.einsum("ths,she->the", weights, v)


def _merge(parts: list[tuple[torch.Tensor, ...]], head: Head) -> torch.Tensor:
    top = torch.stack([part[0] for part in parts]).amax(0)
    shares = [torch.exp2(part[0] - top) for part in parts]
    total = sum(share * part[1] for share, part in zip(shares, parts, strict=True))
    if head.sinks is not None:  # once, whatever the number of splits
        total = total + torch.exp2(head.sinks.double()[:, None] * LOG2_E - top)
    return sum(share * part[2] for share, part in zip(shares, parts, strict=True)) / total
