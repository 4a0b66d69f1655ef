"""Quantised weights of a checkpoint and their scales, joined and dequantised as they stream past.

Knows forms by their types alone: 8-bit floats with a scale per square block, 4-bit floats two to a byte with a power of two
per 32. Refuses: what families call their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from headrace.base.errors import WeightError
from headrace.kernels.block_fp8 import BLOCK, DEQUANTISE_BLOCKS
from headrace.kernels.mxfp4 import BLOCK as MXFP4_BLOCK
from headrace.kernels.mxfp4 import DEQUANTISE_MXFP4
from headrace.kernels.operation import KernelQuery

Named = tuple[str, torch.Tensor]
WEIGHT = "weight"
SCALES = ("weight_scale_inv", "scale", "weight_scale")
"""How the scale of ``<module>.weight`` is called, after the module's name."""


def join_scales(tensors: Iterable[Named]) -> Iterator[Named]:
    """Pass tensors on, quantised weights dequantised to float32 or, where that is exact, bfloat16; their scales go away.

    Raises `WeightError` for a scale without its weight or the other way round, and for shapes that do not fit.
    """
    waiting: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        is_scale = kind in SCALES
        if not is_scale and not (kind == WEIGHT and tensor.dtype.itemsize == 1 and tensor.dim() == 2):
            yield name, tensor
        elif module not in waiting:
            waiting[module] = (name, tensor.clone())  # a tensor is ours until the next one is asked for
        else:
            _, other = waiting.pop(module)
            yield f"{module}.{WEIGHT}", dequantise(module, *((other, tensor) if is_scale else (tensor, other)))
    if waiting:
        names = sorted(name for name, _ in waiting.values())
        raise WeightError(f"{len(names)} quantised weights or scales have no counterpart: {', '.join(names[:6])}")


def dequantise(name: str, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight of one byte per element or pair of elements, by its type and the shape of its scales."""
    rows, columns = values.shape
    if values.dtype == torch.float8_e4m3fn and scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return DEQUANTISE_BLOCKS.choose(KernelQuery(values.device.type, "float32"))(values, scales, torch.float32)
    if values.dtype in (torch.int8, torch.uint8) and scales.shape == (rows, 2 * columns // MXFP4_BLOCK):
        chosen = DEQUANTISE_MXFP4.choose(KernelQuery(values.device.type, "bfloat16"))
        return chosen(values.view(torch.uint8), scales.view(torch.uint8), torch.bfloat16)
    raise WeightError(f"{name} is {values.dtype} {list(values.shape)} with scales {scales.dtype} {list(scales.shape)}; no known form of quantisation")
