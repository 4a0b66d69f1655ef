"""Parts of vision encoders: transformer blocks with bidirectional attention within spans, rotary positions in two axes.

N patches, D hidden size of the encoder, H heads, E head dim. Towers of families put them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from headrace.base.media import MediaPlace
from headrace.kernels.span_attention import SPAN_ATTENTION, Spans
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.loading import Targets
from headrace.layers.media import InPieces
from headrace.layers.media_spec import ImageSpec, SizedImageSpec, VisionSpec
from headrace.layers.mlp import ACTIVATIONS, GatedMlp, Mlp
from headrace.layers.model import number_layers
from headrace.layers.norm import LayerNorm, RmsNorm, make_norm
from headrace.layers.residual import Residual
from headrace.memory.copies import to_device

INNER_STEP = 64
"""Inner sizes of MLPs are padded to multiples of it: rows then begin at multiples of 16 bytes, without which GPUs'
products are several times slower (Qwen2.5-VL has 3,420), and fill tiles of tensor cores."""

QK_NORM_EPS = 1e-6


class VisionBlock(nn.Module):
    """Attention and MLP, each added to the residual stream [N, D]; the MLP's output is left pending."""

    def __init__(self, spec: VisionSpec, build: Build):
        super().__init__()
        size, self.num_heads, self.scale = spec.hidden_size, spec.num_heads, spec.head_dim**-0.5
        self.attention_norm = make_norm(spec.norm, size, build)
        self.qkv = Linear(build, size, {"q": size, "k": size, "v": size}, bias=spec.qkv_bias)
        self.output = Linear(build, size, size, bias=spec.output_bias)
        self.mlp_norm = make_norm(spec.norm, size, build)
        mlp = replace(spec.mlp, intermediate_size=pad_size(spec.mlp.intermediate_size))
        self.mlp = (GatedMlp if mlp.gated else Mlp)(mlp, size, build)
        self.q_norm = RmsNorm(build, size, QK_NORM_EPS) if spec.qk_norm else None
        self.k_norm = RmsNorm(build, size, QK_NORM_EPS) if spec.qk_norm else None
        self.attention_scale = build.parameter(size) if spec.has_scales else None
        self.mlp_scale = build.parameter(size) if spec.has_scales else None
        self._attend = SPAN_ATTENTION.choose(build.query(head_dim=spec.head_dim))

    def attend_by(self, attend: Callable[..., torch.Tensor]) -> None:
        """Attend otherwise than in both directions; ``attend`` is called as `SPAN_ATTENTION` is."""
        self._attend = attend

    def forward(self, residual: Residual, spans: Spans, cos_sin: torch.Tensor | None = None) -> None:
        """``cos_sin`` [N, E] float32: half cosines, half sines, None for no rotation."""
        qkv = self.qkv(self.attention_norm.add(residual)).unflatten(-1, (3, -1))
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, 0], qkv[:, 1] = self.q_norm(qkv[:, 0]), self.k_norm(qkv[:, 1])
        q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).unbind(1)
        attended = self._attend(q, k, v, spans, self.scale, cos_sin).flatten(1)
        if self.attention_scale is None or self.mlp_scale is None:
            self.output.add_to(residual, attended)
            self.mlp.add(self.mlp_norm, residual)
        else:
            residual.pending = self.output(attended).mul_(self.attention_scale)
            residual.pending = self.mlp(self.mlp_norm.add(residual)).mul_(self.mlp_scale)


