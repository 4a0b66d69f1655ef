"""Manifold-constrained hyper-connections: instead of one residual there are S parallel streams. Each sublayer reads a
weighted sum of them and writes back to each; weights are learned and depend on the token, and streams are mixed by
doubly stochastic matrices. Xie et al., arXiv:2512.24880, as used in DeepSeek-V4. T tokens, S streams, D hidden size.
Computed in float32; streams are kept in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.streams import (
    READ_STREAMS,
    WRITE_READ_STREAMS,
    WRITE_STREAMS,
    Passed,
    Pending,
    StreamMix,
    StreamShape,
)
from headrace.kernels.streams.reference import collapse, mix_streams
from headrace.layers.build import Build
from headrace.layers.norm import RmsNorm
from headrace.models.deepseek_v4.spec import HyperSpec
from headrace.parallel.group import Group


@dataclass(slots=True)
class Streams:
    """The streams ``own`` [T, S, D] of a step, and a sublayer's output ``out`` [T, D], plus ``more`` if there is any,
    that is still to be written to them, by ``post`` [T, S] and ``mix`` [T, S, S], whose rows and columns each sum to 1.
    The next sublayer's read does that; None where nothing is pending. ``group``: the ranks over which the output is
    still to be added up, None where there are no others."""

    own: torch.Tensor
    out: torch.Tensor | None = None
    post: torch.Tensor | None = None
    mix: torch.Tensor | None = None
    more: torch.Tensor | None = None
    group: Group | None = None

    def add_up(self) -> None:
        """Add up the output over all ranks."""
        if self.group is not None and self.out is not None:
            self.out, self.more, self.group = self.group.all_reduce(self.out, self.more), None, None

    @property
    def pending(self) -> Pending:
        """What is to be written."""
        assert self.out is not None and self.post is not None and self.mix is not None
        return Pending(self.out, self.post, self.mix, self.more)


class HyperConnection(nn.Module):
    """How a sublayer reads the streams and writes back to them; the parameters are those of `StreamMix`."""

    def __init__(self, spec: HyperSpec, hidden_size: int, norm_eps: float, build: Build):
        super().__init__()
        query = build.query(streams=spec.streams, width=hidden_size)
        self._read, self._write_read = READ_STREAMS.choose(query), WRITE_READ_STREAMS.choose(query)
        self._write = WRITE_STREAMS.choose(query)
        build, num_weights = build.in_float32(), (2 + spec.streams) * spec.streams
        self._shape = StreamShape(spec.iterations, spec.eps, norm_eps)
        self.fn = build.parameter(num_weights, spec.streams * hidden_size)
        self.base = build.parameter(num_weights)
        self.scale = build.parameter(3)  # one factor each for pre, post and mix

    def read(self, streams: Streams, norm: RmsNorm, group: int | None = None) -> tuple[torch.Tensor, Fp8Rows | None]:
        """The sublayer's normalised input [T, D], and the same in FP8 with scales of a ``group`` of dims where that is
        faster than a kernel of its own; writes what is pending first. ``streams.out`` is to be set to the sublayer's
        output, or that and ``streams.more`` to two parts of it, and ``streams.group`` to who adds it up."""
        mix = StreamMix(self.fn, self.scale, self.base)
        rows: Fp8Rows | None = None
        if streams.out is None:
            x, streams.post, streams.mix = self._read(streams.own, mix, norm.weight, self._shape)
        else:
            found: Any = self._sum_write_read(streams, mix, norm, group)
            if found is None:
                streams.add_up()
                found = self._write_read(streams.own, streams.pending, mix, norm.weight, self._shape, group=group)
            streams.own, x, streams.post, streams.mix = found[:4]
            rows = None if group is None else found[4]
            streams.out = streams.more = streams.group = None
        return x, rows

    def _sum_write_read(self, streams: Streams, mix: StreamMix, norm: RmsNorm, rounded: int | None) -> Passed | None:
        """The sum over ranks in the same kernel; None where there is none to make, or separate ones are as fast."""
        group, out = streams.group, streams.out
        ranks = None if group is None or out is None else group.lending.find_sum(out.nbytes, out.dtype)
        if ranks is None:
            return None
        found: Passed | None = self._write_read(
            streams.own, streams.pending, mix, norm.weight, self._shape, ranks=ranks, group=rounded
        )
        return found

    def settle(self, streams: Streams) -> torch.Tensor:
        """The streams [T, S, D] with what is pending written to them; the tensor before is not modified."""
        streams.add_up()
        pending = streams.pending
        new: torch.Tensor = self._write(streams.own, pending.whole, pending.post, pending.mix)
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
