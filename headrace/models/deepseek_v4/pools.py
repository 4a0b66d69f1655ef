"""Pools of plain vectors and of compressor state. P pages, S slots of a page, E dims."""

from __future__ import annotations

import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.memory.pools import Allocate, PagePart, Pool, allocate_zeros, torch_dtype
from headrace.models.deepseek_v4.layout import slot_bytes, slots_per_page


class VectorPool(Pool):
    """Per layer one tensor [P, S, E] that holds vectors which are both key and value; `layer` returns it twice."""

    is_mappable = True

    def __init__(
        self, group: CacheGroup, page_size: int, device: torch.device, allocate: Allocate = allocate_zeros
    ):
        spec = group.spec
        shape = (group.num_pages, slots_per_page(spec, page_size), spec.head_dim)
        self._layers = {layer: allocate(shape, torch_dtype(spec), device) for layer in group.layers}
        self.num_bytes = self.page_bytes(spec, page_size) * group.num_pages * len(group.layers)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return slots_per_page(spec, page_size) * slot_bytes(spec)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The vectors of a layer, as keys and as values (one tensor)."""
        return self._layers[layer], self._layers[layer]

    @property
    def parts(self) -> list[PagePart]:
        """Vectors, layer by layer."""
        return [PagePart(layer, "vectors", vectors) for layer, vectors in self._layers.items()]


class StatePool(Pool):
    """Per layer the compressor's projections of recent tokens, before pooling: values [P, S, W] and gate logits
    [P, S, W], float32, W being the spec's ``head_dim``. S rows of a page, in rings; see `layout.ring_rows`."""

    def __init__(self, group: CacheGroup, page_size: int, device: torch.device):
        spec = group.spec
        shape = (group.num_pages, slots_per_page(spec, page_size), spec.head_dim)
        self._layers = {
            layer: (allocate_zeros(shape, torch.float32, device), allocate_zeros(shape, torch.float32, device))
            for layer in group.layers
        }
        self.num_bytes = self.page_bytes(spec, page_size) * group.num_pages * len(group.layers)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return slots_per_page(spec, page_size) * slot_bytes(spec)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(values, gates)`` of a layer."""
        return self._layers[layer]

    @property
    def parts(self) -> list[PagePart]:
        """Values and gates, layer by layer."""
        return [
            PagePart(layer, name, tensor)
            for layer, tensors in self._layers.items()
            for name, tensor in zip(("values", "gates"), tensors, strict=True)
        ]
