"""A conformer over log-mel frames, arXiv:2005.08100: attention with a bias for each distance, and convolutions that
look back.

F frames, M mel bands, L positions of a piece, D hidden size, H heads, C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.mlp import ACTIVATIONS
from headrace.layers.model import number_layers
from headrace.layers.norm import make_norm
from headrace.layers.spec import NormSpec

if TYPE_CHECKING:
    from headrace.models.phi4_multimodal.family import ConformerSpec

MOST_POSITIONS = 500
"""A longer clip is cut into pieces of so many, which know nothing of one another; zeros fill the last one."""
STAGES, STRIDE = 2, 8
NORM = NormSpec(1e-5, kind="layer", bias=True)


class Kernel(nn.Module):
    """Weight and bias of a convolution."""

    def __init__(self, build: Build, *shape: int):
        super().__init__()
        self.weight, self.bias = build.parameter(*shape), build.parameter(shape[0])


class Stage(nn.Module):
    """A convolution of each channel and a product over channels."""

    def __init__(self, num_channels: int, build: Build):
        super().__init__()
        self.depthwise = Kernel(build, num_channels, 1, 3, 3)
        self.pointwise = Kernel(build, num_channels, num_channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, self.depthwise.weight, self.depthwise.bias, stride=2, padding=1, groups=x.shape[1])
        return F.conv2d(x, self.pointwise.weight, self.pointwise.bias)


class FrameReducer(nn.Module):
    """``[F, M] -> [F / 8, D]``, rounded up: three convolutions with stride 2 in both axes."""

    def __init__(self, spec: ConformerSpec, build: Build):
        super().__init__()
        self.first = Kernel(build, spec.num_channels, 1, 3, 3)
        self.stages = nn.ModuleList(Stage(spec.num_channels, build) for _ in range(STAGES))
        self.output = Linear(build, spec.num_channels * -(-spec.num_mels // STRIDE), spec.hidden_size, bias=True)
        self._activate = ACTIVATIONS[spec.first_activation]

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        found = []
        for begin in range(0, -(-len(frames) // STRIDE), MOST_POSITIONS):
            # A position depends on the frames of the one before it, which is computed with it and left out; without
            # pieces the channels of half an hour of sound take 15 GB.
            before = min(begin, 1)
            own = frames[(begin - before) * STRIDE : (begin + MOST_POSITIONS) * STRIDE]
            x = self._activate(F.conv2d(own[None, None], self.first.weight, self.first.bias, stride=2, padding=1))
            for stage in self.stages:
                x = self._activate(stage(x))
            found.append(self.output(x[0].transpose(0, 1).contiguous().flatten(1)[before:]))
        return torch.cat(found)


class ConformerMlp(nn.Module):
    """``[N, D] -> [N, D]``, normalised first."""

    def __init__(self, spec: ConformerSpec, build: Build):
        super().__init__()
        self.norm = make_norm(NORM, spec.hidden_size, build)
        self.up_gate = Linear(build, spec.hidden_size, 2 * spec.intermediate_size, bias=True)
        self.down = Linear(build, spec.intermediate_size, spec.hidden_size, bias=True)
        self._activate = ACTIVATIONS[spec.mlp_activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.up_gate(self.norm(x)).chunk(2, dim=-1)
        return self.down(up * self._activate(gate))


class Convolution(nn.Module):
    """``[n, L, D] -> [n, L, D]`` with a gate, normalised first; a position sees those before it."""

    def __init__(self, spec: ConformerSpec, build: Build):
        super().__init__()
        size = spec.hidden_size
        self.norm = make_norm(NORM, size, build)
        self.value_gate = Linear(build, size, 2 * size, bias=True)
        self.value_bias, self.gate_bias = build.parameter(size), build.parameter(size)
        self.depthwise = Kernel(build, size, 1, spec.kernel_size)
        self.pointwise, self.output = (Linear(build, size, size, bias=True) for _ in range(2))
        self._gate, self._activate = ACTIVATIONS[spec.glu_activation], ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_pieces, kernel = len(x), self.depthwise.weight
        value, gate = self.value_gate(self.norm(x.flatten(0, 1))).chunk(2, dim=-1)
        x = ((value + self.value_bias) * self._gate(gate + self.gate_bias)).unflatten(0, (num_pieces, -1))
        padded = F.pad(x.transpose(1, 2), (kernel.shape[2] - 1, 0))
        x = F.conv1d(padded, kernel, self.depthwise.bias, groups=len(kernel)).transpose(1, 2).contiguous().flatten(0, 1)
        return self.output(self._activate(self.pointwise(x))).unflatten(0, (num_pieces, -1))


class ConformerBlock(nn.Module):
    """``[n, L, D] -> [n, L, D]``; ``bias`` [H, L, L] is added to what attention's softmax takes."""

    def __init__(self, spec: ConformerSpec, build: Build):
        super().__init__()
        size, self._num_heads = spec.hidden_size, spec.num_heads
        self.mlp_in, self.mlp_out = ConformerMlp(spec, build), ConformerMlp(spec, build)
        self.attention_norm = make_norm(NORM, size, build)
        self.qkv = Linear(build, size, {"q": size, "k": size, "v": size}, bias=True)
        self.output = Linear(build, size, size, bias=True)
        self.convolution = Convolution(spec, build)
        self.norm = make_norm(NORM, size, build)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.flatten(0, 1)
        x = x + 0.5 * self.mlp_in(x)
        qkv = self.qkv(self.attention_norm(x)).view(*shape[:2], 3, self._num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [n, H, L, E]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.output(attended.transpose(1, 2).reshape(x.shape))
        x = x + self.convolution(x.view(shape)).flatten(0, 1)
        return self.norm(x + 0.5 * self.mlp_out(x)).view(shape)


class Conformer(nn.Module):
    """Clips to positions [N, D], eight frames each."""

    def __init__(self, spec: ConformerSpec, build: Build):
        super().__init__()
        self.spec = spec
        self.mean, self.inverse_std = build.parameter(spec.num_mels), build.parameter(spec.num_mels)
        self.frames = FrameReducer(spec, build)
        self.distances = build.parameter(2 * spec.max_distance, spec.num_heads)
        self.blocks = number_layers([ConformerBlock(spec, build) for _ in range(spec.num_layers)], 0)

    def encode(self, items: list[EncoderInput], dtype: torch.dtype) -> InPieces[list[torch.Tensor]]:
        """Positions of each clip; yields behind each layer."""
        if not items:
            return []
        clips = [self._enter(item.pixels(dtype)[0]) for item in items]
        biases = {length: self._bias(length) for length in {clip.shape[1] for clip in clips}}
        for block in self.blocks:
            clips = [block(clip, biases[clip.shape[1]]) for clip in clips]
            yield
        return [clip.flatten(0, 1)[: item.place.num_tokens] for clip, item in zip(clips, items, strict=True)]

    def _enter(self, frames: torch.Tensor) -> torch.Tensor:
        """``[F, M] -> [n, L, D]``"""
        x = self.frames((frames - self.mean) * self.inverse_std)
        if len(x) <= MOST_POSITIONS:
            return x[None]
        return F.pad(x, (0, 0, 0, -len(x) % MOST_POSITIONS)).unflatten(0, (-1, MOST_POSITIONS))

    def _bias(self, length: int) -> torch.Tensor:
        """[H, L, L]"""
        at, most = torch.arange(length, device=self.distances.device), self.spec.max_distance
        found = (at - at[:, None]).clamp(-most, most - 1) + most
        return self.distances[found].permute(2, 0, 1).contiguous()
