"""`Place`: one cache of a layer, with its pages and its group's part of a step. `Slots`: vectors by slot number.

Slot = page * S + slot in the page. P pages, S slots of a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch, GroupStep


@dataclass(frozen=True)
class Slots:
    """``pages.k`` and ``pages.v`` are [P, S, ...]. ``pack`` and ``unpack`` convert between vectors and these two; None
    where a page holds the vectors themselves."""

    pages: KvPages
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Write ``x`` [n, E] to ``slots`` [n] int64; only slots of the null page may occur twice."""
        per_page = self.pages.k.shape[1]
        place = (slots // per_page, slots % per_page)
        if self.pack is None:
            self.pages.k.index_put_(place, x.to(self.pages.k.dtype))
            return
        for stored, part in zip((self.pages.k, self.pages.v), self.pack(x), strict=True):
            stored.index_put_(place, part)

    def gather(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The vectors at ``slots`` [...] int64, [..., E] in ``dtype``."""
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


class Place:
    """Bound before the first step. ``slots`` is for kinds of cache that keep vectors."""

    def __init__(self) -> None:
        self.group = -1
        self._pages: KvPages | None = None

    def bind(self, pages: KvPages | None, group: int | None) -> None:
        """Attach the pages and the cache group they belong to; None lets go of them."""
        self._pages, self.group = pages, -1 if group is None else group

    @property
    def pages(self) -> KvPages:
        """The bound pages."""
        assert self._pages is not None, "bind first"
        return self._pages

    @property
    def slots(self) -> Slots:
        """The bound pages by slot."""
        return open_slots(self.pages)

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The group in this step."""
        return batch.groups[self.group]

    def backend(self, batch: ForwardBatch) -> Any:
        """The group's prepared backend."""
        return self.step(batch).backend
