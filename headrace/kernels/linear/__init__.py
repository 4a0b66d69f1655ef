"""Matrix products with a stored weight, alone and fused with the norm before them or the activation after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import KernelQuery, Operation, requires, requires_hopper

LINEAR = Operation("linear kernel")
"""``linear(x [T, I], weight [O, I], bias [O] | None) -> [T, O]`` in x's dtype."""

LINEAR_SUMS = Operation("linear kernel with partial sums")
"""``linear_sums(x [T, I], weight [O, I], bias [O] | None, residual [T, O] | None)`` returns one of three: the product
[T, O] in x's dtype; for few outputs split-K partial sums [S, T, O] float32, which `ADD_RMS_NORM` adds up; for many rows
None, when the product has been added to the residual in place (in float32), which saves the following norm one read and
one write."""

GATED_LINEAR = Operation("gated linear kernel")
"""``gated_linear(x [T, I], weight [2F, I], bias [2F] | None, activation) -> [T, F] | None``: ``activation(gate) * up``
of a weight that stacks gate and up, each rounded to x's dtype as if stored; None where two separate kernels are as
fast. ``activation`` is "silu" or "gelu_tanh"."""

LINEAR.add("reference", "headrace.kernels.linear.reference:linear", doc="torch's own GEMM")

LINEAR_SUMS.add("reference", "headrace.kernels.linear.reference:linear_sums", doc="torch's own GEMM")
GATED_LINEAR.add(
    "reference", "headrace.kernels.linear.reference:gated_linear", doc="torch's own GEMM, then the activation"
)

MOST_OUTPUTS = 2**16
"""A larger weight, such as an LM head, torch's GEMM already reads at memory bandwidth."""

_in_half = requires(device="cuda", dtypes=("float16", "bfloat16"))
_on_hopper = requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(9, 0))


def _reason_against_shape(query: KernelQuery) -> str | None:
    # steps of 8 half-precision values: rows of x and of the weight then begin at multiples of 16 bytes
    width, outputs = query.shape.get("in_features", 0), query.shape.get("out_features", 0)
    if width % 8 or width < 256 or not 256 <= outputs <= MOST_OUTPUTS:
        return f"takes 256 or more inputs in steps of 8 and 256 to {MOST_OUTPUTS} outputs"
    return None


def _reason_against_tiles(query: KernelQuery) -> str | None:
    return requires_hopper(query) or _in_half(query) or _reason_against_shape(query)


for _operation, _name in ((LINEAR, "linear"), (LINEAR_SUMS, "linear_sums")):
    _operation.add_triton(
        f"headrace.kernels.linear.triton:{_name}", supports=lambda q: _in_half(q) or _reason_against_shape(q),
        doc="GEMV for one row or two, skinny GEMM for up to 8, torch beyond",
    )
    _operation.add(
        "gluon_pdl", f"headrace.kernels.linear.hopper:{_name}", supports=_reason_against_tiles, priority=20,
        doc="the same, and tiles on tensor cores for up to 256 rows",
    )
GATED_LINEAR.add(
    "cuda", "headrace.kernels.linear.gated_product:gated_linear", supports=_reason_against_tiles, priority=20,
    doc="tiles on tensor cores for up to 256 rows, own CUDA C++ in one wave beside large weights, and for many rows",
)

LINEAR_FLOAT = Operation("linear kernel with float32 output")
"""``linear_float(x [T, I], weight [O, I]) -> [T, O]`` float32, unrounded where the device's GEMM can store its
accumulator."""

LINEAR_FLOAT.add("reference", "headrace.kernels.linear.reference:linear_float", doc="torch's own GEMM, then a cast")
LINEAR_FLOAT.add(
    "cublas", "headrace.kernels.linear.reference:linear_into_float", supports=_in_half, priority=10,
    doc="torch's own GEMM, stored as float32",
)
LINEAR_FLOAT.add(
    "triton_pdl", "headrace.kernels.linear.triton:linear_float_pdl", supports=_on_hopper, priority=15,
    doc="GEMV for one row or two, skinny GEMM for up to 8, torch beyond",
)


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

``total`` and the product are rounded to x's dtype as if stored; the normalised row is not rounded."""

MOST_ROWS = 2
MOST_WIDTH = 8192
"""A program holds a whole row of inputs in registers."""
MOST_WEIGHTS = 2**24


def fits(rows: int) -> bool:
    """Whether `NORM_LINEAR` pays off for this many rows: every program repeats the norm of all of them."""
    return 0 < rows <= MOST_ROWS


NORM_LINEAR.add(
    "reference", "headrace.kernels.linear.reference:norm_linear", doc="the separate kernels' references in turn"
)


def _reason_against_norm(query: KernelQuery) -> str | None:
    width = query.shape.get("in_features", 0)
    if width % 8 or not 256 <= width <= MOST_WIDTH:
        return f"takes 256 to {MOST_WIDTH} inputs in steps of 8"
    if width * query.shape.get("out_features", 0) > MOST_WEIGHTS:
        return f"takes at most {MOST_WEIGHTS} weights: reading more takes longer than the launches that fusing saves"
    return None


NORM_LINEAR.add_triton(
    "headrace.kernels.linear.norm_linear:norm_linear", supports=lambda q: _in_half(q) or _reason_against_norm(q),
    doc="a GEMV whose programs normalise the row themselves",
)


def _reason_against_few_rows(query: KernelQuery) -> str | None:
    if query.capability[0] != 9 or query.dtype != "bfloat16":
        return "needs bfloat16 on Hopper"
    width = query.shape.get("in_features", 0)
    return f"takes 256 to {MOST_WIDTH} inputs in steps of 8" if width % 8 or not 256 <= width <= MOST_WIDTH else None


NORM_LINEAR.add(
    "cuda_pdl", "headrace.kernels.linear.rows:multiply_normalised", supports=_reason_against_few_rows, priority=20,
    doc="own CUDA C++ that copies weights ahead",
)
