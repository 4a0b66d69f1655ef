"""`Place`: one of a layer's caches: its pages, and access to its cache group in a step."""

from __future__ import annotations

from typing import Any

import torch

from headrace.kernels.latents.slots import Slots
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch, GroupStep


def open_slots(pages: KvPages) -> Slots:
    """`Slots` over a layer's pages, packed or plain."""
    return Slots(pages.k, pages.v if pages.k.dtype == torch.uint8 else None)


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

    @property
    def is_packed(self) -> bool:
        """Whether slots are packed in 8 bits."""
        return self.pages.k.dtype == torch.uint8

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The group in this step."""
        return batch.groups[self.group]

    def backend(self, batch: ForwardBatch) -> Any:
        """The group's prepared backend."""
        return self.step(batch).backend
