"""The kinds of cache: for each, who accounts for its pages, who stores them, and who reads them. Names only; nothing is
imported until a model that has such a cache is served.

Refuses: knowing the kinds. ``scheduling/`` and ``memory/`` add those that many models have, a family adds its own.
"""

from __future__ import annotations

from typing import Any

from headrace.base.registry import Registry

CACHE_POLICIES: Registry[Any] = Registry("cache group policy")
"""By `CacheSpec.kind`, a ``scheduling.cache.groups.GroupPolicy``; torch-free."""

CACHE_POOLS: Registry[Any] = Registry("KV pool")
"""By `CacheSpec.kind`, a ``memory.pools.Pool``."""

CACHE_READERS: Registry[Any] = Registry("cache reader")
"""By `CacheSpec.kind`, a ``layers.attention.contract.CacheReader``. A kind without one is read by attention
backends."""


def add_cache_kind(name: str, *, policy: str, pool: str, reader: str, doc: str = "") -> None:
    """Register a family's own kind; each part is ``"module:attribute"``. Adding the same again changes nothing."""
    for registry, target in ((CACHE_POLICIES, policy), (CACHE_POOLS, pool), (CACHE_READERS, reader)):
        registry.add(name, target, doc=doc)
