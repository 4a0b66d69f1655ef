"""Operations on each token's or request's row by itself, between the matrix products: norms, gated activations, rotation
with the page write, the weights of residual streams, and the inputs of a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch

from headrace.kernels.operation import KernelQuery, Operation, requires

_on_cpu = requires(device="cpu", dtypes=("float32", "bfloat16", "float16"))
_on_gpu = requires(device="cuda")
_on_hopper = requires(device="cuda", capability=(9, 0))


RMS_NORM = Operation("rms_norm kernel")
"""``rms_norm(x [T, D], weight [D], eps, offset=0.0) -> [T, D]``: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``,
computed in float32, returned in x's dtype. x may be a strided view whose last dimension is contiguous."""

ADD_RMS_NORM = Operation("add_rms_norm kernel")
"""``add_rms_norm(x, residual, weight, eps, offset=0.0) -> (normed, new_residual)`` with ``new_residual = x +
residual``; residual may be overwritten and returned as the new one, x may not. All [T, D]; or x is sums [S, T, D] in
float32, which are added up in their order and rounded to residual's dtype first."""

RMS_NORM.add("reference", "headrace.kernels.rowwise.reference:rms_norm", doc="plain torch")
ADD_RMS_NORM.add("reference", "headrace.kernels.rowwise.reference:add_rms_norm", doc="plain torch")

for _operation, _name in ((RMS_NORM, "rms_norm"), (ADD_RMS_NORM, "add_rms_norm")):
    _operation.add("cpu", f"headrace.kernels.rowwise.cpu:{_name}", supports=_on_cpu, priority=10, doc="own C++, fused")
    _operation.add(
        "triton", f"headrace.kernels.rowwise.triton:{_name}", supports=_on_gpu, priority=10, doc="one pass, fused"
    )
    _operation.add(
        "triton_pdl", f"headrace.kernels.rowwise.triton:{_name}_pdl", supports=_on_hopper, priority=15,
        doc="with dependent launch"
    )

SILU_MUL = Operation("silu_mul kernel")
"""``silu_mul(x [T, 2F]) -> [T, F]``: ``silu(x[:, :F]) * x[:, F:]``."""

GELU_TANH_MUL = Operation("gelu_tanh_mul kernel")
"""``gelu_tanh_mul(x [T, 2F]) -> [T, F]``: the same with GELU's tanh approximation."""

CLAMPED_SWIGLU = Operation("clamped_swiglu kernel")
"""``clamped_swiglu(x [T, 2F], *, limit, alpha, up_offset) -> [T, F]``: with g = min(x[:, :F], limit) and u = x[:, F:]
kept within -limit and limit, ``g * sigmoid(alpha * g) * (u + up_offset)``."""

SILU_MUL.add("reference", "headrace.kernels.rowwise.reference:silu_mul", doc="plain torch")
GELU_TANH_MUL.add("reference", "headrace.kernels.rowwise.reference:gelu_tanh_mul", doc="plain torch")
CLAMPED_SWIGLU.add("reference", "headrace.kernels.rowwise.reference:clamped_swiglu", doc="plain torch")

for _operation, _name in ((SILU_MUL, "silu_mul"), (GELU_TANH_MUL, "gelu_tanh_mul")):
    _operation.add(
        "cpu", f"headrace.kernels.rowwise.cpu:{_name}", supports=_on_cpu, priority=10, doc="own C++, fused"
    )
for _operation, _name in ((SILU_MUL, "silu_mul"), (GELU_TANH_MUL, "gelu_tanh_mul"), (CLAMPED_SWIGLU, "clamped_swiglu")):
    _operation.add(
        "triton", f"headrace.kernels.rowwise.triton:{_name}", supports=_on_gpu, priority=10, doc="one pass, fused"
    )
    _operation.add(
        "triton_pdl", f"headrace.kernels.rowwise.triton:{_name}_pdl", supports=_on_hopper, priority=15,
        doc="with dependent launch"
    )

class HeadShape(TypedDict):
    """The constants of a layer, passed as keyword arguments. ``rotary_dim`` <= ``head_dim``; ``interleaved`` rotates
    pairs (0, 1), (2, 3)... instead of (i, i + rotary_dim / 2). ``norm_*`` matter only with ``q_norm`` and ``k_norm``,
    ``scales`` only with pages of int8."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    norm_eps: float
    norm_offset: float
    scales: NotRequired[torch.Tensor]


ROPE_WRITE = Operation("rope_write kernel")
"""``rope_write(qkv, positions, cos_sin, slots, k_pages, v_pages, *, q_norm=None, k_norm=None, **HeadShape) -> q``.

