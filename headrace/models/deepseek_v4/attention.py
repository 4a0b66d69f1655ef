"""Attention over a window of tokens and over compressed entries, one vector being key and value of all heads.

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
"""Of gathered vectors that are held at a time."""


class V4Attention(nn.Module):
    """``x [T, D] -> [T, D]``."""

    def __init__(self, spec: DeepseekV4Spec, layer: V4LayerSpec, rotary: RotaryTable, build: Build):
        super().__init__()
        heads = self.spec = spec.heads
        self.norm_eps, self.rotary, self.ratio = spec.norm_eps, rotary, layer.ratio
        self.down = Linear(build, spec.hidden_size, {"q": heads.q_lora_rank, "kv": heads.head_dim})
        self.q_norm = RmsNorm(build, heads.q_lora_rank, spec.norm_eps)
        self.kv_norm = RmsNorm(build, heads.head_dim, spec.norm_eps)
        self.q_up = Linear(build, heads.q_lora_rank, heads.num_heads * heads.head_dim)
        self.sinks = build.in_float32().parameter(heads.num_heads)
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
        """In the order in which the spec declares them."""
        yield self.window
        compressors = (self.compressor, None if self.indexer is None else self.indexer.compressor)
        for compressor in compressors:
            if compressor is not None:
                yield compressor.entries
                yield compressor.state

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        heads, cos_sin = self.spec, self.rotary.cos_sin.index_select(0, batch.positions)
        latent, kv = self.down(x).split((heads.q_lora_rank, heads.head_dim), dim=-1)
        latent, kv = self.q_norm(latent), self.kv_norm(kv)
        q = self.q_up(latent).unflatten(-1, (heads.num_heads, heads.head_dim))
        q = rotate_last(
            (q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + self.norm_eps)).to(q.dtype), cos_sin
        )
        window, backend = self.window.step(batch), self.window.backend(batch)
        self.window.slots.write(window.inputs.slots, rotate_last(kv.unsqueeze(1), cos_sin).squeeze(1))
        seen = [(self.window.slots, backend.seen)]
        if self.compressor is not None:
            self.compressor(x, batch)
            seen.append((self.compressor.entries.slots, self._find_entries(self.compressor, x, latent, batch)))
        mixed = attend_slots(q, seen, sinks=self.sinks, scale=heads.scale)
        return self.output(self.mix(rotate_last(mixed, cos_sin, backwards=True)))

    def _find_entries(
        self, compressor: Compressor, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Slots [T, n] of the compressed entries that each token sees, -1 for none."""
        backend = compressor.entries.backend(batch)
        if self.indexer is None:
            return backend.all_seen()
        chosen = self.indexer(x, latent, batch)
        slots = backend.slots.index_select(0, backend.requests)
        return slots.gather(1, chosen.clamp(min=0)).masked_fill_(chosen < 0, -1) if slots.shape[1] else chosen


class GroupedLinear(nn.Module):
    """``[T, H, E] -> [T, G * O]``: each group of heads through its own matrix; ``weight`` [G * O, I]."""

    def __init__(self, num_groups: int, in_features: int, out_features: int, build: Build):
        super().__init__()
        self.num_groups = num_groups
        self.weight = build.parameter(num_groups * out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.flatten(1).unflatten(1, (self.num_groups, -1)).transpose(0, 1)
        return torch.bmm(
            grouped, self.weight.unflatten(0, (self.num_groups, -1)).transpose(1, 2)
        ).transpose(0, 1).flatten(1)


def attend_slots(
    q: torch.Tensor, seen: list[tuple[Slots, torch.Tensor]], *, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """``q`` [T, H, E] over vectors that are keys and values, at slots [T, n] int64 of each pool, -1 for none; [T, H,
    E]. ``sinks`` [H] add exp(sink) to each head's softmax denominator. Softmax in float32."""
    out = torch.empty_like(q)
    width = sum(slots.shape[1] for _, slots in seen)
    tile = max(1, TILE_ELEMENTS // (width * q.shape[-1]))
    for low in range(0, q.shape[0], tile):
        span = slice(low, min(low + tile, q.shape[0]))
        unseen = torch.cat([slots[span] < 0 for _, slots in seen], dim=1)
        # What lies in the null page is anybody's, even NaN, and must not be multiplied.
        kv = torch.cat(
            [pool.gather(slots[span].clamp(min=0), q.dtype) for pool, slots in seen], dim=1
        ).masked_fill_(unseen.unsqueeze(-1), 0)
        logits = torch.bmm(q[span], kv.transpose(1, 2)).float().mul_(scale).masked_fill_(
            unseen.unsqueeze(1), float("-inf")
        )
        sink = sinks.view(1, -1, 1).expand(logits.shape[0], -1, 1)
        weights = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
        out[span] = torch.bmm(weights.to(q.dtype), kv)
    return out
