"""Latents in plain torch: the oracle and the fallback. T tokens, H heads, E head dim, R rotated dims."""

from __future__ import annotations

import math

import torch

from headrace.kernels.latents import LatentNorm, LatentRows
from headrace.kernels.latents.slots import find_slots
from headrace.kernels.once import cache_once
from headrace.kernels.rowwise.reference import rms_norm, rotate


def write_latents(rows: LatentRows) -> None:
    """Write what `LatentRows` says."""
    rows.slots.write(rows.numbers, make_latents(rows.x, rows.norm, rows.positions))


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


def decode_windows(
    page_table: torch.Tensor, kv_lens: torch.Tensor, *, window: int, per_page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `DECODE_WINDOWS`."""
    lens = kv_lens.long()
    seen = (lens[:, None] - 1 - torch.arange(window, device=lens.device)).clamp_(min=0)
    requests = torch.arange(len(lens), device=lens.device)[:, None].expand_as(seen)
    return find_slots(page_table, requests, seen, per_page), lens.clamp(max=window)


def decode_entries(kv_lens: torch.Tensor, *, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `DECODE_ENTRIES`."""
    visible = torch.div(kv_lens.long(), ratio, rounding_mode="floor")
    return torch.arange(len(kv_lens), device=kv_lens.device), visible


def list_entries(page_table: torch.Tensor, *, count: int, per_page: int) -> torch.Tensor:
    """See `LIST_ENTRIES`."""
    requests = torch.arange(len(page_table), device=page_table.device)[:, None]
    numbers = torch.arange(count, device=requests.device).expand(len(requests), -1)
    return find_slots(page_table, requests.expand_as(numbers), numbers, per_page)


def decode_state(
    page_table: torch.Tensor, kv_lens: torch.Tensor, *, ratio: int, block: int, ring: int, per_page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `DECODE_STATE`."""
    requests, lens = torch.arange(len(kv_lens), device=kv_lens.device), kv_lens.long()
    positions = lens - 1
    rows = find_slots(page_table, requests, positions // block * ring + positions % ring, per_page)
    return requests, (lens // ratio - 1).masked_fill_(lens % ratio != 0, -1), rows


@cache_once
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix [size, size] float32 by Sylvester's construction; ``size`` a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
