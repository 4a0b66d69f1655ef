"""How many processor cores this process may use: physical ones among those it is bound to, and no more than its
quota."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.base.env import find_groups

TOPOLOGY = Path("/sys/devices/system/cpu")


def count_cores() -> int:
    """At least 1. Two logical processors of one core count once: they share what multiplies."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = {_core_of(cpu) for cpu in os.sched_getaffinity(0)}
    quota = read_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _core_of(cpu: int) -> tuple[str, ...]:
    """Socket and core of a logical processor; where the system does not tell, each is one of its own."""
    folder = TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return tuple((folder / name).read_text().strip() for name in ("physical_package_id", "die_id", "core_id"))
    except OSError:
        return (str(cpu),)


def read_quota() -> float | None:
    """Processors' worth of time that a container leaves this process, None for all: the least of its control group and
    those around it, in either version of control groups."""
    quotas = [_read_group(folder) for folder in find_groups("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_group(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text().strip() for name in names).split()[:2]
        except (OSError, ValueError):
            continue
        return float(quota) / float(period) if quota.isdigit() and float(period) > 0 else None
    return None
