"""Attention of DeepSeek-V4: over a sliding window of tokens and over compressed entries. One vector per token or entry
is both key and value, shared by all heads (multi-query).

T tokens, H heads, E head dim, N slots that a token sees, G groups of heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.models.deepseek_v4.compressor import Compressor, rotate_last
from headrace.models.deepseek_v4.indexer import Indexer
from headrace.models.deepseek_v4.layout import OVERLAPPING
from headrace.models.deepseek_v4.places import Place, Slots
from headrace.models.deepseek_v4.spec import DeepseekV4Spec, V4LayerSpec

TILE_ELEMENTS = 2**26
"""Elements of the largest tensor of gathered vectors [tile, N, E]; queries are processed in tiles of that size."""


class V4Attention(nn.Module):
    """``x [T, D] -> [T, D]``. Layers with a compress ratio also attend to compressed entries; those of ratio
    `OVERLAPPING` only to the entries that the indexer selects."""

    def __init__(self, spec: DeepseekV4Spec, layer: V4LayerSpec, rotary: RotaryTable, build: Build):
        super().__init__()
        heads = self.spec = spec.heads
        self.norm_eps, self.rotary, self.ratio = spec.norm_eps, rotary, layer.ratio
        self.down = Linear(build, spec.hidden_size, {"q": heads.q_lora_rank, "kv": heads.head_dim})
        self.q_norm = RmsNorm(build, heads.q_lora_rank, spec.norm_eps)
        self.kv_norm = RmsNorm(build, heads.head_dim, spec.norm_eps)
        self.q_up = Linear(build, heads.q_lora_rank, heads.num_heads * heads.head_dim)
        self.sinks = build.in_float32().parameter(heads.num_heads)  # concatenated with float32 logits
        self.mix = GroupedLinear(
            heads.num_groups, heads.num_heads * heads.head_dim // heads.num_groups, heads.group_rank, build
        )
        self.output = Linear(build, heads.num_groups * heads.group_rank, spec.hidden_size)
        self.window = Place()
        self.compressor: Compressor | None = None
        if layer.ratio:
            self.compressor = Compressor(
                spec.hidden_size, heads.head_dim, layer.ratio, norm_eps=spec.norm_eps, rotary=rotary, build=build
            )
        self.indexer = Indexer(spec, rotary, build) if layer.ratio == OVERLAPPING else None

    def places(self) -> Iterator[Place]:
        """This layer's caches, in the order of `spec.places`, by which pages are bound."""
        yield self.window
        compressors = (self.compressor, None if self.indexer is None else self.indexer.compressor)
        for compressor in compressors:
            if compressor is not None:
                yield compressor.entries
                yield compressor.state

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        heads, cos_sin = self.spec, self.rotary.cos_sin.index_select(0, batch.positions)
        latent, kv = self.down(x).split((heads.q_lora_rank, heads.head_dim), dim=-1)
        latent, kv = self.q_norm(latent), self.kv_norm(kv)  # [T, q_lora_rank], [T, E]
        q = self.q_up(latent).unflatten(-1, (heads.num_heads, heads.head_dim))  # [T, H, E]
        # RMS norm per head without a weight, then rotation
        q = rotate_last(
            (q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + self.norm_eps)).to(q.dtype), cos_sin
        )
        window, backend = self.window.step(batch), self.window.backend(batch)
        # written before any read: tokens of one step attend to each other through the pages
        self.window.slots.write(window.inputs.slots, rotate_last(kv.unsqueeze(1), cos_sin).squeeze(1))
        seen = [(self.window.slots, backend.seen)]  # pools and the slots [T, n] in each
        if self.compressor is not None:
            self.compressor(x, batch)  # also before the read: a window that ends in this step is visible in it
            seen.append((self.compressor.entries.slots, self._find_entries(self.compressor, x, latent, batch)))
        mixed = attend_slots(q, seen, sinks=self.sinks, scale=heads.scale)
        # Values are the rotated keys. Rotating the output back by the query's position leaves each value rotated by
        # its distance from the query, so that the output depends on relative positions alone.
        return self.output(self.mix(rotate_last(mixed, cos_sin, backwards=True)))

    def _find_entries(
        self, compressor: Compressor, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Slots [T, n] int64 of the compressed entries that each token attends to, padded with -1."""
        backend = compressor.entries.backend(batch)
        if self.indexer is None:
            return backend.all_seen()
        # The indexer's keys and the entries are different cache groups with their own page tables: entry numbers
        # within a request are the same in both, slots are not.
        chosen = self.indexer(x, latent, batch)
        slots = backend.slots.index_select(0, backend.requests)
        return slots.gather(1, chosen.clamp(min=0)).masked_fill_(chosen < 0, -1) if slots.shape[1] else chosen


class GroupedLinear(nn.Module):
    """``[T, H, E] -> [T, G * O]``: a block-diagonal product, each group of heads with its own matrix. ``weight``
    [G * O, I] with I = H * E / G."""

    def __init__(self, num_groups: int, in_features: int, out_features: int, build: Build):
        super().__init__()
        self.num_groups = num_groups
        self.weight = build.parameter(num_groups * out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.flatten(1).unflatten(1, (self.num_groups, -1)).transpose(0, 1)  # [G, T, I]
        return torch.bmm(
            grouped, self.weight.unflatten(0, (self.num_groups, -1)).transpose(1, 2)
        ).transpose(0, 1).flatten(1)


def attend_slots(
    q: torch.Tensor, seen: list[tuple[Slots, torch.Tensor]], *, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of ``q`` [T, H, E] over the vectors (each key and value) at slots [T, n] int64 of each pool, -1 for
    padding; one softmax over all pools, in float32. ``sinks`` [H] add exp(sink) to each head's denominator. Returns
    [T, H, E] in q's dtype."""
    out = torch.empty_like(q)
    width = sum(slots.shape[1] for _, slots in seen)
    tile = max(1, TILE_ELEMENTS // (width * q.shape[-1]))  # queries at a time
    for low in range(0, q.shape[0], tile):
        span = slice(low, min(low + tile, q.shape[0]))
        unseen = torch.cat([slots[span] < 0 for _, slots in seen], dim=1)  # [tile, N]
        # Padding reads slot 0, in the null page, which may hold anything: zeroed, as 0 * NaN would be NaN.
        kv = torch.cat(  # [tile, N, E]
            [pool.gather(slots[span].clamp(min=0), q.dtype) for pool, slots in seen], dim=1
        ).masked_fill_(unseen.unsqueeze(-1), 0)
        # [tile, H, N]: each query has keys of its own, shared by its heads
        logits = torch.bmm(q[span], kv.transpose(1, 2)).float().mul_(scale).masked_fill_(
            unseen.unsqueeze(1), float("-inf")
        )
        # the sink is one more logit, whose weight is dropped after the softmax
        sink = sinks.view(1, -1, 1).expand(logits.shape[0], -1, 1)
        weights = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
        out[span] = torch.bmm(weights.to(q.dtype), kv)
    return out
