"""`Place`: one thing that a layer caches: its pages once bound, and its group's part of a step."""

from __future__ import annotations

from typing import Any

from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch, GroupStep
from headrace.models.deepseek_v4.slots import Slots, open_slots


class Place:
    """Bound before the first step. ``slots`` are for kinds that keep vectors."""

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

    def reader(self, batch: ForwardBatch) -> Any:
        """The group's prepared reader."""
        return self.step(batch).backend