def pad_size(intermediate_size: int) -> int:
    """The size of an MLP's inner vectors here: the checkpoint's, padded with zeros to a multiple of `INNER_STEP`."""
    return -(-intermediate_size // INNER_STEP) * INNER_STEP


def pad_weights(
    tensors: Iterable[tuple[str, torch.Tensor]], targets: Targets, encoder: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint as targets take them: those of an encoder's MLPs with zeros behind."""
    blocks = [module for module in encoder.modules() if isinstance(module, VisionBlock)]
    padded = {each.untyped_storage().data_ptr() for block in blocks for each in block.mlp.parameters()}
    for name, tensor in tensors:
        target = targets.get(name)
        is_padded = target is not None and target.untyped_storage().data_ptr() in padded
        if target is not None and is_padded and isinstance(tensor, torch.Tensor) and target.dim() == tensor.dim():
            sizes = list(zip(target.shape, tensor.shape, strict=True))
            if all(own in (given, pad_size(given)) for own, given in sizes):
                tensor = F.pad(tensor, [size for own, given in reversed(sizes) for size in (0, own - given)])
        yield name, tensor


def fit_dims(
    tensors: Iterable[tuple[str, torch.Tensor]], targets: Targets
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with the dims of their targets: kernels of patch embeddings as matrices, since a convolution whose stride
    is its size is a product, and class tokens and positions without a batch."""
    for name, tensor in tensors:
        target = targets.get(name)
        if target is not None and isinstance(tensor, torch.Tensor) and tensor.dim() > target.dim():
            is_same = tensor.numel() == target.numel()
            tensor = tensor.reshape(target.shape) if is_same else tensor
        yield name, tensor


def place_patches(grids: list[tuple[int, ...]], merge: int) -> np.ndarray:
    """Row and column [2, N] of each patch of images and videos with grids (time, height, width), in the order of
    processors that put the ``merge`` x ``merge`` patches of a merged one together."""
    found = []
    for time, height, width in grids:
        blocks = (height // merge, merge, width // merge, merge)
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        places = [axis.reshape(blocks).transpose(0, 2, 1, 3).ravel() for axis in (rows, columns)]
        found.append(np.tile(np.stack(places), time))
    return np.concatenate(found, axis=1)


def rotate_by_places(places: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Cosines and sines [N, E] float32 for ``places`` [2, N]: a quarter of the dims turns with the row, the next with
    the column, and the upper half as the lower."""
    quarter = head_dim // 2
    frequencies = theta ** -(torch.arange(0, quarter, 2, dtype=torch.float32, device=places.device) / quarter)
    angles = torch.cat([axis[:, None] * frequencies for axis in places.float()], dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def make_spans(lengths: list[int], device: torch.device) -> Spans:
    """Spans of these lengths."""
    numbers = to_device(np.concatenate(([0], np.cumsum(lengths), [0, 0])).astype(np.int32), device)
    return Spans(lengths, numbers[:-2], numbers[-2:])


class PatchMerger(nn.Module):
    """``[N, D] -> [N / merge^2, O]``: patches of a block together through two products. The norm is that of single
    patches or, with ``norms_merged``, of blocks."""

    def __init__(self, spec: VisionSpec, merge: int, output_size: int, build: Build, *, norms_merged: bool = False):
        super().__init__()
        self.size, self._norms_merged = spec.hidden_size * merge**2, norms_merged
        self.norm = make_norm(spec.norm, self.size if norms_merged else spec.hidden_size, build)
        self.up = Linear(build, self.size, self.size, bias=True)
        self.down = Linear(build, self.size, output_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.reshape(-1, self.size)) if self._norms_merged else self.norm(x).reshape(-1, self.size)
        return self.down(F.gelu(self.up(x)))


class ImageEncoder(nn.Module):
    """``images [n, C, S, S] -> [n, patches, D]``."""

    def __init__(self, spec: ImageSpec, build: Build):
        super().__init__()
        self.spec, vision = spec, spec.vision
        size, norm = vision.hidden_size, vision.norm
        self.patches = Linear(build, vision.input_size, size, bias=vision.patch_bias)
        self.class_token = build.parameter(size) if spec.has_class_token else None
        self.positions = build.parameter(spec.side**2 + spec.has_class_token, size)
        self.first_norm = make_norm(norm, size, build) if spec.first_norm else None
        self.blocks = number_layers([VisionBlock(vision, build) for _ in range(vision.num_layers)], 0)
        # a layer norm also where the blocks have others (InternVL)
        self.last_norm = LayerNorm(build, size, norm.eps) if spec.last_norm else None

    def encode(
        self, images: torch.Tensor, num_layers: int | None = None, *, has_class_token: bool = False
    ) -> InPieces[torch.Tensor]:
        """What leaves layer ``num_layers`` (None: all, and the last norm), behind each of which it yields.
        ``has_class_token``: the class token too, which comes first."""
        count = len(images)
        x = self.patches(cut_patches(images, self.spec.patch_size)).unflatten(0, (count, -1))
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(count, 1, -1), x), dim=1)
        x = x + self.positions
        length = x.shape[1]
        x = x.flatten(0, 1)
        x = x if self.first_norm is None else self.first_norm(x)
        spans = make_spans([length] * count, images.device)
        residual = Residual(x)
        del images
        for block in list(self.blocks)[:num_layers]:
            block(residual, spans)
            yield
        x = residual.add_pending()
        if num_layers is None and self.last_norm is not None:
            x = self.last_norm(x)
        return x.unflatten(0, (count, length))[:, 0 if has_class_token else int(self.spec.has_class_token) :]


class SizedImageEncoder(nn.Module):
    """Pixtral's vision encoder, arXiv:2410.07073, section 2.2."""

    def __init__(self, spec: SizedImageSpec, build: Build):
        super().__init__()
        self.spec, self._device, vision = spec, build.device, spec.vision
        self.patches = Linear(build, vision.input_size, vision.hidden_size, bias=False)
        self.first_norm = make_norm(vision.norm, vision.hidden_size, build)
        self.blocks = number_layers([VisionBlock(vision, build) for _ in range(vision.num_layers)], 0)

    def encode(self, images: list[torch.Tensor]) -> InPieces[tuple[torch.Tensor, list[tuple[int, int]]]]:
        """``[1, C, H, W]`` each, to patches [N, D] of all, row by row, and the grid (rows, columns) of each image;
        yields behind each layer."""
        size = self.spec.patch_size
        grids = [(image.shape[2] // size, image.shape[3] // size) for image in images]
        places = to_device(place_patches([(1, *grid) for grid in grids], 1), self._device)
        residual = Residual(self.first_norm(self.patches(torch.cat([cut_patches(image, size) for image in images]))))
        cos_sin, spans = self._rotate(places), make_spans([rows * columns for rows, columns in grids], self._device)
        del images
        for block in self.blocks:
            block(residual, spans, cos_sin)
            yield
        return residual.add_pending(), grids

    def _rotate(self, places: torch.Tensor) -> torch.Tensor:
        """[N, E]: rows turn by the even frequencies of the head, columns by the odd ones."""
        dim = self.spec.vision.head_dim
        frequencies = self.spec.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=self._device) / dim)
        rows, columns = places.float()
        angles = torch.cat((rows[:, None] * frequencies[0::2], columns[:, None] * frequencies[1::2]), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


def crop_to_grid(pixels: torch.Tensor, place: MediaPlace) -> torch.Tensor:
    """The image [1, C, H, W] alone; processors pad images of a batch to one size. ``grid``: its height and width."""
    height, width = place.grid
    return pixels[:, :, :height, :width]


class Projector(nn.Module):
    """Two products with an activation between them, ``[N, D] -> [N, O]``, behind a layer norm if ``norm_eps``."""

    def __init__(
        self, input_size: int, hidden_size: int, build: Build, *, activation: str, bias: bool = True,
        norm_eps: float = 0.0
    ):
        super().__init__()
        self.norm = LayerNorm(build, input_size, norm_eps) if norm_eps else None
        self.up = Linear(build, input_size, hidden_size, bias=bias)
        self.down = Linear(build, hidden_size, hidden_size, bias=bias)
        self._activate = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.norm is None else self.norm(x)
        return self.down(self._activate(self.up(x)))


def cut_patches(images: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Images [n, C, S, S] as flat patches [n * patches, C * patch_size^2], row by row."""
    count, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images[:, :, : rows * patch_size, : columns * patch_size]
    cut = cut.reshape(count, channels, rows, patch_size, columns, patch_size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(count * rows * columns, channels * patch_size**2)
