"""Mixtures of experts: choosing experts, and matrix products in which each group of rows has a weight of its own."""

from __future__ import annotations

from typing import TypedDict

from headrace.kernels.operation import KernelQuery, Operation, requires


class RouteShape(TypedDict):
    """The constants of a router, passed as keyword arguments; what they mean is said at `ROUTE`."""

    top_k: int
    score: str
    renormalise: bool
    scale: float
    num_groups: int
    top_groups: int
    group_best: int


ROUTE = Operation("route kernel")
"""``route(logits [T, X], choice_bias [X] float32 | None, **RouteShape) -> (ids [T, k] int64, weights [T, k] float32)``.

Scores are made of the logits in float32 by ``score``: ``softmax`` over X, ``sigmoid``, or ``sqrt_softplus``. Each token
chooses the ``top_k`` experts whose score plus choice bias is highest, in any order, no expert twice. With ``num_groups`` > 1
equal groups of neighbouring experts, only experts of the ``top_groups`` best groups can be chosen, a group being worth the
sum of its ``group_best`` highest choice scores. Weights are the chosen scores without bias, divided by their sum when
``renormalise``, times ``scale``. Which of equal scores wins is open.
"""

HASH_ROUTE = Operation("hash route kernel")
"""``hash_route(logits [T, X], table [V, k], token_ids [T], *, score, renormalise, scale) -> (ids [T, k], weights [T, k])``.

The same where the ids are those that ``table`` has for each token; they alone decide who is chosen, scores the weights.
"""

MASK_CHOICES = Operation("choice mask kernel")
"""``mask_choices(ids [T, k], num_tokens [1])``: in place, the choices of tokens from ``num_tokens`` on, which only pad a
step, become -1: nobody. The number stays on the device.
"""

GROUPED_LINEAR = Operation("grouped linear kernel")
"""``grouped_linear(x [N, I], weight [X, O, I], bias [X, O] | None, ends [X] int32, experts [N] int64) -> [N, O]``.

Rows are sorted by expert: those of expert e are ``ends[e - 1]`` to ``ends[e]``, and ``experts`` says the same row by row.
Rows behind the last end belong to nobody: what becomes of them is open.
Row n becomes ``x[n] @ weight[experts[n]].T + bias[experts[n]]``. An expert may have no rows. Asked for with ``in_width``
and ``out_width``.
"""

HASH_ROUTE.add("reference", "headrace.kernels.moe.reference:hash_route", doc="plain torch")
MASK_CHOICES.add("reference", "headrace.kernels.moe.reference:mask_choices", doc="plain torch")
ROUTE.add("reference", "headrace.kernels.moe.reference:route", doc="plain torch")
GROUPED_LINEAR.add("reference", "headrace.kernels.moe.reference:grouped_linear", doc="a product per expert; waits for the row counts")

_on_hopper = requires(device="cuda", dtypes=("bfloat16",), capability=(9, 0))


def _reason_against_widths(query: KernelQuery) -> str | None:
    if any(query.shape.get(name, 0) % 8 for name in ("in_width", "out_width")):
        return "takes widths in steps of 8"
    return None


GROUPED_LINEAR.add(
    "triton", "headrace.kernels.moe.triton:grouped_linear", supports=requires(device="cuda", dtypes=("float32", "float16", "bfloat16")), priority=5,
    doc="own grouped GEMM; row counts stay on the device",
)
GROUPED_LINEAR.add(
    "cutlass", "headrace.kernels.moe.grouped_mm:grouped_linear", supports=lambda q: _on_hopper(q) or _reason_against_widths(q), priority=10,
    doc="torch's grouped GEMM; row counts stay on the device",
)
