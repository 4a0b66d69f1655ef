"""`HotPool`: a cache group whose pages are in host memory, and what its device keeps of them: for each row of requests
the entries that were wanted latest (`headrace.kernels.hot_slots`), and room for the pages of prompts being computed.

Refuses: which entries are wanted (layers know), and which page is whose (the scheduler does).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.kernels.hot_slots import FIND_SWAPS, LOAD_ENTRIES, EntryParts, HotSlots
from headrace.kernels.operation import KernelQuery
from headrace.kernels.pages import GATHER_PAGES, PageParts
from headrace.memory.mapped import allocate_mapped
from headrace.memory.pools import POOLS, PagePart, Pool, build_pool

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HotLayer:
    """One layer of a `HotPool`. ``slots`` and ``staged`` are tensors like those of `Pool.layer`, on the device: hot
    slots of all rows, and pages that `stage` copied there. ``hot``, ``parts``: for `find_swaps` and `load_entries`,
    the operations of `headrace.kernels.hot_slots`."""

    slots: tuple[torch.Tensor, ...]
    staged: tuple[torch.Tensor, ...]
    hot: HotSlots
    parts: EntryParts
    find_swaps: Callable[..., None]
    load_entries: Callable[..., None]
    _pages: PageParts
    _rows: torch.Tensor
    _gather: Callable[..., None]

    @property
    def num_staged(self) -> int:
        """Pages that fit into ``staged``."""
        return len(self._rows)

    @property
    def per_page(self) -> int:
        """Entries of a page."""
        return self.slots[0].shape[1]

    def stage(self, pages: torch.Tensor) -> None:
        """Copy ``pages`` [n] int64 to the first n of ``staged``."""
        self._gather(self._pages, pages, self._rows, torch.arange(len(pages), device=pages.device))


@dataclass(frozen=True)
class HotSizes:
    """What a group takes of its device, whatever its pages: pages of hot slots of each layer, and staged ones, and the
    ``most_entries`` of a row, for which there are marks."""

    slot_pages: int
    staged_pages: int
    most_entries: int
    num_bytes: int

    @classmethod
    def of(cls, group: CacheGroup, page_size: int, max_rows: int, max_model_len: int) -> HotSizes:
        """For so many rows, beside the null row."""
        ratio, slots = group.spec.compress_ratio, group.spec.hot_slots
        num_layers, rows = len(group.layers), max_rows + 1
        slot_pages = -(-rows * (slots + 1) // (page_size // ratio))
        staged, most = -(-max_model_len // page_size) + 1, max_model_len // ratio + 1
        page = hosted_page_bytes(group.spec, page_size)
        if not num_layers:
            return cls(slot_pages, 1, most, 0)
        num_bytes = (slot_pages * num_layers + staged) * page + rows * HotSlots.row_bytes(slots, most, num_layers)
        return cls(slot_pages, staged, most, num_bytes)


class HotPool(Pool):
    """``group.spec.hot_slots`` slots, and one for the newest entry, for each row of ``layout``, null row included. All
    layers share the staged pages, of one request as long as any."""

    def __init__(self, group: CacheGroup, layout: CacheLayout, device: torch.device):
        page_size, (base, spec) = layout.page_size, self.base(group.spec)
        assert base.is_mappable, f"{base.__name__} cannot be in host memory"
        kind: Any = base
        plain = msgspec.structs.replace(group, spec=spec)
        began = time.monotonic()
        self._host: Pool = kind(plain, page_size, device, allocate=allocate_mapped)
        logger.info(
            "%.1f GiB of host memory behind hot slots, ready in %.1f s", self._host.num_bytes / 2**30,
            time.monotonic() - began
        )
        sizes = HotSizes.of(group, page_size, layout.max_rows, layout.max_model_len)
        self._slots = base(CacheGroup(spec, group.layers, sizes.slot_pages), page_size, device)
        self._staged = base(CacheGroup(spec, [0], sizes.staged_pages), page_size, device)
        self._hot = HotSlots.allocate(
            len(group.layers), layout.max_rows + 1, group.spec.hot_slots, sizes.most_entries, device,
            ratio=group.spec.compress_ratio
        )
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self._query = KernelQuery(device.type, "uint8", capability)
        self._layers = {layer: self._open(number, layer) for number, layer in enumerate(group.layers)}
        self.counts, self.num_bytes = self._hot.counts, sizes.num_bytes

    def _open(self, number: int, layer: int) -> HotLayer:
        host, slots = (_as_bytes(pool.layer(layer)) for pool in (self._host, self._slots))
        (pages,) = (part.tensor for part in self._host.parts if part.layer == layer)
        (staged,) = self._staged.parts
        return HotLayer(
            self._slots.layer(layer), self._staged.layer(0), self._hot.layer(number), EntryParts.of(host, slots),
            FIND_SWAPS.choose(self._query), LOAD_ENTRIES.choose(self._query), PageParts.of([pages]),
            staged.tensor.flatten(1).view(torch.uint8), GATHER_PAGES.choose(self._query),
        )

    @staticmethod
    def base(spec: CacheSpec) -> tuple[type[Pool], CacheSpec]:
        """The pool that stores what is in host memory, hot or staged, and its spec."""
        return POOLS.load(spec.kind), spec.plain

    @classmethod
    def reason_against(cls, spec: CacheSpec, device: torch.device) -> str | None:
        """See `Pool`."""
        base, plain = cls.base(spec)
        return base.reason_against(plain, device)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return POOLS.load(spec.kind).page_bytes(spec, page_size)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The pages in host memory, as tensors of the device."""
        return self._host.layer(layer)

    def hot(self, layer: int) -> HotLayer:
        """See `Pool`."""
        return self._layers[layer]

    def clear_rows(self, rows: torch.Tensor) -> None:
        """See `Pool`."""
        self._hot.clear(rows)

    @property
    def parts(self) -> list[PagePart]:
        """Those of the pages in host memory."""
        return self._host.parts


