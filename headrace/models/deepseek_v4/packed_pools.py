"""Cache pools of vectors packed in 8 bits; `headrace.kernels.latents.slots` packs them. P pages, S slots of a page, N
plain and R rotated dims, E = N + R.

A page of vectors is contiguous bytes: for each of S slots N bytes of e4m3 and R bfloat16; then for each slot 8 bytes of
scales, one power of two (e8m0) per 64 plain dims, zero-padded; then padding to a multiple of a slot's value bytes. So
a slot's values and scales lie apart. A page of index keys is S times E bytes of e4m3, then S float32 scales; in MXFP4 S
times E / 2 bytes of e2m1, the first of two values in the low half, then S times E / 32 bytes of e8m0.
"""

from __future__ import annotations

import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.kernels.latents import KEY_SCALE_BYTES, SCALE_BYTES
from headrace.memory.pools import Allocate, PagePart, Pool, allocate_zeros
from headrace.models.deepseek_v4.layout import (
    narrow_key_bytes,
    packed_page_bytes,
    packed_value_bytes,
    slots_per_page,
)


class _PackedPool(Pool):
    """Per layer uint8 [P, page bytes], and two strided views of it: each slot's values, and each slot's scales."""

    is_mappable = True

    def __init__(
        self, group: CacheGroup, page_size: int, device: torch.device, allocate: Allocate = allocate_zeros
    ):
        spec, slots = group.spec, slots_per_page(group.spec, page_size)
        page = self.page_bytes(spec, page_size)
        value, scale = self.slot_parts(spec)
        self._layers: dict[int, torch.Tensor] = {}
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in group.layers:
            pages = self._layers[layer] = allocate((group.num_pages, page), torch.uint8, device)
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
        return spec.head_dim, KEY_SCALE_BYTES

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return slots_per_page(spec, page_size) * (spec.head_dim + KEY_SCALE_BYTES)


class NarrowKeyPool(_PackedPool):
    """Index keys in MXFP4."""

    @staticmethod
    def slot_parts(spec: CacheSpec) -> tuple[int, int]:
        """See `_PackedPool`."""
        return narrow_key_bytes(spec.head_dim)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return slots_per_page(spec, page_size) * sum(narrow_key_bytes(spec.head_dim))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(values [P, S, E / 2] uint8, scales [P, S, E / 32] float8_e8m0fnu)`` of a layer, strided."""
        values, scales = super().layer(layer)
        return values, scales.view(torch.float8_e8m0fnu)
