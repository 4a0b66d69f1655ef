"""The KV cache needs of layers and the layout of the pools: records shared by models, scheduling and memory.

Refuses: bytes and tensors (``memory/``) and accounting (``scheduling/cache``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from headrace.base.registry import Registry

NULL_PAGE = 0
"""Page 0 of every group is never allocated: padded rows of a batch read and write it, so its content is undefined."""


class CacheSpec(msgspec.Struct, frozen=True, array_like=True):
    """One layer's KV need. Layers with equal specs share a cache group.

    ``kind`` names the accounting policy and the pool (``full``, ``sliding_window``; later ``mla``, ``compressed``,
    ``recurrent``). ``window`` is the number of latest tokens a query sees, itself included (0: all). ``dtype`` is a
    torch dtype name such as ``bfloat16``; ``int8`` in kinds of keys and values means codes with a float32 scale for
    each token and head, of keys and of values. ``hot_slots``: pages are in host memory, and the device keeps as many
    entries of each row, those that were wanted latest (0: pages are on the device): at least all that ``hot_tokens``
    tokens of a row may want.
    """

    kind: str
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    window: int = 0
    compress_ratio: int = 1
    hot_slots: int = 0
    hot_tokens: int = 0

    def behind(self, hot_slots: int, most_wanted: int) -> CacheSpec:
        """The same with pages in host memory, where a token wants at most so many entries."""
        return msgspec.structs.replace(self, hot_slots=hot_slots, hot_tokens=hot_slots // most_wanted)

    @property
    def plain(self) -> CacheSpec:
        """The same with pages on the device."""
        return msgspec.structs.replace(self, hot_slots=0, hot_tokens=0)


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers of one spec and the pages they share. ``num_pages`` counts the null page too. Once ``soft_pages`` have
    been in use, unpinned stored prefixes are evicted before never-used pages are handed out (0: only when there are no
    free pages). ``host_pages``: pages of this group that host memory has room for, beside those of the
    device; ``store_pages`` of them may be on their way there at a time."""

    spec: CacheSpec
    layers: list[int]
    num_pages: int = 0
    soft_pages: int = 0
    host_pages: int = 0
    store_pages: int = 0


class CacheLayout(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler knows of device memory. ``page_size`` (tokens) is the same for every group: page-table entry i
    of a row holds positions ``[i * page_size, (i + 1) * page_size)`` in every group. ``has_storage``: pages in host
    memory can be written to a disk or a remote store, and read back."""

    page_size: int
    max_rows: int
    max_model_len: int
    groups: list[CacheGroup]
    has_storage: bool = False


def group_layers(specs: list[CacheSpec | None]) -> list[CacheGroup]:
    """Group layers by equal spec, in order of first appearance; None marks a layer without cache."""
    groups: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            groups.setdefault(spec, []).append(layer)
    return [CacheGroup(spec, layers) for spec, layers in groups.items()]


def join_layers(
    groups: list[CacheGroup], specs: list[CacheSpec | None], first: int, *, apart: Collection[CacheSpec] = ()
) -> list[CacheGroup]:
    """The groups with further layers, numbered from ``first`` on: layers of a spec that a group has join it, except
    those of specs in ``apart``, which get a group of their own."""
    joined = list(groups)
    for group in group_layers(specs):
        layers = [first + layer for layer in group.layers]
        place = next((g for g, known in enumerate(groups) if known.spec == group.spec), None)
        if place is None or group.spec in apart:
            joined.append(CacheGroup(group.spec, layers))
        else:
            joined[place] = msgspec.structs.replace(joined[place], layers=[*joined[place].layers, *layers])
    return joined


CACHE_POLICIES: Registry[Any] = Registry("cache group policy")
"""By `CacheSpec.kind`, a ``scheduling.cache.groups.GroupPolicy``; torch-free."""

CACHE_POOLS: Registry[Any] = Registry("KV pool")
"""By `CacheSpec.kind`, a ``memory.pools.Pool``."""

CACHE_BACKENDS: Registry[Any] = Registry("cache backend")
"""By `CacheSpec.kind`, a ``layers.attention.contract.CacheBackend``. A kind without one is read by attention
backends."""


def add_cache_kind(name: str, *, policy: str, pool: str, backend: str, doc: str = "") -> None:
    """Register a family's own kind; each part is ``"module:attribute"``. Adding the same again changes nothing."""
    for registry, target in ((CACHE_POLICIES, policy), (CACHE_POOLS, pool), (CACHE_BACKENDS, backend)):
        registry.add(name, target, doc=doc)
