"""`Slots`: latents in plain or packed pages, read and written by slot number; the packing in plain torch.

A packed vector is N values in e4m3 with a power of two (e8m0) for each `GROUP`, and R in bfloat16. A packed index key
is E values in e4m3 with one float32 scale, or in MXFP4: two to a byte, with a power of two for each 32. Values and
scales of a slot lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.block_scaled import (
    LARGEST,
    LEAST_AMAX,
    dequantise_mxfp4,
    power_of_two,
    quantise_groups,
    quantise_mxfp4,
)
from headrace.kernels.latents import GROUP, KEY_SCALE_BYTES, MOST_APART, ROTATED, SCALE_BYTES


@dataclass(frozen=True)
class Slots:
    """``values`` [P, S, E] holds the vectors themselves if ``scales`` is None; else both are bytes, [P, S, bytes],
    strided, and what is packed follows from the scales: index keys in MXFP4 have float8_e8m0fnu, others uint8 and
    another number of them than vectors."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def per_page(self) -> int:
        """S."""
        return self.values.shape[1]

    @property
    def holds_keys(self) -> bool:
        """Whether these are packed index keys."""
        return self.scales is not None and (self.scales.shape[-1] == KEY_SCALE_BYTES or self.is_mxfp4)

    @property
    def is_mxfp4(self) -> bool:
        """Whether these are index keys in MXFP4."""
        return self.scales is not None and self.scales.dtype == torch.float8_e8m0fnu

    def write(self, numbers: torch.Tensor, x: torch.Tensor) -> None:
        """Write ``x`` [n, E] to the slots of ``numbers`` [n] int64. Only slots of the null page may occur twice: which
        of two writes to one slot wins is undefined."""
        place = (numbers // self.per_page, numbers % self.per_page)
        if self.scales is None:
            self.values.index_put_(place, x.to(self.values.dtype))
            return
        pack = pack_narrow_keys if self.is_mxfp4 else pack_keys if self.holds_keys else pack_vectors
        for stored, part in zip((self.values, self.scales.view(torch.uint8)), pack(x), strict=True):
            stored.index_put_(place, part)

    def gather(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The vectors at slots ``numbers`` [...] int64, [..., E] in ``dtype``."""
        place = (numbers // self.per_page, numbers % self.per_page)
        if self.scales is None:
            return self.values[place].to(dtype)
        unpack = unpack_narrow_keys if self.is_mxfp4 else unpack_keys if self.holds_keys else unpack_vectors
        return unpack(self.values[place], self.scales.view(torch.uint8)[place]).to(dtype)


def find_slots(page_table: torch.Tensor, requests: torch.Tensor, numbers: torch.Tensor, per_page: int) -> torch.Tensor:
    """Slot numbers, int64, of the ``numbers``-th entry of each of ``requests``; all of one shape. ``page_table``
    [R, W]. Numbers outside a request's row of the table read its first or last page: callers mask them."""
    entries = (numbers // per_page).clamp(0, page_table.shape[1] - 1)
    return page_table[requests, entries].long() * per_page + numbers % per_page


def pack_vectors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., E] to value bytes [..., N + 2 R] and scale bytes [..., 8], both uint8."""
    plain, rotated = x.float().split((x.shape[-1] - ROTATED, ROTATED), dim=-1)
    codes, exponents = quantise_groups(plain, GROUP)  # e4m3 [..., N] and e8m0 [..., N / 64]
    values = torch.cat((codes.view(torch.uint8), rotated.bfloat16().contiguous().view(torch.uint8)), dim=-1)
    return values, torch.nn.functional.pad(exponents, (0, SCALE_BYTES - exponents.shape[-1]))


def unpack_vectors(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32 [..., E]."""
    codes, rotated = values.split((values.shape[-1] - 2 * ROTATED, 2 * ROTATED), dim=-1)
    groups = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP))
    plain = groups * power_of_two(scales[..., : groups.shape[-2]]).unsqueeze(-1)
    return torch.cat((plain.flatten(-2), rotated.contiguous().view(torch.bfloat16).float()), dim=-1)


def pack_keys(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., E] to e4m3 bytes [..., E] and one float32 scale as bytes [..., 4]."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_(min=LEAST_AMAX) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.contiguous().view(torch.uint8)


def unpack_keys(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32 [..., E]."""
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)


def pack_narrow_keys(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., E] to MXFP4: codes [..., E / 2] and scales [..., E / 32], uint8, none of them more than `MOST_APART` powers
    of two below the key's largest."""
    return quantise_mxfp4(x, MOST_APART)


def unpack_narrow_keys(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32 [..., E]."""
    return dequantise_mxfp4(codes, scales, torch.float32)
