"""Gated activations: the first half of the input through a non-linearity, times the second half."""

from headrace.kernels.operation import Operation, requires

SILU_MUL = Operation("silu_mul kernel")
"""``silu_mul(x [T, 2F]) -> [T, F]``: ``silu(x[:, :F]) * x[:, F:]``."""

GELU_TANH_MUL = Operation("gelu_tanh_mul kernel")
"""``gelu_tanh_mul(x [T, 2F]) -> [T, F]``: the same with GELU's tanh approximation."""

CLAMPED_SWIGLU = Operation("clamped_swiglu kernel")
"""``clamped_swiglu(x [T, 2F], *, limit, alpha, up_offset) -> [T, F]``: with g = min(x[:, :F], limit) and u = x[:, F:]
kept within -limit and limit, ``g * sigmoid(alpha * g) * (u + up_offset)``."""

SILU_MUL.add("reference", "headrace.kernels.activation.reference:silu_mul", doc="plain torch")
GELU_TANH_MUL.add("reference", "headrace.kernels.activation.reference:gelu_tanh_mul", doc="plain torch")
CLAMPED_SWIGLU.add("reference", "headrace.kernels.activation.reference:clamped_swiglu", doc="plain torch")

_on_cpu = requires(device="cpu", dtypes=("float32", "bfloat16", "float16"))
_on_gpu = requires(device="cuda")
_on_hopper = requires(device="cuda", capability=(9, 0))
for _operation, _name in ((SILU_MUL, "silu_mul"), (GELU_TANH_MUL, "gelu_tanh_mul")):
    _operation.add(
        "cpu", f"headrace.kernels.activation.cpu:{_name}", supports=_on_cpu, priority=10, doc="own C++, fused"
    )
for _operation, _name in ((SILU_MUL, "silu_mul"), (GELU_TANH_MUL, "gelu_tanh_mul"), (CLAMPED_SWIGLU, "clamped_swiglu")):
    _operation.add(
        "triton", f"headrace.kernels.activation.triton:{_name}", supports=_on_gpu, priority=10, doc="one pass, fused"
    )
    _operation.add(
        "triton_pdl", f"headrace.kernels.activation.triton:{_name}_pdl", supports=_on_hopper, priority=15,
        doc="with dependent launch"
    )
