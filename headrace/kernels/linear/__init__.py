"""The plain matrix product with a stored weight."""

from headrace.kernels.operation import KernelQuery, Operation, requires

LINEAR = Operation("linear kernel")
"""``linear(x [T, I], weight [O, I], bias [O] | None) -> [T, O]`` in x's dtype."""

LINEAR.add("reference", "headrace.kernels.linear.reference:linear", doc="torch's own GEMM")

_in_half = requires(device="cuda", dtypes=("float16", "bfloat16"))
_on_hopper = requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(9, 0))


def _reason_against_shape(query: KernelQuery) -> str | None:
    width, outputs = query.shape.get("in_width", 0), query.shape.get("out_width", 0)
    if width % 8 or width < 256 or outputs < 256:
        return "takes weights from 256 x 256, inputs in steps of 8"
    return None


LINEAR.add(
    "triton", "headrace.kernels.linear.triton:linear", supports=lambda q: _in_half(q) or _reason_against_shape(q), priority=10,
    doc="GEMV for up to 4 rows, skinny GEMM for up to 8, torch beyond",
)
LINEAR.add(
    "triton_pdl", "headrace.kernels.linear.triton:linear_pdl", supports=lambda q: _on_hopper(q) or _reason_against_shape(q), priority=5,
    doc="with dependent launch",
)
