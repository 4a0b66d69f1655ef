"""Gated activations: the first half of the input through a non-linearity, times the second half."""

from headrace.kernels.operation import Operation, requires

SILU_MUL = Operation("silu_mul kernel")
"""``silu_mul(x [T, 2F]) -> [T, F]``: ``silu(x[:, :F]) * x[:, F:]``."""

GELU_TANH_MUL = Operation("gelu_tanh_mul kernel")
"""``gelu_tanh_mul(x [T, 2F]) -> [T, F]``: the same with GELU's tanh approximation."""

SILU_MUL.add("reference", "headrace.kernels.activation.reference:silu_mul", doc="plain torch")
GELU_TANH_MUL.add("reference", "headrace.kernels.activation.reference:gelu_tanh_mul", doc="plain torch")

_on_gpu = requires(device="cuda")
_on_hopper = requires(device="cuda", capability=(9, 0))
for _operation, _name in ((SILU_MUL, "silu_mul"), (GELU_TANH_MUL, "gelu_tanh_mul")):
    _operation.add("triton", f"headrace.kernels.activation.triton:{_name}", supports=_on_gpu, priority=10, doc="one pass, fused")
    _operation.add("triton_pdl", f"headrace.kernels.activation.triton:{_name}_pdl", supports=_on_hopper, priority=5, doc="with dependent launch")
