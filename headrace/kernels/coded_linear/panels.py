"""Stores a `CodedMatrix` in the packed layout of CPU kernels, where that holds the same numbers."""

from __future__ import annotations

import torch

from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.kernels.packed_linear.forms import PanelWeight, StoredWeight
from headrace.kernels.packed_linear.layout import GROUP, Format, PackedMatrix, allocate, put_codes, put_groups
from headrace.kernels.rowwise import Gate

LEAST_SCALE = 2.0**-14
"""The least normal float16. Scales are kept in float16, which has more mantissa than bfloat16."""
MOST_SCALE = 65504.0


class PermutedWeight:
    """A weight whose inputs were put in another order when it was packed; see `StoredWeight`. ``order`` [I]: the input
    at each place."""

    def __init__(self, inner: PanelWeight, order: torch.Tensor):
        self._inner, self._order, self._places = inner, order, order.argsort()
        self.shape, self.num_bytes = inner.shape, inner.num_bytes + order.nbytes + self._places.nbytes

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._inner.multiply(x.index_select(1, self._order), bias, out_dtype)

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
        return self._inner.gate(x.index_select(1, self._order), bias, gate)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.rows(ids, dtype).index_select(1, self._places)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.unpack(dtype).index_select(1, self._places)


def store_in_panels(matrix: CodedMatrix, *, is_stack: bool) -> tuple[StoredWeight | None, str]:
    """A stored weight of the same numbers, up to the rounding of scale and zero * scale to float16, and which form it
    has; None and the reason where the packed layout has none. ``is_stack``: of experts, whose kernels read panels."""
    order = None
    if matrix.group_ids is not None:
        found = _sort_groups(matrix, matrix.group_ids)
        if found is None:
            return None, "its groups of inputs differ in size"
        matrix, order = found
        if torch.equal(order, torch.arange(len(order))):
            order = None
        elif is_stack:
            return None, "kernels of experts take no inputs in activation order"
    packed, reason = _pack(matrix)
    if packed is None:
        return None, reason
    panels = PanelWeight(packed)
    return (panels, reason) if order is None else (PermutedWeight(panels, order), f"{reason}, inputs permuted")


def _sort_groups(matrix: CodedMatrix, group_ids: torch.Tensor) -> tuple[CodedMatrix, torch.Tensor] | None:
    """The matrix with inputs sorted by group, and their order; None where groups differ in size."""
    counts = torch.bincount(group_ids, minlength=matrix.scales.shape[1])
    if (counts[:-1] != matrix.group).any() or counts[-1] > matrix.group:
        return None
    order = group_ids.argsort(stable=True)
    return CodedMatrix(
        matrix.code, matrix.codes[:, order], matrix.scales, matrix.group, matrix.zeros, matrix.rows, bits=matrix.bits
    ), order


def _pack(matrix: CodedMatrix) -> tuple[PackedMatrix | None, str]:
    if matrix.code is Code.INT and matrix.codes.dtype == torch.int8 and matrix.zeros is None and _has_one_group(matrix):
        return _pack_rows(matrix.by_row()), "8 bits, a scale per output and per token"
    if matrix.code not in (Code.INT, Code.E2M1):
        return None, f"no kernel here multiplies {matrix.code.value} codes"
    if _has_one_group(matrix):
        matrix = matrix.regroup(GROUP)
    if matrix.group % GROUP:
        return None, f"kernels here take scales of {GROUP} inputs or multiples, and these have {matrix.group}"
    packed = _pack_groups(matrix.by_row().regroup(GROUP))
    if packed is None:
        return None, "its scales do not fit float16"
    return packed, f"{'4' if packed.format.has_nibbles else '8'} bits in groups of {GROUP}"


def _has_one_group(matrix: CodedMatrix) -> bool:
    return matrix.scales.shape[1] == 1


def _pack_rows(matrix: CodedMatrix) -> PackedMatrix:
    """8 bits with a float32 scale per output: products round each row of inputs with one scale, as such checkpoints
    are meant to be multiplied."""
    packed = allocate(Format.INT8, *matrix.shape)
    put_codes(packed, 0, matrix.codes)
    assert packed.scales is not None
    packed.scales[: matrix.shape[0]] = matrix.scales[:, 0].float()
    return packed


def _pack_groups(matrix: CodedMatrix) -> PackedMatrix | None:
    scales, codes = matrix.scales.float(), matrix.codes
    if matrix.code is Code.E2M1:
        scales = scales / 2  # the table holds twice the numbers
    sizes = scales.abs()
    if ((sizes > MOST_SCALE) | ((sizes < LEAST_SCALE) & (sizes != scales.half().float().abs()))).any():
        return None
    zeros = None if matrix.zeros is None else matrix.zeros.float()
    if matrix.code is Code.E2M1:
        form = Format.E2M1_GROUP
        if zeros is not None:
            return None
    elif codes.dtype == torch.uint8 and matrix.bits <= 4:
        form = Format.INT4_GROUP
    else:
        form = Format.INT8_GROUP
        if codes.dtype == torch.uint8:
            codes = (codes ^ 128).view(torch.int8)  # less 128
            zeros = (torch.zeros_like(scales) if zeros is None else zeros) - 128
    mins = None if zeros is None or not zeros.any() else -zeros * scales
    packed = allocate(form, *matrix.shape, has_mins=mins is not None)
    put_codes(packed, 0, codes)
    put_groups(packed, 0, scales, mins)
    return packed
