"""`Place`: one of a layer's caches: its pages, and access to its cache group in a step. `Slots`: reads and writes
vectors by slot number, in plain or packed pages.

Slot number = page * S + index within the page. P pages, S slots of a page.
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
    """Vectors [..., E] in pages ``pages.k`` and ``pages.v`` [P, S, ...]. ``pack`` and ``unpack`` convert between
    vectors and the two parts (values, scales) of packed slots; None if ``pages.k`` holds the vectors themselves."""

    pages: KvPages
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Write ``x`` [n, E] to ``slots`` [n] int64. Only slots of the null page may occur twice: which of two writes
        to one slot wins is undefined."""
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
    """`Slots` over a layer's pages, packed or plain."""
    if pages.k.dtype != torch.uint8:
        return Slots(pages)
    from headrace.models.deepseek_v4 import packed_pools  # only where the pool is one of those

    # the two packed layouts differ in the bytes of a slot's scales: 4 for index keys, 8 for vectors
    if pages.v.shape[-1] == packed_pools.INDEX_SCALE_BYTES:
        return Slots(pages, packed_pools.pack_keys, packed_pools.unpack_keys)
    return Slots(pages, packed_pools.pack_vectors, packed_pools.unpack_vectors)


class Place:
    """One cache of a layer; `bind` must be called before the first step. ``slots`` is only for caches of vectors, not
    for compressor state."""

    def __init__(self) -> None:
        self.group = -1
        self._pages: KvPages | None = None

    def bind(self, pages: KvPages | None, group: int | None) -> None:
        """Attach the pages and the index of their cache group; None drops the references, so that the pages' memory can
        be freed."""
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
