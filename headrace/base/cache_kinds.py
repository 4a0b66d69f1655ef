"""The kinds of cache: for each, its accounting policy, its pool and its backend. Names only; nothing is
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

CACHE_BACKENDS: Registry[Any] = Registry("cache backend")
"""By `CacheSpec.kind`, a ``layers.attention.contract.CacheBackend``. A kind without one is read by attention
backends."""


def add_cache_kind(name: str, *, policy: str, pool: str, backend: str, doc: str = "") -> None:
    """Register a family's own kind; each part is ``"module:attribute"``. Adding the same again changes nothing."""
    for registry, target in ((CACHE_POLICIES, policy), (CACHE_POOLS, pool), (CACHE_BACKENDS, backend)):
        registry.add(name, target, doc=doc)