``qkv`` [T, (H + 2K) * E] is split in that order. With ``q_norm`` and ``k_norm`` ([E] each) every head of q and k is
RMS-normalised and multiplied by ``weight + norm_offset``; with [H * E] and [K * E], all heads of q together, and all of
k. The first ``rotary_dim`` dims of q and k are rotated by ``cos_sin[positions]`` ([L, rotary_dim] float32: the first
half cosines, the second sines; None: no rotation). k and v are written at ``slots`` [T] int64 (page * page_size +
offset) of the pages [P, page_size, K, E]; several rows may carry the same slot only in the null page. On CPUs pages of
int8 take codes (`headrace.kernels.attention.reference`), and ``scales`` what these are multiplied with. Returns q [T, H, E],
contiguous, in qkv's dtype; qkv may be overwritten.
"""

ROPE_WRITE.add("reference", "headrace.kernels.rowwise.reference:rope_write", doc="plain torch")

ROPE_WRITE.add("cpu", "headrace.kernels.rowwise.cpu:rope_write", supports=_on_cpu, priority=10, doc="own C++, fused")
ROPE_WRITE.add(
    "triton", "headrace.kernels.rowwise.triton:rope_write", supports=requires(device="cuda"), priority=10,
    doc="one pass, fused"
)
ROPE_WRITE.add(
    "triton_pdl", "headrace.kernels.rowwise.triton:rope_write_pdl",
    supports=requires(device="cuda", capability=(9, 0)), priority=15,
    doc="with dependent launch",
)

LATENT_WRITE = Operation("latent_write kernel")
"""``latent_write(q_rope [T, H, E], latent [T, L], k_rope [T, E], positions [T] int64, cos_sin [length, E] float32,
slots [T] int64, pages [P, page_size, 1, L + E], *, interleaved) -> q_rope [T, H, E]``.

Rotates ``q_rope`` and ``k_rope`` by ``cos_sin[positions]`` (first half cosines, second half sines) as `ROPE_WRITE`
does, and writes ``latent`` followed by the rotated ``k_rope`` at ``slots`` (page * page_size + offset). Several rows
may carry the same slot only in the null page. Returns the rotated ``q_rope``, which may be strided.
"""

LATENT_WRITE.add("reference", "headrace.kernels.rowwise.reference:latent_write", doc="plain torch")

STREAM_WEIGHTS = Operation("stream weights kernel")
"""``stream_weights(raw [T, (2 + S) S], scale [3], base [(2 + S) S], *, iterations, eps) -> (pre [T, S], post [T, S],
mix [T, S, S])``, all float32.

``raw`` has the numbers for ``pre``, ``post`` and, row by row, ``mix``. Each part is ``x * its scale + its base``; then
``pre`` is ``sigmoid(x) + eps`` and ``post`` ``2 sigmoid(x)``. ``mix`` is made doubly stochastic: softmax of its rows
plus ``eps``; columns divided by their sum plus ``eps``; then ``iterations - 1`` times rows and columns in turn. Asked
for with ``streams``.
"""



def _reason_against_streams(query: KernelQuery) -> str | None:
    streams = query.shape.get("streams", 0)
    return None if streams in (2, 4, 8) else f"takes 2, 4 or 8 streams, not {streams}"


STREAM_WEIGHTS.add(
    "reference", "headrace.kernels.rowwise.reference:stream_weights", doc="plain torch, three launches a round"
)
STREAM_WEIGHTS.add(
    "triton", "headrace.kernels.rowwise.triton:stream_weights",
    supports=lambda q: _on_gpu(q) or _reason_against_streams(q), priority=10,
    doc="one launch; matrices stay in registers",
)

@dataclass(slots=True)
class DecodeInputs:
    """Of B decodes in G cache groups: ``token_ids`` and ``positions`` [B] int64, ``kv_lens`` [B] int32, ``slots`` [G,
    B] int64, ``page_tables`` [G, B, entries] int32. Allocated once; table entries beyond a row's length are left as
    they were."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    page_tables: torch.Tensor

    @classmethod
    def allocate(cls, size: int, tables: torch.Tensor) -> DecodeInputs:
        """Zeros, so that an entry never written is the null page. ``tables`` [G, rows, entries] int32."""
        groups, _, entries = tables.shape
        token_ids, positions = torch.zeros((2, size), dtype=torch.int64, device=tables.device)
        kv_lens = torch.zeros(size, dtype=torch.int32, device=tables.device)
        slots = torch.zeros((groups, size), dtype=torch.int64, device=tables.device)
        return cls(
            token_ids, positions, kv_lens, slots,
            torch.zeros((groups, size, entries), dtype=torch.int32, device=tables.device)
        )


DECODE_INPUTS = Operation("decode_inputs kernel")
"""``decode_inputs(requests [2, B] int64, last_token [rows] int64, tables [G, rows, entries] int32, page_size, out:
DecodeInputs)``

``requests`` holds rows and, below, lengths after the step (at least 1): the token of row r goes to position length - 1.
Fills ``out``; no host work beyond the launch, so that it may be captured.
"""

DECODE_INPUTS.add("reference", "headrace.kernels.rowwise.reference:decode_inputs", doc="plain torch")
DECODE_INPUTS.add(
    "triton", "headrace.kernels.rowwise.triton:decode_inputs", supports=requires(device="cuda"), priority=10,
    doc="one launch"
)
