"""Norm, rotation and page write by an own C++ kernel; in plain torch until it is there. T tokens, H heads, E head
dim."""

from __future__ import annotations

from typing import Unpack

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.rms_norm.cpu import rms_norm
from headrace.kernels.rope_write import HeadShape, reference


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.rope_write(
            qkv, positions, cos_sin, slots, k_pages, v_pages, q_norm=q_norm, k_norm=k_norm, **shape
        )
    if q_norm is not None and k_norm is not None and len(q_norm) > shape["head_dim"]:
        q, k, v = qkv.split((len(q_norm), len(k_norm), len(k_norm)), dim=-1)
        q, k = (
            rms_norm(x, weight, shape["norm_eps"], shape["norm_offset"]) for x, weight in ((q, q_norm), (k, k_norm))
        )
        qkv, q_norm, k_norm = torch.cat((q, k, v), dim=-1), None, None
    return ops.rope_write(
        qkv, positions, cos_sin, slots, k_pages, v_pages, q_norm, k_norm, shape["num_heads"], shape["num_kv_heads"],
        shape["head_dim"],
        shape["rotary_dim"], shape["interleaved"], shape["norm_eps"], shape["norm_offset"], shape.get("scales"),
    )
