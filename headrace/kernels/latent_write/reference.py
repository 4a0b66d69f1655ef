"""Rotation and page write of latent attention in plain torch. T tokens, H heads, L latent width, E rotated width."""

from __future__ import annotations

import torch

from headrace.kernels.rope_write.reference import rotate


def latent_write(
    q_rope: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor, *, interleaved: bool,
) -> torch.Tensor:
    """See `LATENT_WRITE`. DeepSeek-V2, arXiv:2405.04434, section 2.1."""
    num_heads, width = q_rope.shape[1:]
    both = torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1)
    both = rotate(both, cos_sin.index_select(0, positions), width, interleaved).to(q_rope.dtype)
    rows = torch.cat((latent, both[:, num_heads]), dim=-1)
    pages.view(-1, pages.shape[-1]).index_copy_(0, slots, rows.to(pages.dtype))
    return both[:, :num_heads]
