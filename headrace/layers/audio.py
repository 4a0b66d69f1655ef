"""Whisper's audio encoder, which several families have: convolutions over log-mel frames, then transformer blocks;
arXiv:2212.04356, section 2.2.

N positions, D hidden size, M mel bands, F frames of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.media import InPieces
from headrace.layers.media_spec import AudioSpec
from headrace.layers.model import number_layers
from headrace.layers.norm import make_norm
from headrace.layers.residual import Residual
from headrace.layers.vision import VisionBlock, make_spans

KERNEL = 3
"""Frames that a convolution sees at a time."""


class AudioEncoder(nn.Module):
    """``frames [n, F, M] -> [N, D]``, before ``norm``, which families apply when they have pooled."""

    def __init__(self, spec: AudioSpec, build: Build):
        super().__init__()
        self.spec, size = spec, spec.blocks.hidden_size
        self.first = Linear(build, KERNEL * spec.num_mels, size, bias=True)
        self.second = Linear(build, KERNEL * size, size, bias=True)
        self.positions = build.parameter(spec.num_positions, size)
        self.blocks = number_layers([VisionBlock(spec.blocks, build) for _ in range(spec.blocks.num_layers)], 0)
        self.norm = make_norm(spec.blocks.norm, size, build)

    def encode(self, frames: torch.Tensor, lengths: Sequence[int] | None = None) -> InPieces[torch.Tensor]:
        """Of window i the first ``lengths[i]`` positions, which attend to one another alone (None: all of each), one
        window after the other; yields behind each layer."""
        x = F.gelu(_convolve(self.first, frames, stride=1))
        x = F.gelu(_convolve(self.second, x, stride=2)) + self.positions
        lengths = [x.shape[1]] * len(x) if lengths is None else list(lengths)
        is_whole = all(length == x.shape[1] for length in lengths)
        x = x.flatten(0, 1) if is_whole else torch.cat([own[:n] for own, n in zip(x, lengths, strict=True)])
        spans = make_spans(lengths, x.device)
        residual = Residual(x)
        del frames
        for block in self.blocks:
            block(residual, spans)
            yield
        return residual.add_pending()


def _convolve(kernel: Linear, x: torch.Tensor, *, stride: int) -> torch.Tensor:
    """``[n, F, C] -> [n, F / stride, D]``, zeros beyond the ends; ``kernel`` is that of a convolution [D, C, KERNEL] as
    a matrix."""
    cut = F.pad(x, (0, 0, 1, 1)).unfold(1, KERNEL, stride)  # [n, F / stride, C, KERNEL]
    return kernel(cut.flatten(2).flatten(0, 1)).unflatten(0, cut.shape[:2])


def adapt_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], *, prefix: str | tuple[str, ...] = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint, of which those below ``prefix`` get what `AudioEncoder` expects: kernels of
    convolutions as matrices, and biases of zero for keys, which have none of their own."""
    for name, tensor in tensors:
        if not name.startswith(prefix):
            yield name, tensor
            continue
        yield name, tensor.flatten(1) if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 else tensor
        if name.endswith(".k_proj.weight"):
            yield name.removesuffix("weight") + "bias", torch.zeros(tensor.shape[0], dtype=torch.float32)
