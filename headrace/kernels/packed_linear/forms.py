"""The forms in which a layer on a CPU may store its weight instead of a plain parameter, behind one interface.

`WEIGHT_FORMS` (in the package) registers the lossless ones; a quantised weight is a `PanelWeight` whose matrix has
another format.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear import PACKED_GATED, PACKED_LINEAR, PACKED_ROWS
from headrace.kernels.packed_linear.layout import PackedMatrix, chunk_rows, pack_floats, unpack
from headrace.kernels.rowwise import Gate

MOST_TURNED_ROWS = 16
"""Rows up to which torch's GEMM is faster with swapped operands, see `TurnedWeight`."""

LEAST_GATED_ROWS = 256
"""Above this many rows `PanelWeight` fuses the product with the activation; threads then work on blocks of rows."""


class StoredWeight(Protocol):
    """A weight [O, I] as a layer keeps it."""

    shape: tuple[int, int]
    num_bytes: int

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``x [T, I] -> [T, O]`` in ``out_dtype``, x's if None."""

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
        """The product fused with the gated activation; None where two calls are as fast."""

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight, [T] -> [T, I]."""

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as a new plain tensor."""


class PanelWeight:
    """A weight in packed layout; see `StoredWeight`. Fused kernels, such as `decoder_layers`, read ``matrix``."""

    def __init__(self, matrix: PackedMatrix):
        self.matrix, self.shape, self.num_bytes = matrix, matrix.shape, matrix.num_bytes
        query = KernelQuery("cpu", "float32")
        self._linear, self._gated, self._rows = (
            PACKED_LINEAR.choose(query), PACKED_GATED.choose(query), PACKED_ROWS.choose(query)
        )

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._linear(x, self.matrix, bias, out_dtype)

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
        is_faster = x.shape[0] > LEAST_GATED_ROWS and not gate.is_clamped
        return self._gated(x, self.matrix, bias, gate.kind) if is_faster else None

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._rows(self.matrix, ids, dtype)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return unpack(self.matrix, dtype)


class TurnedWeight:
    """A plain weight, multiplied by torch; with swapped operands (``W @ x.T``) for at most ``most_turned`` rows. See
    `StoredWeight`."""

    def __init__(self, weight: torch.Tensor, most_turned: int = MOST_TURNED_ROWS):
        self._weight, self.shape, self.num_bytes, self._most_turned = (
            weight, tuple(weight.shape), weight.nbytes, most_turned
        )

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if x.shape[0] > self._most_turned:
            out = F.linear(x, self._weight, bias)
        else:
            out = torch.mm(self._weight, x.t()).t().contiguous()
            out = out if bias is None else out.add_(bias)
        return out.to(out_dtype or x.dtype)

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
        return None

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.embedding(ids, self._weight).to(dtype)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return self._weight.to(dtype, copy=True)


class OnednnWeight:
    """A weight in oneDNN's blocked layout; see `StoredWeight`. Its rows cannot be looked up, so it cannot serve as an
    embedding."""

    def __init__(self, weight: torch.Tensor):
        # 16 rows: the batch size that oneDNN lays the weight out for; others work as well
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self.shape, self.num_bytes = tuple(weight.shape), weight.nbytes

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "").to(out_dtype or x.dtype)

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
        return None

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("never chosen for a weight whose rows are looked up")

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return self._packed.to_dense().to(dtype)


def keep_plain(weight: torch.Tensor) -> TurnedWeight:
    """A plain weight, multiplied by torch's GEMM for any number of rows."""
    return TurnedWeight(weight, most_turned=0)


def keep_in_panels(weight: torch.Tensor) -> PanelWeight:
    """A weight in packed layout; float32 values that all fit bfloat16 exactly are stored as bfloat16."""
    return PanelWeight(
        pack_floats(weight.bfloat16() if weight.dtype == torch.float32 and fits_bfloat16(weight) else weight)
    )


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Whether rounding a float32 tensor to bfloat16 changes no value."""
    return all(torch.equal(rows, rows.bfloat16().float()) for rows in weight.split(chunk_rows(weight.shape[1])))
