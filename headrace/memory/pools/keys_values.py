"""`KeyValuePool`: keys and values as they are, or in 8 bits. P pages, K kv heads, E head dim."""

from __future__ import annotations

import math

import numpy as np
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.memory.pools.contract import Pool

ALIGNMENT = 64
"""Bytes; a cache line, and the widest CPU vector."""

CODES = "int8"
"""The dtype of a spec whose keys and values are kept in 8 bits."""


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
