"""Operations on each token's or request's row by itself, between the matrix products: norms, gated activations, rotary
embedding with the KV write.

T tokens, D hidden size, F intermediate size, H heads, K kv heads, E head dim, P pages. Norms, rotation
and softmax compute in float32 whatever the dtype.
"""

from __future__ import annotations

from typing import NamedTuple, NotRequired, TypedDict

import torch

from headrace.kernels.operation import Operation, requires

RMS_NORM = Operation("rms_norm kernel")
"""``rms_norm(x [T, D], weight [D], eps, offset=0.0) -> [T, D]``: ``x / sqrt(mean(x^2) + eps) * (weight + offset)`` in
x's dtype. x may be strided if its last dimension is contiguous."""

ADD_RMS_NORM = Operation("add_rms_norm kernel")
"""``add_rms_norm(x, residual, weight, eps, offset=0.0) -> (normed, new_residual)`` with ``new_residual = x +
residual``. The residual may be updated in place and returned, x may not be modified. x is [T, D], or split-K partial
sums [S, T, D] float32, which are first summed in order and rounded to the residual's dtype."""

ADD_LAYER_NORM = Operation("add_layer_norm kernel")
"""``add_layer_norm(x, residual, weight, bias [D] | None, eps, offset=0.0) -> (normed, new_residual)``: as
`ADD_RMS_NORM`, with mean 0 and variance 1 over the last dim, and the bias added."""

WRITE_SUM = Operation("write_sum kernel")
"""``write_sum(x, residual [T, D], out [T, D])``: ``out = x + residual``, with x as in `ADD_RMS_NORM`, or None for
nothing to add; neither changes. ``out`` may be strided if its last dimension is contiguous."""

SILU_MUL = Operation("silu_mul kernel")
"""``silu_mul(x [T, 2F]) -> [T, F]``: ``silu(x[:, :F]) * x[:, F:]``."""

GELU_TANH_MUL = Operation("gelu_tanh_mul kernel")
"""``gelu_tanh_mul(x [T, 2F]) -> [T, F]``: the same with GELU's tanh approximation."""

CLAMPED_SWIGLU = Operation("clamped_swiglu kernel")
"""``clamped_swiglu(x [T, 2F], *, limit, alpha, up_offset) -> [T, F]``: with g = min(x[:, :F], limit) and u = x[:, F:]
clamped to [-limit, limit], ``g * sigmoid(alpha * g) * (u + up_offset)``."""


class Gate(NamedTuple):
    """A gated activation: ``silu``, ``gelu_tanh``, or ``clamped`` with the numbers of `CLAMPED_SWIGLU`."""

    kind: str
    limit: float = 0.0
    alpha: float = 0.0
    up_offset: float = 0.0

    @property
    def is_clamped(self) -> bool:
        """Whether its numbers count: most fused kernels have the others alone."""
        return self.kind == "clamped"


class HeadShape(TypedDict):
    """The constants of a layer, passed as keyword arguments. ``rotary_dim`` <= ``head_dim``; ``interleaved`` rotates
    pairs (0, 1), (2, 3)... instead of (i, i + rotary_dim / 2). ``norm_*`` are read only with ``q_norm`` and ``k_norm``,
    ``scales`` only with int8 pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    norm_eps: float
    norm_offset: float
    scales: NotRequired[torch.Tensor]


ROPE_WRITE = Operation("rope_write kernel")
"""``rope_write(qkv, positions, cos_sin, slots, k_pages, v_pages, *, q_norm=None, k_norm=None, **HeadShape) -> q``:
everything between the qkv projection and attention.

``qkv`` [T, (H + 2K) * E] holds q, k, v in that order and may be overwritten. With ``q_norm`` and ``k_norm`` of [E] each
head of q and k is RMS-normalised and multiplied by ``weight + norm_offset``; with [H * E] and [K * E] all heads
together are. The first ``rotary_dim`` dims of q and k are rotated by ``cos_sin[positions]`` ([L, rotary_dim] float32:
first half cosines, second half sines; None: no rotation). k and v are written at ``slots`` [T] int64 (page * page_size
+ offset) of the pages [P, page_size, K, E]; rows may share a slot only in the null page. On CPUs int8 pages take codes
(layout in `headrace.kernels.attention.reference`) and ``scales``. Returns q [T, H, E], contiguous, in qkv's dtype.
"""

LATENT_WRITE = Operation("latent_write kernel")
"""``latent_write((q_rope, latent, k_rope), (positions, cos_sin, slots), pages, out, *, norm_weight [L], norm_eps,
interleaved)``: what `ROPE_WRITE` does, for MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1). L is ``kv_lora_rank``, E
``qk_rope_head_dim``, all of whose dims are rotated.

``latent`` [T, L] is RMS-normalised and, followed by the rotated ``k_rope`` [T, E], written at ``slots`` of the pages
[P, page_size, 1, L + E], whose rows may be further apart. ``q_rope`` [T, H, E] is rotated into ``out`` [T, H, E], which
may be itself. Inputs and ``out`` may be strided if their last dimension is contiguous."""


_on_cpu = requires(device="cpu", dtypes=("float32", "bfloat16", "float16"))
_MODULE = "headrace.kernels.rowwise"


for _operation, _name, _has_cpu in (
    (RMS_NORM, "rms_norm", True), (ADD_RMS_NORM, "add_rms_norm", True), (WRITE_SUM, "write_sum", False),
    (ADD_LAYER_NORM, "add_layer_norm", False),
    (SILU_MUL, "silu_mul", True),
    (GELU_TANH_MUL, "gelu_tanh_mul", True), (CLAMPED_SWIGLU, "clamped_swiglu", False), (ROPE_WRITE, "rope_write", True),
):
    _operation.add("reference", f"{_MODULE}.reference:{_name}", doc="plain torch")
    if _has_cpu:
        _operation.add("cpu", f"{_MODULE}.cpu:{_name}", supports=_on_cpu, priority=10, doc="own C++, fused")
    _operation.add_triton(f"{_MODULE}.triton:{_name}", doc="one pass, fused")

LATENT_WRITE.add("reference", f"{_MODULE}.reference:latent_write", doc="plain torch")
LATENT_WRITE.add("cpu", f"{_MODULE}.cpu:latent_write", supports=_on_cpu, priority=10, doc="the norm in own C++")
LATENT_WRITE.add_triton(f"{_MODULE}.latents:latent_write", doc="one kernel")
