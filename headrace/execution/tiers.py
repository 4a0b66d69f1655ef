"""`DeviceTiers`: host memory beside a model's pools, and the lanes in which pages move. Built with the executor; the
pools may be replaced by others of the same layout."""

from __future__ import annotations

import torch

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError
from headrace.execution.runner import Runner
from headrace.execution.sleep import DeviceModel
from headrace.memory.host import LOAD_BYTES, GpuHostLane, HostLane, HostPages
from headrace.memory.moving import PageMover
from headrace.memory.paging import PageCopier
from headrace.memory.plan import CachePlan, free_bytes, plan_host

GIB = 2**30
STAGING_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""Bytes that may be on their way to the host at a time. On a GPU they pass through device memory; on a CPU they are
copied before a step."""


class DeviceTiers:
    """Of one rank."""

    def __init__(self, model: DeviceModel):
        assert model.runner is not None
        groups, device = model.layout.groups, model.device
        copier = PageCopier(model.runner.pools, device)
        widths = [copier.page_bytes(group) for group in range(len(groups))]
        self._device = device
        self._host = HostPages(groups, widths, device)
        self.mover = PageMover()
        self._lane = (
            GpuHostLane(self._host, groups, widths, device) if device.type == "cuda"
            else HostLane(self._host, self.mover.wake)
        )
        self.mover.add("device", "host", self._lane)
        self.mover.add("host", "device", self._lane)
        self._lane.attach(copier)
        model.equips.append(self._join)

    def _join(self, runner: Runner) -> None:
        self._lane.attach(PageCopier(runner.pools, self._device))

    def leave(self) -> None:
        """End all moves and refer to the pools no longer; those of the next runner are joined when it is built."""
        self.mover.reset()
        self._lane.attach(None)

    def close(self) -> None:
        """Free the host's memory; idempotent."""
        self.mover.close()
        self._host.close()


def build_tiers(model: DeviceModel) -> DeviceTiers | None:
    """None where the layout has no pages in host memory."""
    return DeviceTiers(model) if any(group.host_pages for group in model.layout.groups) else None


def staging_bytes(config: EngineConfig, device: torch.device) -> int:
    """Device memory that moving pages takes."""
    return STAGING_BYTES["cuda"] + LOAD_BYTES if config.cache.host_cache_gb and device.type == "cuda" else 0


def fit_host(plan: CachePlan, config: EngineConfig, device: torch.device) -> CachePlan:
    """The plan with this rank's part of host memory; raises `ConfigError` when there is not so much."""
    if not config.cache.host_cache_gb or not plan.groups:
        return plan
    budget = int(config.cache.host_cache_gb * GIB) // config.parallel.num_ranks
    free = free_bytes(torch.device("cpu"))
    if budget > free:
        raise ConfigError(
            f"host_cache_gb {config.cache.host_cache_gb:g} is more than the {free / GIB:.1f} GiB of host memory that "
            "are free: lower it", param="host_cache_gb"
        )
    groups = plan_host(plan.groups, config.cache.page_size or 1, budget, STAGING_BYTES[device.type])
    return CachePlan(groups, plan.max_model_len)
