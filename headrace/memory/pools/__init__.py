"""Pools by kind of cache. Full and sliding-window attention store the same bytes; only their accounting differs."""

from headrace.memory.pools.contract import POOLS, Pool, build_pool, group_page_bytes

POOLS.add("full", "headrace.memory.pools.keys_values:KeyValuePool", doc="keys and values of all tokens")
POOLS.add(
    "sliding_window", "headrace.memory.pools.keys_values:KeyValuePool", doc="keys and values of the latest tokens"
)
POOLS.add("mla", "headrace.memory.pools.latents:LatentPool", doc="one vector per token, keys and values in one")

__all__ = ["POOLS", "Pool", "build_pool", "group_page_bytes"]
