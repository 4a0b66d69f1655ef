"""Root-mean-square norm, alone and fused with the residual addition before it."""

from headrace.kernels.operation import Operation, requires

RMS_NORM = Operation("rms_norm kernel")
"""``rms_norm(x [T, D], weight [D], eps, offset=0.0) -> [T, D]``: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``,
computed in float32, returned in x's dtype. x may be a strided view whose last dimension is contiguous."""

ADD_RMS_NORM = Operation("add_rms_norm kernel")
"""``add_rms_norm(x, residual, weight, eps, offset=0.0) -> (normed, new_residual)`` with ``new_residual = x +
residual``; residual may be overwritten and returned as the new one, x may not. All [T, D]; or x is sums [S, T, D] in
float32, which are added up in their order and rounded to residual's dtype first."""

RMS_NORM.add("reference", "headrace.kernels.rms_norm.reference:rms_norm", doc="plain torch")
ADD_RMS_NORM.add("reference", "headrace.kernels.rms_norm.reference:add_rms_norm", doc="plain torch")

_on_cpu = requires(device="cpu", dtypes=("float32", "bfloat16", "float16"))
_on_gpu = requires(device="cuda")
_on_hopper = requires(device="cuda", capability=(9, 0))
for _operation, _name in ((RMS_NORM, "rms_norm"), (ADD_RMS_NORM, "add_rms_norm")):
    _operation.add("cpu", f"headrace.kernels.rms_norm.cpu:{_name}", supports=_on_cpu, priority=10, doc="own C++, fused")
    _operation.add(
        "triton", f"headrace.kernels.rms_norm.triton:{_name}", supports=_on_gpu, priority=10, doc="one pass, fused"
    )
    _operation.add(
        "triton_pdl", f"headrace.kernels.rms_norm.triton:{_name}_pdl", supports=_on_hopper, priority=15,
        doc="with dependent launch"
    )
