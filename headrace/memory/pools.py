"""Pools: the storage of one cache group each, by kind of cache. P pages, K kv heads, E head dim.

Full and sliding-window attention store the same bytes; only their accounting differs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from headrace.base.cache import CACHE_POOLS, CacheGroup, CacheSpec
from headrace.base.registry import Registry

ALIGNMENT = 64
"""Bytes; a cache line, and the widest CPU vector."""

CODES = "int8"
"""The dtype of a spec whose keys and values are kept in 8 bits."""


class Pool(ABC):
    """Pages of one cache group on one device. Every page reads as finite numbers before it is first written.
    Built as ``Class(group, page_size, device)``. ``supports_int8``: may keep int8 codes with their scales."""

    supports_int8: ClassVar[bool] = False
    num_bytes: int

    @abstractmethod
    def __init__(self, group: CacheGroup, page_size: int, device: torch.device): ...

    @staticmethod
    @abstractmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""

    @abstractmethod
    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The page tensors of a model layer of this group; plain keys and values give ``(k, v)``, codes
        their scales, too."""


class KeyValuePool(Pool):
    """Per layer k [P, page_size, K, E] and v [P, page_size, K, E_value], contiguous, zero until written. Of a spec of
    int8 these are codes, with scales [P, 2, K, page_size] float32, one for each token and kv head, of keys and of
    values."""

    supports_int8 = True

    def __init__(self, group: CacheGroup, page_size: int, device: torch.device):
        spec, dtype = group.spec, torch_dtype(group.spec)
        k_shape = (group.num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        v_shape = (group.num_pages, page_size, spec.num_kv_heads, spec.value_dim)
        shapes = [(k_shape, dtype), (v_shape, dtype)]
        if dtype == torch.int8:
            shapes.append(((group.num_pages, 2, spec.num_kv_heads, page_size), torch.float32))
        self._layers = {layer: tuple(allocate_zeros(*shape, device) for shape in shapes) for layer in group.layers}
        self.num_bytes = self.page_bytes(spec, page_size) * group.num_pages * len(group.layers)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        scale_bytes = 2 * torch.float32.itemsize if torch_dtype(spec) == torch.int8 else 0
        return page_size * spec.num_kv_heads * (
            (spec.head_dim + spec.value_dim) * torch_dtype(spec).itemsize + scale_bytes
        )

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """``(k, v)`` of a model layer, or ``(k, v, scales)``."""
        return self._layers[layer]


class LatentPool(Pool):
    """Per layer [P, page_size, 1, L + E], contiguous, zero until written. Keys are whole rows (``head_dim`` wide),
    values their first ``value_dim`` places."""

    def __init__(self, group: CacheGroup, page_size: int, device: torch.device):
        spec = group.spec
        self._value_dim = spec.value_dim
        shape = (group.num_pages, page_size, 1, spec.head_dim)
        self._layers = {layer: allocate_zeros(shape, torch_dtype(spec), device) for layer in group.layers}
        self.num_bytes = self.page_bytes(spec, page_size) * group.num_pages * len(group.layers)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return page_size * spec.head_dim * torch_dtype(spec).itemsize

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(k, v)`` of a model layer; v is a view of the beginning of each row of k."""
        rows = self._layers[layer]
        return rows, rows[..., : self._value_dim]


POOLS: Registry[type[Pool]] = CACHE_POOLS
"""By `CacheSpec.kind`."""

POOLS.add("full", "headrace.memory.pools:KeyValuePool", doc="keys and values of all tokens")
POOLS.add(
    "sliding_window", "headrace.memory.pools:KeyValuePool", doc="keys and values of the latest tokens"
)
POOLS.add("mla", "headrace.memory.pools:LatentPool", doc="one vector per token, keys and values in one")


def group_page_bytes(group: CacheGroup, page_size: int) -> int:
    """Bytes of one page in all layers of a group."""
    return POOLS.load(group.spec.kind).page_bytes(group.spec, page_size) * len(group.layers)


def build_pool(group: CacheGroup, page_size: int, device: torch.device) -> Pool:
    """The pool that stores a group's kind."""
    return POOLS.load(group.spec.kind)(group, page_size, device)


def torch_dtype(spec: CacheSpec) -> torch.dtype:
    """The torch dtype a spec names."""
    return getattr(torch, spec.dtype)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on a CPU until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte; numpy's comes from calloc, which maps pages when they are first touched.
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).view(shape)
