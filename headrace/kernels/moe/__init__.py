"""Mixtures of experts: routing, and products in which each group of rows has its own weight.

T tokens, k choices a token, N pairs of token and expert, X experts, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from headrace.kernels.operation import LARGE_BLOCK, KernelQuery, Operation, requires, requires_hopper

if TYPE_CHECKING:
    import torch

    from headrace.kernels.coded_linear.device_codes import DeviceCodes
    from headrace.kernels.packed_linear.layout import PackedMatrix


class RouteShape(TypedDict):
    """The constants of a router, passed as keyword arguments. `ROUTE` explains each; ``num_groups`` 1 means no
    groups."""

    top_k: int
    score: str
    renormalise: bool
    scale: float
    num_groups: int
    top_groups: int
    group_best: int


ROUTE = Operation("route kernel")
"""``route(logits [T, X], choice_bias [X] float32 | None, **RouteShape) -> (ids [T, k] int64, weights [T, k] float32)``.

Scores are computed from the logits in float32 by ``score``: ``softmax`` over X, ``sigmoid``, or ``sqrt_softplus``. Each
token chooses the ``top_k`` experts of highest score plus choice bias, in any order, no expert twice. With
``num_groups`` > 1 equal groups of neighbouring experts, only experts of the ``top_groups`` best groups can be chosen; a
group's rank is the sum of its ``group_best`` highest choice scores. Weights are the chosen scores without bias, divided
by their sum when ``renormalise``, times ``scale``. Ties are broken arbitrarily. """

Stacked = tuple["torch.Tensor", "torch.Tensor | None"]
"""A matrix per expert [X, O, I], and a bias [X, O] or None."""

PackedStack = tuple["PackedMatrix", "torch.Tensor | None"]
"""The same in packed layout, experts stacked [X * O, I], and a bias [X, O] or None."""

CodedStack = tuple["DeviceCodes", "torch.Tensor | None"]
"""The same in codes, experts stacked [X * O, I], and a bias [X, O] or None."""

HASH_ROUTE = Operation("hash route kernel")
"""``hash_route(logits [T, X], table [V, k], token_ids [T], *, score, renormalise, scale) -> (ids [T, k], weights [T,
k])``.

As `ROUTE`, but a token's experts are looked up in ``table`` by its id; scores give only the weights.
"""

OWN_EXPERTS = Operation("kernel that numbers own experts")
"""``own_experts(ids [T, k] int64, first, count) -> [T, k] int64``: chosen experts, numbered from the first of the
``count`` that a rank has; -1 for others, and for no expert."""

NORM_ROUTE = Operation("norm and route kernel")
"""``norm_route(pending [T, D] or [S, T, D] float32, residual [T, D], norm: Norm, router [X, D], bias [X] | None,
choice_bias, **RouteShape) -> (x [T, D], new_residual [T, D], ids, weights) | None``.

`ADD_RMS_NORM`, the product of x with the router, plus its bias and rounded to x's dtype, and `ROUTE`; None where
separate kernels are as fast.
"""

LINEAR_ROUTE = Operation("router product and route kernel")
"""``linear_route(x [T, D], router [X, D], bias [X] | None, choice_bias, **RouteShape) -> (ids, weights) | None``.

The product of x with the router, plus its bias and rounded to x's dtype, and `ROUTE`; None where separate kernels are
as fast.
"""

GROUPED_LINEAR = Operation("grouped linear kernel")
"""``grouped_linear(x [N, I], weight [X, O, I], bias [X, O] | None, ends [X] int32, experts [N] int64) -> [N, O]``.

Row n becomes ``x[n] @ weight[experts[n]].T + bias[experts[n]]``. Rows are sorted by expert: expert e has rows
``ends[e - 1]`` (0 for the first) to ``ends[e]`` exclusive, maybe none; ``experts`` holds the same by row. The output of
rows from the last end on is undefined. The query's shape has
``in_features`` and ``out_features``.
"""

RUN_EXPERTS = Operation("experts kernel")
"""``run_experts(x [T, D], ids [T, k] int64, weights [T, k] float32, gate_up: Stacked, down: Stacked, gate: Gate) -> [T,
D]``.

