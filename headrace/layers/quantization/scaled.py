"""Checkpoint formats with a tensor of scales beside each weight: pairs the two and dequantises them during loading.
Formats are recognised by dtype, not by module name. O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from headrace.base.errors import WeightError
from headrace.kernels.block_scaled import DEQUANTISE_BLOCKS, DEQUANTISE_MXFP4, FP8_BLOCK, MXFP4_BLOCK
from headrace.kernels.operation import KernelQuery
from headrace.layers.quantization.contract import Named, SchemeQuery

WEIGHT = "weight"
SCALES = ("weight_scale_inv", "scale", "weight_scale")
"""Names, after ``<module>.``, of the tensor with the scales of ``<module>.weight``."""

Dequantise = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


class BlockFp8:
    """8-bit floats with a scale per block of 128 x 128, to float32; see `Scheme`."""

    def __init__(self, query: SchemeQuery):
        pass

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        return pair_scales(tensors, (torch.float8_e4m3fn,), dequantise_block_fp8)

    def finish(self, model: nn.Module) -> None:
        """Layers keep plain weights."""


class Mxfp4:
    """4-bit floats, two to a byte, with a power of two per 32, to bfloat16 without loss; see `Scheme`."""

    def __init__(self, query: SchemeQuery):
        pass

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        return pair_scales(tensors, (torch.int8, torch.uint8), dequantise_mxfp4)

    def finish(self, model: nn.Module) -> None:
        """Layers keep plain weights."""


def pair_scales(tensors: Iterable[Named], types: tuple[torch.dtype, ...], dequantise: Dequantise) -> Iterator[Named]:
    """Replace each matrix of ``types`` and its scales by ``dequantise(module, weight, scales)``; other tensors pass.
    Weight and scales may come in either order: the first is kept, as a copy, until the other arrives. Scales whose
    weight has another type, or is missing, pass unchanged. Raises `WeightError` for a weight without scales."""
    weights: dict[str, torch.Tensor] = {}
    scales: dict[str, Named] = {}
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        if kind in SCALES and module in weights:
            yield f"{module}.{WEIGHT}", dequantise(module, weights.pop(module), tensor)
        elif kind in SCALES:
            scales[module] = (name, tensor.clone())  # a tensor is valid only until the next one is requested
        elif kind != WEIGHT or tensor.dtype not in types or tensor.dim() != 2:
            if kind == WEIGHT and module in scales:  # this scale belongs to another scheme's format
                yield scales.pop(module)
            yield name, tensor
        elif module in scales:
            yield name, dequantise(module, tensor, scales.pop(module)[1])
        else:
            weights[module] = tensor.clone()
    yield from scales.values()
    if weights:
        raise WeightError(f"{len(weights)} quantised weights have no scale: {', '.join(sorted(weights)[:6])}")


def dequantise_block_fp8(module: str, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [O, I] e4m3 and scales [O / 128, I / 128], rounded up, to [O, I] float32."""
    rows, columns = values.shape
    _check_shape(module, values, scales, (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
    return DEQUANTISE_BLOCKS.choose(KernelQuery(values.device.type, "float32"))(values, scales, torch.float32)


def dequantise_mxfp4(module: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [O, I / 2], two to a byte, and e8m0 scales [O, I / 32] to [O, I] bfloat16."""
    rows, columns = codes.shape
    _check_shape(module, codes, scales, (rows, 2 * columns // MXFP4_BLOCK))
    dequantise = DEQUANTISE_MXFP4.choose(KernelQuery(codes.device.type, "bfloat16"))
    return dequantise(codes.view(torch.uint8), scales.view(torch.uint8), torch.bfloat16)


def _check_shape(module: str, values: torch.Tensor, scales: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(scales.shape) != expected:
        raise WeightError(
            f"{module}: {values.dtype} {list(values.shape)} needs scales {list(expected)}, the checkpoint has "
            f"{list(scales.shape)}"
        )
