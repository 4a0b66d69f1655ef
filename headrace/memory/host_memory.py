"""`free_host_bytes`: what is left of the host's memory, and `check_replicas`: whether all that the replicas of a host
take of it fits. Imports no torch: the client checks before it starts engines.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from headrace.base.config import EngineConfig
from headrace.base.env import find_groups
from headrace.base.errors import ConfigError

GIB = 2**30

CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
)
"""Of control groups v2 and v1: the files of limit and usage, and the key in ``memory.stat`` of reclaimable page
cache."""


def free_host_bytes() -> int:
    """Bytes that this process can allocate now (control groups may set lower limits than the machine)."""
    left = [_left_by(folder, *names) for folder in find_groups("memory") for names in CGROUP_FILES]
    return min([psutil.virtual_memory().available, *(count for count in left if count is not None)])


def _left_by(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> int | None:
    """Bytes left under a control group's limit, None without one. Reclaimable page cache counts as free."""
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(reclaimable, 0))) if limit.isdigit() else None
    except (OSError, ValueError):
        return None


def host_share(num_bytes: int, config: EngineConfig) -> int:
    """Of ``num_bytes`` that all ranks of a replica take together, those of one host. Where others place the ranks, it
    has one of them at least."""
    return num_bytes // (config.nodes.nnodes if config.nodes.executor == "local" else config.parallel.num_ranks)


def check_replicas(config: EngineConfig) -> None:
    """Raise `ConfigError` unless the host has the memory that is stated for pages of all replicas together. Each one
    checks its own part when it starts, but does not know what others are about to take."""
    cache, count = config.cache, config.parallel.data_parallel_size
    if count == 1 or config.nodes.executor != "local":
        return
    hot = int(cache.hot_host_gb * GIB) if cache.hot_slots else 0
    wanted, free = count * host_share(hot + cache.host_bytes, config), free_host_bytes()
    if wanted > free:
        name = "hot_host_gb" if hot > cache.host_bytes else "host_cache_gb"
        stated = " and ".join(
            f"{own} {part / GIB:g}" for own, part in (("hot_host_gb", hot), ("host_cache_gb", cache.host_bytes)) if part
        )
        raise ConfigError(
            f"{count} replicas with {stated} each take {wanted / GIB:.1f} GiB of host memory, and {free / GIB:.1f} GiB "
            f"are free: lower {name}, or data_parallel_size", param=name
        )
