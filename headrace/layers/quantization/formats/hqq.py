"""Checkpoints of HQQ in safetensors: integers of 1 to 8 bits with floating-point zero points. O outputs, I inputs, g
inputs (or outputs) of a group, N = O * I / g groups, b bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from headrace.base.errors import WeightError
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble

CODES, SCALE, ZERO, SHAPE, BITS, AXIS = "W_q", "scale", "zero", "shape", "nbits", "axis"
UNUSED = frozenset({
    "group_size", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype",
    "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
})
CODES_PER_WORD = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1.58: 4, 1: 8}
"""By bits; a word is a byte, for 3 bits int32."""


class Hqq:
    """See `Scheme`."""

    def __init__(self, query: SchemeQuery):
        self._query = query
        self._layout = Layout("HQQ", frozenset({CODES, SCALE, ZERO, SHAPE, BITS, AXIS}), _decode, unused=UNUSED)

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        return assemble(tensors, lambda module: self._layout, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _decode(module: str, parts: Parts) -> CodedMatrix | torch.Tensor:
    """``W_q``: codes [N, g] (``axis`` 1) or [g, N] (0) of the flattened weight, packed along the first dim, whose first
    part is in the highest bits; ``scale`` and ``zero`` one a group. Groups of consecutive outputs are dequantised."""
    (rows, columns), axis = (int(n) for n in parts[SHAPE]), int(parts[AXIS])
    bits = round(float(parts[BITS]), 2)
    width = CODES_PER_WORD.get(bits)
    scales, zeros = parts[SCALE].float(), parts[ZERO].float()
    if width is None or axis not in (0, 1):
        raise WeightError(f"{module}: HQQ with {bits:g} bits along axis {axis} is not read")
    num_groups = scales.numel()
    group = rows * columns // num_groups
    lines = num_groups if axis == 1 else group
    step = 3 if bits == 3 else 8 // width
    words = parts[CODES].view(torch.int32 if bits == 3 else torch.uint8)  # may be kept as floats
    codes = torch.cat([words >> step * place & (1 << step) - 1 for place in reversed(range(width))])[:lines]
    codes = codes.to(torch.uint8)
    if axis == 1 and columns % group == 0:
        return CodedMatrix(
            Code.INT, codes.view(rows, columns), scales.view(rows, -1), group, zeros.view(rows, -1), bits=step
        )
    return ((codes.float() - zeros) * scales).view(rows, columns)
