"""Row-wise operations by own C++ kernels; by the reference until these are loaded."""

from __future__ import annotations

from typing import Unpack

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.rowwise import HeadShape, reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """See `RMS_NORM`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.rms_norm(x, weight, eps, offset)
    return ops.rms_norm(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_RMS_NORM`; writes the new residual in place."""
    ops = NATIVE.find()
    if ops is None or x.dim() == 3:
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    return ops.add_rms_norm(x, residual, weight, eps, offset), residual


# the native kernels' numbers, see `GATE_NUMBERS`
SILU, GELU_TANH, CLAMPED = 0, 1, 2


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `SILU_MUL`."""
    ops = NATIVE.find()
    return reference.silu_mul(x) if ops is None else ops.gated(x, SILU)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """See `GELU_TANH_MUL`."""
    ops = NATIVE.find()
    return reference.gelu_tanh_mul(x) if ops is None else ops.gated(x, GELU_TANH)


GATED = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
GATE_NUMBERS = {"silu": SILU, "gelu_tanh": GELU_TANH, "clamped": CLAMPED}
"""Numbers of the gated activations, as the native kernels take them. Only mixtures of experts use the clamped one,
whose constants are further arguments."""


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
        # norms over all heads, weights [H * E] and [K * E]: the fused kernel normalises each head by itself, so these
        # are separate calls
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


def latent_write(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pages: torch.Tensor, out: torch.Tensor, *, norm_weight: torch.Tensor, norm_eps: float, interleaved: bool,
) -> None:
    """See `LATENT_WRITE`; the norm alone is native."""
    q_rope, latent, k_rope = parts
    reference.write_latents((q_rope, rms_norm(latent, norm_weight, norm_eps), k_rope), places, pages, out, interleaved)