class SwapCounts:
    """Copies of the pools' ``counts`` on the host, as of a few steps ago."""

    def __init__(self, pools: list[Pool], device: torch.device):
        counts = [pool.counts for pool in pools if pool.counts is not None]
        self._copies = torch.zeros((len(counts), 2), dtype=torch.int64)
        if device.type == "cuda" and counts:
            self._copies = self._copies.pin_memory()
        self._pairs = list(zip(self._copies.unbind(), counts, strict=True)) if counts else []

    def fetch(self) -> None:
        """Copy them behind the step that was launched, without waiting for it."""
        for copy, count in self._pairs:
            copy.copy_(count, non_blocking=True)

    @property
    def totals(self) -> list[int]:
        """Entries wanted, and entries copied to the device, of all pools."""
        return list(map(int, self._copies.sum(0)))


def build_pools(layout: CacheLayout, device: torch.device) -> list[Pool]:
    """The pools of all groups."""
    pools: list[Pool] = []
    for group in layout.groups:
        kind = POOLS.load(group.spec.kind)
        if group.spec.hot_slots:
            pools.append((kind if issubclass(kind, HotPool) else HotPool)(group, layout, device))
        else:
            pools.append(build_pool(group, layout.page_size, device))
    return pools


def hosted_page_bytes(spec: CacheSpec, page_size: int) -> int:
    """Bytes of host memory that a page of one layer takes."""
    kind = POOLS.load(spec.kind)
    return kind.page_bytes(spec, page_size) - kind.resident_bytes(spec, page_size)


def _as_bytes(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A layer's tensors [P, S, ...], each once, as uint8 [P, S, bytes]."""
    once = {tensor.data_ptr(): tensor for tensor in tensors}
    return [tensor.view(torch.uint8).flatten(2) for tensor in once.values()]
