"""The plain matrix product with a stored weight."""

from headrace.kernels.operation import KernelQuery, Operation, requires

LINEAR = Operation("linear kernel")
"""``linear(x [T, I], weight [O, I], bias [O] | None) -> [T, O]`` in x's dtype."""

LINEAR.add("reference", "headrace.kernels.linear.reference:linear", doc="torch's own GEMM")

MOST_OUTPUTS = 2**16
"""A weight with more, such as a vocabulary's, torch's own GEMM reads at the speed of memory already."""

_in_half = requires(device="cuda", dtypes=("float16", "bfloat16"))
_on_hopper = requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(9, 0))


def _reason_against_shape(query: KernelQuery) -> str | None:
    width, outputs = query.shape.get("in_width", 0), query.shape.get("out_width", 0)
    if width % 8 or width < 256 or not 256 <= outputs <= MOST_OUTPUTS:
        return f"takes 256 or more inputs in steps of 8 and 256 to {MOST_OUTPUTS} outputs"
    return None


LINEAR.add(
    "triton", "headrace.kernels.linear.triton:linear", supports=lambda q: _in_half(q) or _reason_against_shape(q), priority=10,
    doc="GEMV for one row or two, skinny GEMM for up to 8, torch beyond",
)
LINEAR.add(
    "triton_pdl", "headrace.kernels.linear.triton:linear_pdl", supports=lambda q: _on_hopper(q) or _reason_against_shape(q), priority=15,
    doc="with dependent launch",
)

LINEAR_FLOAT = Operation("linear kernel with float32 output")
"""``linear_float(x [T, I], weight [O, I]) -> [T, O]`` float32, from the float32 sums where the device's GEMM gives them."""

LINEAR_FLOAT.add("reference", "headrace.kernels.linear.reference:linear_float", doc="torch's own GEMM, then a cast")
LINEAR_FLOAT.add(
    "cublas", "headrace.kernels.linear.reference:linear_into_float", supports=_in_half, priority=10, doc="torch's own GEMM, stored as float32",
)