The weighted sum over each token's experts of ``down(gate(gate_up(x)))``; ``gate_up`` [X, 2F, D] has the gate's rows
first, ``down`` is [X, D, F]. An id of -1 adds nothing; no token chooses an expert twice. The query's shape has
``width``, ``expert_width``, ``num_experts`` and ``top_k``. Only the reference takes any T; others as many tokens as
`is_few` allows.
"""

PACKED_EXPERTS = Operation("packed experts kernel")
"""``packed_experts(x [T, D], ids [T, k] int64, weights [T, k] float32, gate_up: PackedStack, down: PackedStack, gate:
Gate) -> [T, D]``.

The same for any T with matrices in packed layout; inputs are rounded as `PACKED_LINEAR` does. O of both is
a multiple of 16. x is float32 or bfloat16.
"""

CODED_EXPERTS = Operation("coded experts kernel")
"""``coded_experts(x [T, D], ids [T, k] int64, weights [T, k] float32, gate_up: CodedStack, down: CodedStack, gate:
Gate) -> [T, D]``.

The same for any T with matrices that a GPU keeps in codes (`DeviceCodes.fault_of_stack` is None): numbers are
multiplied in x's dtype, scales in float32, and no plain matrix is made. An id of -1 adds nothing; nothing waits for the
device.
"""

MANY_CODED_EXPERTS = Operation("coded experts kernel for many tokens")
"""As `CODED_EXPERTS`, where arithmetic bounds a step; all but the reference return None for codes that they do not
take: these are dequantised for the call then, as all are where there is no other solution."""

ROUNDED_EXPERTS = Operation("coded experts kernel that rounds activations")
"""As `CODED_EXPERTS` for MXFP4: rows of x, and of the gated activation, may be rounded as `QUANTISE_ROWS` does, to e4m3
with a scale for each row. Solutions do so where it is faster, the reference always."""

MANY_EXPERTS = Operation("experts kernel for many tokens")
"""As `RUN_EXPERTS`, where arithmetic bounds a step (not `is_few`); all but the reference may return None: then a step
runs `GROUP_PAIRS`, `GROUPED_LINEAR`, `GATE_PAIRS` and `SUM_PAIRS`, as all do where there is no other solution."""

GROUP_PAIRS = Operation("pair grouping kernel")
"""``group_pairs(ids [T, k] int64, num_experts) -> (order [N], place [N], ends [X])``, int32: the (token, expert)
pairs stably sorted by expert (pair n is choice n % k of token n // k); the position of each pair in that order, its
inverse; one past each expert's last pair. Pairs with id -1 come last; their entries are arbitrary.
"""

SUM_PAIRS = Operation("pair sum kernel")
"""``sum_pairs(rows [N, D], place [N] int32, weights [T, k] float32, ids [T, k] int64, bias [X, D] | None) -> [T, D]``:
the weighted sum of each token's rows, which lie at ``place`` as of `GROUP_PAIRS`, each plus its expert's ``bias``; in
float32, in the order of choice. An id of -1 adds nothing.
"""

GATE_PAIRS = Operation("pair activation kernel")
"""``gate_pairs(x [N, 2F], bias [X, 2F] | None, experts [N] int64, gate: Gate) -> [N, F]``: the gated activation of
rows, each plus its expert's ``bias``, which is added in float32."""

MOST_PAIRS_EACH = 96
"""Pairs per expert, on average, up to which a step is bound by reading weights."""


MOST_CODED_PAIRS_EACH = 192
"""The same for matrices in codes: beyond it, writing and reading plain ones for one call costs less than slower
products."""


def is_few(num_tokens: int, top_k: int, num_experts: int, most_each: int = MOST_PAIRS_EACH) -> bool:
    """Whether a step is bound by reading the experts' matrices, not by arithmetic. Only then do the faster solutions of
    `RUN_EXPERTS` apply."""
    return num_tokens * top_k <= most_each * num_experts


def count_rows(num_tokens: int, top_k: int, num_experts: int) -> float:
    """So many pairs nearly every expert has at most: the mean, and two standard deviations if tokens chose
    independently (Poisson)."""
    each = num_tokens * top_k / num_experts
    return each + 2 * each**0.5


HASH_ROUTE.add("reference", "headrace.kernels.moe.reference:hash_route", doc="plain torch")
ROUTE.add("reference", "headrace.kernels.moe.reference:route", doc="plain torch")
OWN_EXPERTS.add("reference", "headrace.kernels.moe.reference:own_experts", doc="plain torch")
NORM_ROUTE.add("reference", "headrace.kernels.moe.reference:norm_route", doc="one behind the other")
LINEAR_ROUTE.add("reference", "headrace.kernels.moe.reference:linear_route", doc="one behind the other")
GROUPED_LINEAR.add(
    "reference", "headrace.kernels.moe.reference:grouped_linear", doc="a product per expert; waits for the row counts"
)

GROUP_PAIRS.add("reference", "headrace.kernels.moe.reference:group_pairs", doc="plain torch: a sort")
SUM_PAIRS.add("reference", "headrace.kernels.moe.reference:sum_pairs", doc="plain torch")
GATE_PAIRS.add("reference", "headrace.kernels.moe.reference:gate_pairs", doc="plain torch")
RUN_EXPERTS.add(
    "reference", "headrace.kernels.moe.reference:run_experts",
    doc="plain torch, an expert at a time; waits for the choices"
)
MANY_EXPERTS.add(
    "reference", "headrace.kernels.moe.reference:run_experts",
    doc="plain torch, an expert at a time; waits for the choices"
)
CODED_EXPERTS.add(
    "reference", "headrace.kernels.moe.reference:coded_experts", doc="dequantises the matrices at every call"
)
MANY_CODED_EXPERTS.add(
    "reference", "headrace.kernels.moe.reference:coded_experts", doc="dequantises the matrices at every call"
)
ROUNDED_EXPERTS.add(
    "reference", "headrace.kernels.moe.reference:rounded_experts", doc="dequantises the matrices at every call"
)
PACKED_EXPERTS.add(
    "reference", "headrace.kernels.moe.reference:packed_experts", doc="unpacks the matrices at every call"
)
PACKED_EXPERTS.add(
    "native", "headrace.kernels.moe.cpu:packed_experts",
    supports=requires(device="cpu", dtypes=("float32", "bfloat16")), priority=10,
    doc="own C++: one call from choices to sums",
)

_on_hopper = requires(device="cuda", dtypes=("bfloat16",), capability=(9, 0))
_with_large_blocks = requires(device="cuda", dtypes=("bfloat16",), capability=(9, 0), block_bytes=LARGE_BLOCK)
_with_large_tiles = requires(
    device="cuda", dtypes=("float16", "bfloat16"), capability=(9, 0), block_bytes=160 << 10
)
_MOST_EXPERTS = 1024


def _reason_against_hopper(query: KernelQuery) -> str | None:
    return _on_hopper(query) or requires_hopper(query)


def _reason_against_plain(query: KernelQuery) -> str | None:
    if any(query.shape.get(name, 0) % 8 for name in ("width", "expert_width")):
        return "takes widths in steps of 8"
    return _reason_against_hopper(query)


def _reason_against_route(query: KernelQuery) -> str | None:
    if query.device != "cuda":
        return "needs a cuda device"
    if query.shape.get("num_groups", 1) > 1 or query.shape.get("num_experts", 0) > _MOST_EXPERTS:
        return f"chooses among up to {_MOST_EXPERTS} experts, in one group"
    return None


ROUTE.add("native", "headrace.kernels.moe.cpu:route", supports=requires(device="cpu"), priority=10, doc="own C++")
ROUTE.add_triton("headrace.kernels.moe.triton:route", supports=_reason_against_route, doc="one kernel")
NORM_ROUTE.add(
    "cuda", "headrace.kernels.moe.norm_route:norm_route", supports=_reason_against_hopper, priority=10,
    doc="own CUDA C++ for up to 16 tokens: a cluster has a token",
)
LINEAR_ROUTE.add(
    "cuda", "headrace.kernels.moe.linear_route:linear_route", supports=_reason_against_hopper, priority=10,
    doc="own CUDA C++ for up to 256 tokens: a cluster has 8 or 16, a block some experts",
)
HASH_ROUTE.add_triton("headrace.kernels.moe.triton:hash_route", supports=_reason_against_route, doc="one kernel")
OWN_EXPERTS.add_triton("headrace.kernels.moe.triton:own_experts", doc="one kernel")
RUN_EXPERTS.add(
    "triton_pdl", "headrace.kernels.moe.experts:run_experts_pdl", supports=_with_large_tiles, priority=15,
    doc="three kernels, four for more than 16 tokens, with dependent launch",
)
RUN_EXPERTS.add(
    "cuda", "headrace.kernels.moe.plain_few:run_experts", supports=_reason_against_plain, priority=20,
    doc="own CUDA C++ for one token of small experts, as of several ranks: two kernels; others as triton_pdl",
)
CODED_EXPERTS.add_triton(
    "headrace.kernels.moe.coded:run_experts", supports=requires(device="cuda", dtypes=("float16", "bfloat16")),
    doc="three kernels, four for more than 16 tokens",
)
CODED_EXPERTS.add(
    "cuda", "headrace.kernels.moe.coded_few:run_experts", supports=_with_large_blocks, priority=20,
    doc="own CUDA C++ for up to four tokens with MXFP4, one with FP8: two kernels; beyond as gluon_pdl on Hopper, else "
    "as triton_pdl",
)
CODED_EXPERTS.add(
    "gluon_pdl", "headrace.kernels.moe.many:run_experts_pdl", supports=_reason_against_hopper, priority=17,
    doc="MXFP4 with rows in two parts of FP8, many plain, and FP8 of more than 16 tokens with rows in FP8, by Hopper's "
    "tensor cores",
)
MANY_CODED_EXPERTS.add(
    "cuda", "headrace.kernels.moe.many:run_experts", supports=_reason_against_hopper, priority=10,
    doc="own CUDA C++: MXFP4 with plain rows, FP8 with rows in FP8",
)
ROUNDED_EXPERTS.add(
    "cuda", "headrace.kernels.moe.rounded:run_experts", supports=_reason_against_hopper, priority=10,
    doc="own CUDA C++: MXFP4 with rows in FP8 from 64 pairs an expert on; fewer as CODED_EXPERTS",
)


MANY_EXPERTS.add(
    "cuda", "headrace.kernels.moe.plain_many:run_experts", supports=_reason_against_plain, priority=10,
    doc="own CUDA C++: rows gathered by expert, two products, of which the first ends with the activation",
)


def _reason_against_torch(query: KernelQuery) -> str | None:
    # on others torch multiplies an expert at a time and waits for the row counts, which no captured graph may
    if query.capability[0] not in (9, 10):
        return "torch has it for compute capabilities 9.0 and 10.0"
    if any(query.shape.get(name, 0) % 8 for name in ("in_features", "out_features")):
        return "takes widths in steps of 8"
    return _on_hopper(query)


GROUPED_LINEAR.add(
    "triton", "headrace.kernels.moe.triton:grouped_linear",
    supports=requires(device="cuda", dtypes=("float32", "float16", "bfloat16")), priority=5,
    doc="own grouped GEMM; row counts stay on the device",
)
GROUPED_LINEAR.add(
    "cutlass", "headrace.kernels.moe.reference:grouped_mm",
    supports=_reason_against_torch, priority=10,
    doc="torch's grouped GEMM; row counts stay on the device",
)
GROUP_PAIRS.add(
    "triton", "headrace.kernels.moe.triton:group_pairs", supports=requires(device="cuda"), priority=10,
    doc="one kernel, a program an expert"
)
SUM_PAIRS.add(
    "triton", "headrace.kernels.moe.triton:sum_pairs", supports=requires(device="cuda"), priority=10, doc="one kernel"
)
GATE_PAIRS.add(
    "triton", "headrace.kernels.moe.triton:gate_pairs", supports=requires(device="cuda"), priority=10, doc="one kernel"
)
