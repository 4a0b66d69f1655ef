"""Products with packed weights on CPUs, in full precision, 8 or 4 bits. The layout is `layout.PackedMatrix`."""

from headrace.kernels.operation import KernelQuery, Operation

PACKED_LINEAR = Operation("packed linear kernel")
"""``packed_linear(x [T, I], weight: PackedMatrix [O, I], bias [O] | None, out_dtype=None) -> [T, O]`` in ``out_dtype``,
x's if None; x is float32 or bfloat16.

Accumulates in float32 or exact integers. With int8 weights each row of x is rounded to 8 bits with one scale, with
group formats with a scale per 32 inputs; for many rows a solution may round x to bfloat16 instead. Float32 rows and an
unquantised weight are multiplied in float32."""

PACKED_LINEAR.add(
    "reference", "headrace.kernels.packed_linear.reference:packed_linear", doc="unpacks the weight at every call"
)


def _reason_against(query: KernelQuery) -> str | None:
    if query.device != "cpu" or query.dtype not in ("float32", "bfloat16"):
        return "takes float32 and bfloat16 on a CPU"
    return None


PACKED_LINEAR.add(
    "native", "headrace.kernels.packed_linear.cpu:packed_linear", supports=_reason_against, priority=10,
    doc="own C++: AVX2, AVX-512 with VNNI and BF16, AMX; streams the weight once for few rows",
)

PACKED_GATED = Operation("packed gated kernel")
"""``packed_gated(x [T, I], weight: PackedMatrix [2 * O, I], bias [2 * O] | None, activation) -> [T, O]``: the product
followed by ``activation`` ("silu" or "gelu_tanh") of its first half times its second half."""

PACKED_GATED.add("reference", "headrace.kernels.packed_linear.reference:packed_gated", doc="product, then activation")
PACKED_GATED.add(
    "native", "headrace.kernels.packed_linear.cpu:packed_gated", supports=_reason_against, priority=10,
    doc="own C++: gate and up stay in the cache"
)

PACKED_ROWS = Operation("packed rows kernel")
"""``packed_rows(weight: PackedMatrix [O, I], rows [T] int64, dtype) -> [T, I]``: rows as float32 or bfloat16, as an
embedding looks them up."""

PACKED_ROWS.add("reference", "headrace.kernels.packed_linear.layout:gather_rows", doc="plain torch")
PACKED_ROWS.add(
    "native", "headrace.kernels.packed_linear.cpu:packed_rows", supports=_reason_against, priority=10, doc="own C++"
)

WEIGHT_FORMS = Operation("weight form")
"""``form(weight [O, I]) -> forms.StoredWeight``: ways to store a weight without loss; `choice` measures which is
fastest. The query's shape has ``in_features``, ``out_features``, and ``has_rows``: 1 where the weight is an embedding
too."""


def _reason_against_onednn(query: KernelQuery) -> str | None:
    # a tied embedding needs rows of the weight, which oneDNN's blocked layout does not give
    return "rows cannot be looked up" if query.shape.get("has_rows") else _reason_against(query)


WEIGHT_FORMS.add(
    "panels", "headrace.kernels.packed_linear.forms:keep_in_panels", supports=_reason_against, priority=30,
    doc="for PACKED_LINEAR"
)
WEIGHT_FORMS.add(
    "plain", "headrace.kernels.packed_linear.forms:keep_plain", supports=_reason_against, priority=20,
    doc="torch's own GEMM"
)
WEIGHT_FORMS.add(
    "onednn", "headrace.kernels.packed_linear.forms:OnednnWeight", supports=_reason_against_onednn, priority=10,
    doc="torch's packed GEMM"
)
WEIGHT_FORMS.add(
    "turned", "headrace.kernels.packed_linear.forms:TurnedWeight", supports=_reason_against,
    doc="torch's own GEMM, operands swapped for few rows"
)
