"""Hyper-connections in plain torch: the oracle and the fallback. T tokens, S streams, D hidden size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from headrace.kernels.collective import LentSum
from headrace.kernels.rowwise.reference import rms_norm
from headrace.kernels.streams import Passed, Pending, StreamMix, StreamShape, end_pass


def read_streams(
    streams: torch.Tensor, mix: StreamMix, norm: torch.Tensor, shape: StreamShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `READ_STREAMS`."""
    raw = mix_streams(streams, mix.fn, shape.norm_eps)
    pre, post, mixing = weigh_streams(raw, mix.scale, mix.base, iterations=shape.iterations, eps=shape.eps)
    return rms_norm(collapse(streams, pre), norm, shape.norm_eps), post, mixing


def write_streams(streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """See `WRITE_STREAMS`."""
    mixed = torch.einsum("tjk,tjd->tkd", mix, streams.float())  # a new tensor: streams may be an expanded view
    return torch.addcmul(mixed, post.unsqueeze(-1), out.float().unsqueeze(1)).to(streams.dtype)


def write_read_streams(
    streams: torch.Tensor, pending: Pending, mix: StreamMix, norm: torch.Tensor, shape: StreamShape, *,
    ranks: LentSum | None = None, group: int | None = None,
) -> Passed | None:
    """See `WRITE_READ_STREAMS`."""
    if ranks is not None:
        return None
    new = write_streams(streams, pending.whole, pending.post, pending.mix)
    return end_pass((new, *read_streams(new, mix, norm, shape)), group)


def mix_streams(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """``fn`` times the RMS-normalised streams [T, S, D], flattened to one vector: [T, rows of fn]."""
    flat = streams.flatten(1).float()
    # the norm has no weight, so its factor is one number per token and is applied after the product
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of streams, in their dtype."""
    return torch.einsum("ts,tsd->td", weights, streams.float()).to(streams.dtype)


def weigh_streams(
    raw: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, iterations: int, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(pre [T, S], post [T, S], mix [T, S, S])`` from ``raw`` [T, (2 + S) S]; see `READ_STREAMS`."""
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
