"""Attention of encoders: every token attends to all tokens of its own span. T tokens, H heads, E head dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires


@dataclass(frozen=True)
class Spans:
    """``lengths`` of consecutive spans, on the host; ``starts`` [spans + 1] int32 on the device is their prefix sum,
    beginning with 0."""

    lengths: list[int]
    starts: torch.Tensor


SPAN_ATTENTION = Operation("span attention kernel")
"""``span_attention(q, k, v [T, H, E], spans: Spans, scale) -> [T, H, E]``; inputs may have any strides but in E. Shape:
``head_dim``."""

SPAN_ATTENTION.add(
    "reference", "headrace.kernels.span_attention.reference:span_attention",
    doc="torch's fused attention, spans of one length together",
)
SPAN_ATTENTION.add(
    "flash", "headrace.kernels.span_attention.reference:flash_span_attention",
    supports=requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(8, 0)), priority=10,
    doc="torch's attention for spans of any lengths, one launch",
)
