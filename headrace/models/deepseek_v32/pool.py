"""`HostedRowsPool`: latents in host memory behind hot slots, index keys on the device. P pages, L latent dim, E rotated
dims, I index dims.
"""

from __future__ import annotations

import msgspec
import torch

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.memory.hot_pool import HotPool
from headrace.memory.pools import LatentPool, PagePart


class HostedRowsPool(HotPool):
    """Per layer rows [P, page_size, 1, L + E] in host memory, and keys [P, page_size, 1, I] on the device."""

    def __init__(self, group: CacheGroup, layout: CacheLayout, device: torch.device):
        super().__init__(group, layout, device)
        width = group.spec.head_dim - group.spec.value_dim
        keys = msgspec.structs.replace(group.spec, head_dim=width, value_dim=width)
        self._keys = LatentPool(msgspec.structs.replace(group, spec=keys), layout.page_size, device)
        self.num_bytes += self._keys.num_bytes

    @staticmethod
    def base(spec: CacheSpec) -> tuple[type[LatentPool], CacheSpec]:
        """See `HotPool`."""
        return LatentPool, msgspec.structs.replace(spec.plain, head_dim=spec.value_dim)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer, wherever they are."""
        return LatentPool.page_bytes(spec, page_size)

    @staticmethod
    def resident_bytes(spec: CacheSpec, page_size: int) -> int:
        """Those of the keys."""
        return LatentPool.page_bytes(msgspec.structs.replace(spec, head_dim=spec.head_dim - spec.value_dim), page_size)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rows, keys)`` of a model layer."""
        return super().layer(layer)[0], self._keys.layer(layer)[0]

    @property
    def parts(self) -> list[PagePart]:
        """Rows, then keys, layer by layer."""
        return [*super().parts, *(PagePart(part.layer, "keys", part.tensor) for part in self._keys.parts)]
