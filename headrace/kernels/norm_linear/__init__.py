"""Residual addition, RMS norm, matrix product and gated activation in one launch, for the few rows of a small
decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import KernelQuery, Operation, requires


@dataclass(frozen=True, slots=True)
class Norm:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)``; ``weight`` [D]."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


NORM_LINEAR = Operation("norm_linear kernel")
"""``norm_linear(x, residual [M, D], norm: Norm, weight [O, D], bias [O] | None, activation="") -> (out, total)``:
``total = x + residual`` [M, D] in the residual's dtype, in memory of its own; ``out`` [M, O] is the RMS norm of
``total`` times ``weight``, plus ``bias``. With an ``activation``, "silu" or "gelu_tanh", ``weight`` stacks gate and up
and ``out`` [M, O / 2] is ``activation(gate) * up``. M satisfies `fits`.

``total`` and the product are rounded to x's dtype as if stored; the normalised row is not."""

MOST_ROWS = 2
MOST_WIDTH = 8192
MOST_WEIGHTS = 2**24


def fits(rows: int) -> bool:
    """Whether so many rows are few enough to be worth it."""
    return 0 < rows <= MOST_ROWS


NORM_LINEAR.add(
    "reference", "headrace.kernels.norm_linear.reference:norm_linear", doc="the separate kernels' references in turn"
)

_on_gpu = requires(device="cuda", dtypes=("float16", "bfloat16"))
_on_hopper = requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(9, 0))


def _reason_against_shape(query: KernelQuery) -> str | None:
    width = query.shape.get("in_width", 0)
    if width % 8 or not 256 <= width <= MOST_WIDTH:
        return f"takes 256 to {MOST_WIDTH} inputs in steps of 8"
    if width * query.shape.get("out_width", 0) > MOST_WEIGHTS:
        return f"takes at most {MOST_WEIGHTS} weights: reading more takes longer than the launches that joining saves"
    return None


NORM_LINEAR.add(
    "triton", "headrace.kernels.norm_linear.triton:norm_linear",
    supports=lambda q: _on_gpu(q) or _reason_against_shape(q), priority=10,
    doc="a GEMV whose programs normalise the row themselves",
)
NORM_LINEAR.add(
    "triton_pdl", "headrace.kernels.norm_linear.triton:norm_linear_pdl",
    supports=lambda q: _on_hopper(q) or _reason_against_shape(q), priority=15,
    doc="with dependent launch",
)
