"""Latents in plain torch: the oracle and the fallback. T tokens, H heads, E head dim, R rotated dims."""

from __future__ import annotations

import math

import torch

from headrace.kernels.latents import LatentNorm
from headrace.kernels.latents.slots import Slots
from headrace.kernels.once import cache_once
from headrace.kernels.rowwise.reference import rms_norm, rotate


def write_latents(
    x: torch.Tensor, norm: LatentNorm, positions: torch.Tensor, slots: Slots, numbers: torch.Tensor
) -> None:
    """See `WRITE_LATENTS`."""
    slots.write(numbers, make_latents(x, norm, positions))


def make_latents(x: torch.Tensor, norm: LatentNorm, positions: torch.Tensor) -> torch.Tensor:
    """Normalised and rotated rows [T, E], in x's dtype."""
    x = rms_norm(x, norm.weight, norm.eps)
    return rotate_last(x.unsqueeze(1), norm.cos_sin.index_select(0, positions)).squeeze(1)


def rotate_last(x: torch.Tensor, cos_sin: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
    """Rotate the last R dims of ``x`` [T, H, E] by ``cos_sin`` [T, R] (first half cosines, second half sines), adjacent
    dims forming pairs; ``backwards`` negates the angles. Returns a new tensor in x's dtype."""
    rotary_dim = cos_sin.shape[-1]
    if backwards:
        cos_sin = torch.cat((cos_sin[:, : rotary_dim // 2], -cos_sin[:, rotary_dim // 2 :]), dim=-1)
    rotated = rotate(x[..., -rotary_dim:], cos_sin, rotary_dim, True).to(x.dtype)
    return torch.cat((x[..., :-rotary_dim], rotated), dim=-1)


@cache_once
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix [size, size] float32 by Sylvester's construction; ``size`` a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
