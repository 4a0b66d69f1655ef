"""Manifold-constrained hyper-connections: instead of one residual there are S parallel streams. Each sublayer reads a
weighted sum of them and writes back to each; weights are learned and depend on the token, and streams are mixed by
doubly stochastic matrices. Xie et al., arXiv:2512.24880, as used in DeepSeek-V4. T tokens, S streams, D hidden size.
Computed in float32; streams are kept in the model's dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.streams import READ_STREAMS, WRITE_STREAMS, StreamMix, StreamShape
from headrace.kernels.streams.reference import collapse, mix_streams
from headrace.layers.build import Build
from headrace.layers.norm import RmsNorm
from headrace.models.deepseek_v4.spec import HyperSpec


class HyperConnection(nn.Module):
    """How a sublayer reads the streams and writes back to them; the parameters are those of `StreamMix`."""

    def __init__(self, spec: HyperSpec, hidden_size: int, norm_eps: float, build: Build):
        super().__init__()
        query = build.query(streams=spec.streams, width=hidden_size)
        self._read, self._write = READ_STREAMS.choose(query), WRITE_STREAMS.choose(query)
        build, num_weights = build.in_float32(), (2 + spec.streams) * spec.streams
        self._shape = StreamShape(spec.iterations, spec.eps, norm_eps)
        self.fn = build.parameter(num_weights, spec.streams * hidden_size)
        self.base = build.parameter(num_weights)
        self.scale = build.parameter(3)  # one factor each for pre, post and mix

    def read(self, streams: torch.Tensor, norm: RmsNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``streams`` [T, S, D] to the sublayer's normalised input [T, D], and what `write_back` needs: ``post``
        [T, S] and ``mix`` [T, S, S], whose rows and columns each sum to 1."""
        read: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._read(
            streams, StreamMix(self.fn, self.scale, self.base), norm.weight, self._shape
        )
        return read

    def write_back(
        self, streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """New streams [T, S, D] from a sublayer's output ``out`` [T, D]; the input is not modified."""
        new: torch.Tensor = self._write(streams, out, post, mix)
        return new


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
