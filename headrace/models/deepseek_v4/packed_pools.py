"""Cache pools of vectors packed in 8 bits, and the packing. P pages, S slots of a page, N plain and R rotated dims,
E = N + R.

A page of vectors is contiguous bytes: for each of S slots N bytes of e4m3 and R bfloat16; then for each slot 8 bytes of
scales, one power of two (e8m0) per 64 plain dims, zero-padded; then padding to a multiple of a slot's value bytes. So
a slot's values and scales lie apart. A page of index keys is S times E bytes of e4m3, then S float32 scales.
"""

from __future__ import annotations

import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.kernels.block_scaled.reference import LARGEST, LEAST_AMAX, power_of_two, quantise_groups
from headrace.memory.pools import PagePart, Pool, allocate_zeros
from headrace.models.deepseek_v4.layout import (
    GROUP,
    INDEX_SCALE_BYTES,
    ROTATED,
    SCALE_BYTES,
    packed_page_bytes,
    packed_value_bytes,
    slots_per_page,
)


class _PackedPool(Pool):
    """Per layer uint8 [P, page bytes], and two strided views of it: each slot's values, and each slot's scales."""

    def __init__(self, group: CacheGroup, page_size: int, device: torch.device):
        spec, slots = group.spec, slots_per_page(group.spec, page_size)
        page = self.page_bytes(spec, page_size)
        value, scale = self.slot_parts(spec)
        self._layers: dict[int, torch.Tensor] = {}
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in group.layers:
            pages = self._layers[layer] = allocate_zeros((group.num_pages, page), torch.uint8, device)
            # views: the page's bytes are the only memory, and the rest of a page is padding
            values, scales = pages[:, : slots * value], pages[:, slots * value : slots * (value + scale)]
            self._views[layer] = values.unflatten(1, (slots, value)), scales.unflatten(1, (slots, scale))
        self.num_bytes = page * group.num_pages * len(group.layers)

    @staticmethod
    def slot_parts(spec: CacheSpec) -> tuple[int, int]:
        """Bytes of a slot's values and of its scales."""
        raise NotImplementedError

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        raise NotImplementedError

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(values [P, S, bytes], scales [P, S, bytes])`` of a layer, uint8, strided."""
        return self._views[layer]

    @property
    def parts(self) -> list[PagePart]:
        """Packed pages, layer by layer."""
        return [PagePart(layer, "packed", pages) for layer, pages in self._layers.items()]


class PackedVectorPool(_PackedPool):
    """Vectors whose plain dims are in e4m3 with a scale per group, and whose rotated dims are in bfloat16."""

    @staticmethod
    def slot_parts(spec: CacheSpec) -> tuple[int, int]:
        """See `_PackedPool`."""
        return packed_value_bytes(spec.head_dim), SCALE_BYTES

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer, padding included."""
        return packed_page_bytes(spec.head_dim, slots_per_page(spec, page_size))


class PackedKeyPool(_PackedPool):
    """Index keys in e4m3 with one float32 scale per key."""

    @staticmethod
    def slot_parts(spec: CacheSpec) -> tuple[int, int]:
        """See `_PackedPool`."""
        return spec.head_dim, INDEX_SCALE_BYTES

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return slots_per_page(spec, page_size) * (spec.head_dim + INDEX_SCALE_BYTES)


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
