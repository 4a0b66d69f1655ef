"""The plain matrix product with a stored weight."""

from headrace.kernels.operation import Operation

LINEAR = Operation("linear kernel")
"""``linear(x [T, I], weight [O, I], bias [O] | None) -> [T, O]`` in x's dtype."""

LINEAR.add("reference", "headrace.kernels.linear.reference:linear", doc="torch's own GEMM")
