"""Attention of encoders: every token attends to all tokens of its own span. T tokens, H heads, E head dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import KernelQuery, Operation, requires, requires_hopper


@dataclass(frozen=True)
class Spans:
    """``lengths`` of consecutive spans, on the host; ``starts`` [spans + 1] int32 on the device is their prefix sum,
    beginning with 0. ``claims`` [2] int32 on the device are zeros that a kernel may count with and leaves as zeros, so
    that calls with the same spans are in turn; None: each call makes its own."""

    lengths: list[int]
    starts: torch.Tensor
    claims: torch.Tensor | None = None


SPAN_ATTENTION = Operation("span attention kernel")
"""``span_attention(q, k, v [T, H, E], spans: Spans, scale, cos_sin=None) -> [T, H, E]``. With ``cos_sin`` [T, E]
float32, half cosines, half sines, q and k are rotated first: dim i with dim i + E / 2. q, k and v are parts of one
tensor with the same strides, the last of which is 1; q and k may be overwritten. Shape: ``head_dim``."""

SPAN_ATTENTION.add(
    "reference", "headrace.kernels.span_attention.reference:span_attention",
    doc="torch's fused attention, spans of one length together",
)
SPAN_ATTENTION.add(
    "triton", "headrace.kernels.span_attention.triton:span_attention",
    supports=requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(8, 0)), priority=10,
    doc="short spans in one kernel with the rotation; torch's flash attention for longer ones",
)


def _own_on_hopper(query: KernelQuery) -> str | None:
    head_dim = query.shape.get("head_dim", 0)
    if not 0 < head_dim <= 128 or head_dim % 8:
        return f"takes heads of up to 128 dims in steps of 8, not {head_dim}"
    return requires_hopper(query) or requires(device="cuda", dtypes=("float16", "bfloat16"))(query)


SPAN_ATTENTION.add(
    "hopper", "headrace.kernels.span_attention.hopper:span_attention", supports=_own_on_hopper, priority=20,
    doc="own CUDA C++ for long spans, the Triton kernel for short ones",
)
