"""`LatentPool`: one vector per token, keys and values in one. P pages, L latent width, E rotated width."""

from __future__ import annotations

import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.memory.pools.contract import Pool
from headrace.memory.pools.keys_values import allocate_zeros, torch_dtype


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
