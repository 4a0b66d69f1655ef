"""What happens between the qkv projection and attention, as one operation: norm, rotate, write keys and values to
pages."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch

from headrace.kernels.operation import Operation, requires


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
int8 take codes (`headrace.kernels.codes`), and ``scales`` what these are multiplied with. Returns q [T, H, E],
contiguous, in qkv's dtype; qkv may be overwritten.
"""

ROPE_WRITE.add("reference", "headrace.kernels.rope_write.reference:rope_write", doc="plain torch")

_on_cpu = requires(device="cpu", dtypes=("float32", "bfloat16", "float16"))
ROPE_WRITE.add("cpu", "headrace.kernels.rope_write.cpu:rope_write", supports=_on_cpu, priority=10, doc="own C++, fused")
ROPE_WRITE.add(
    "triton", "headrace.kernels.rope_write.triton:rope_write", supports=requires(device="cuda"), priority=10,
    doc="one pass, fused"
)
ROPE_WRITE.add(
    "triton_pdl", "headrace.kernels.rope_write.triton:rope_write_pdl",
    supports=requires(device="cuda", capability=(9, 0)), priority=15,
    doc="with dependent launch",
)
