"""Stream weights in plain torch: the oracle and the fallback. T tokens, S streams."""

from __future__ import annotations

import math

import torch


def stream_weights(
    raw: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, iterations: int, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `STREAM_WEIGHTS`."""
    streams = math.isqrt(raw.shape[1] + 1) - 1  # (2 + S) S = (S + 1)^2 - 1
    sizes = (streams, streams, streams * streams)
    pre, post, mix = (
        part * scale[i] + own for i,
        (part, own) in enumerate(zip(raw.split(sizes, dim=-1), base.split(sizes), strict=True))
    )
    mix = torch.softmax(mix.unflatten(-1, (streams, streams)), dim=-1) + eps
    return torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), balance(mix, iterations, eps)


def balance(mix: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Sinkhorn-Knopp: divide columns and rows of [..., S, S] by their sums in turn, columns first and last."""
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix
