"""`Slots`: one layer's vectors by slot number, whatever form the pool keeps them in. Slot = page * slots of a page +
place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.layers.attention.contract import KvPages


@dataclass(frozen=True)
class Slots:
    """``pages.k`` and ``pages.v`` are [P, S, ...]. ``pack`` and ``unpack`` translate between vectors and the two; None
    where both are the vectors themselves."""

    pages: KvPages
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """``x`` [n, E] to ``slots`` [n] int64; several may write slots of the null page."""
        per_page = self.pages.k.shape[1]
        place = (slots // per_page, slots % per_page)
        if self.pack is None:
            self.pages.k.index_put_(place, x.to(self.pages.k.dtype))
            return
        for stored, part in zip((self.pages.k, self.pages.v), self.pack(x), strict=True):
            stored.index_put_(place, part)

    def gather(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[...] int64 to [..., E] in ``dtype``."""
        per_page = self.pages.k.shape[1]
        place = (slots // per_page, slots % per_page)
        if self.unpack is None:
            return self.pages.k[place].to(dtype)
        return self.unpack(self.pages.k[place], self.pages.v[place]).to(dtype)


def open_slots(pages: KvPages) -> Slots:
    """The slots of a layer's pages, packed or plain."""
    if pages.k.dtype != torch.uint8:
        return Slots(pages)
    from headrace.models.deepseek_v4 import packed_pools  # only where the pool is one of those

    if pages.v.shape[-1] == packed_pools.INDEX_SCALE_BYTES:
        return Slots(pages, packed_pools.pack_keys, packed_pools.unpack_keys)
    return Slots(pages, packed_pools.pack_vectors, packed_pools.unpack_vectors)
