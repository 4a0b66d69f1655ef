"""Norm, rotation and page write by an own C++ kernel; in plain torch until it is there. T tokens, H heads, E head dim."""

from __future__ import annotations

from typing import Unpack

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.rope_write import HeadShape, reference


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.rope_write(qkv, positions, cos_sin, slots, k_pages, v_pages, q_norm=q_norm, k_norm=k_norm, **shape)
    return ops.rope_write(
        qkv, positions, cos_sin, slots, k_pages, v_pages, q_norm, k_norm, shape["num_heads"], shape["num_kv_heads"], shape["head_dim"],
        shape["rotary_dim"], shape["interleaved"], shape["norm_eps"], shape["norm_offset"],
    )
