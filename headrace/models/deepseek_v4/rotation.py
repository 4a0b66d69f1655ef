"""Rotation of the last dims of vectors, and back. E dims, R rotated."""

from __future__ import annotations

import torch

from headrace.kernels.rowwise.reference import rotate


def rotate_last(x: torch.Tensor, cos_sin: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
    """The last R dims of ``x`` [T, H, E] by ``cos_sin`` [T, R] (first half cosines, second half sines), neighbours in
    pairs; a new tensor in x's dtype."""
    width = cos_sin.shape[-1]
    if backwards:
        cos_sin = torch.cat((cos_sin[:, : width // 2], -cos_sin[:, width // 2 :]), dim=-1)
    turned = rotate(x[..., -width:], cos_sin, width, True).to(x.dtype)
    return torch.cat((x[..., :-width], turned), dim=-1)
