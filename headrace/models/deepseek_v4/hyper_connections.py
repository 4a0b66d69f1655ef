"""Manifold-constrained hyper-connections: instead of one residual there are S parallel streams. Each sublayer reads a
weighted sum of them and writes back to each; weights are learned and depend on the token, and streams are mixed by
doubly stochastic matrices. Xie et al., arXiv:2512.24880, as used in DeepSeek-V4. T tokens, S streams, D hidden size.
Computed in float32; streams are kept in the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from headrace.kernels.rowwise import STREAM_WEIGHTS
from headrace.layers.build import Build
from headrace.models.deepseek_v4.spec import HyperSpec


class HyperConnection(nn.Module):
    """Computes a sublayer's weights from the streams: ``fn`` [2S + S * S, S * D], whose rows are ``pre``, ``post`` and
    ``mix`` (row-major) in this order; ``scale`` [3] and ``base`` [2S + S * S] as in `STREAM_WEIGHTS`."""

    def __init__(self, spec: HyperSpec, hidden_size: int, norm_eps: float, build: Build):
        super().__init__()
        build, num_weights = build.in_float32(), (2 + spec.streams) * spec.streams
        self.spec, self.norm_eps = spec, norm_eps
        self._weigh = STREAM_WEIGHTS.choose(build.query(streams=spec.streams))
        self.fn = build.parameter(num_weights, spec.streams * hidden_size)
        self.base = build.parameter(num_weights)
        self.scale = build.parameter(3)  # one factor each for pre, post and mix

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``streams`` [T, S, D] to the sublayer's input [T, D], and what `write_back` needs: ``post`` [T, S] and
        ``mix`` [T, S, S], whose rows and columns each sum to 1."""
        raw = mix_streams(streams, self.fn, self.norm_eps)  # [T, 2S + S * S]
        pre, post, mix = self._weigh(raw, self.scale, self.base, iterations=self.spec.iterations, eps=self.spec.eps)
        return collapse(streams, pre), post, mix


class StreamHead(nn.Module):
    """Collapses the streams into one hidden state at the end of the model: ``[T, S, D] -> [T, D]``."""

    def __init__(self, spec: HyperSpec, hidden_size: int, norm_eps: float, build: Build):
        super().__init__()
        build = build.in_float32()
        self.eps, self.norm_eps = spec.eps, norm_eps
        self.fn = build.parameter(spec.streams, spec.streams * hidden_size)
        self.base = build.parameter(spec.streams)
        self.scale = build.parameter(1)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        weights = torch.sigmoid(mix_streams(streams, self.fn, self.norm_eps) * self.scale + self.base) + self.eps
        return collapse(streams, weights)


def mix_streams(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """``fn`` times the RMS-normalised streams [T, S, D], flattened to one vector: [T, rows of fn]."""
    flat = streams.flatten(1).float()
    # the norm has no weight, so its factor is one number per token and is applied after the product
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of streams, in their dtype."""
    return torch.einsum("ts,tsd->td", weights, streams.float()).to(streams.dtype)


def write_back(streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """New streams [T, S, D] from a sublayer's output ``out`` [T, D]: stream k is ``post[k] * out`` plus the sum over j
    of ``mix[j, k] * streams[j]``."""
    mixed = torch.einsum("tjk,tjd->tkd", mix, streams.float())  # a new tensor: streams may be an expanded view
    return torch.addcmul(mixed, post.unsqueeze(-1), out.float().unsqueeze(1)).to(streams.dtype)
