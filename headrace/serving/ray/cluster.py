"""The Ray cluster: joining it, and what a replica takes of it. Imports Ray when it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError


def require_ray() -> Any:
    """The module ``ray``; raises `ConfigError` where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Ray cannot be imported ({error}); run: pip install 'headrace[ray]'", param="executor"
        ) from error
    return ray


@dataclass(frozen=True)
class Resources:
    """What one replica takes of a node."""

    num_cpus: float
    num_gpus: float = 0.0

    def describe(self) -> str:
        """``1 CPU, 2 GPU``."""
        return f"{self.num_cpus:g} CPU, {self.num_gpus:g} GPU"

    def fit_into(self, node: dict[str, float]) -> int:
        """How many replicas a node with these resources holds."""
        counts = [node.get("CPU", 0.0) // self.num_cpus] if self.num_cpus else []
        counts += [node.get("GPU", 0.0) // self.num_gpus] if self.num_gpus else []
        return int(min(counts, default=0))


@contextlib.contextmanager
def joined_cluster(address: str | None) -> Iterator[None]:
    """Join the cluster at ``address`` (with None: the one of ``RAY_ADDRESS`` or of this machine, else one of this
    machine alone, which is started) and leave it at the end. Raises `ConfigError` if it cannot be reached."""
    ray = require_ray()
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, logging_level="warning", include_dashboard=None if address else False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the Ray cluster {address or ''} cannot be joined: {error}; start one with: ray start --head",
            param="ray_address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def living_nodes() -> list[dict[str, float]]:
    """The resources of each node that lives."""
    nodes: list[dict[str, Any]] = require_ray().nodes()
    return [node["Resources"] for node in nodes if node["Alive"]]


def count_fitting(resources: Resources) -> int:
    """How many replicas the cluster can hold now."""
    return sum(resources.fit_into(node) for node in living_nodes())


def plan_replica(config: EngineConfig) -> tuple[EngineConfig, Resources]:
    """The resources of a replica, and its configuration with the device and the threads that belong to them. On GPUs a
    replica has one GPU; on CPUs ``threads`` cores, by default those of the smallest node."""
    if config.parallel.data_parallel_size > 1:
        raise ConfigError("on Ray a replica is one engine: set num_replicas instead", param="data_parallel_size")
    nodes = living_nodes()
    device, threads = config.device.device, config.device.threads
    if device == "auto":
        device = "cuda" if any(node.get("GPU") for node in nodes) else "cpu"
    if device == "cpu":
        threads = threads or max(1, int(min((node["CPU"] for node in nodes if node.get("CPU")), default=1)))
        resources = Resources(num_cpus=threads)
    elif device == "cuda":
        resources = Resources(num_cpus=threads or 1, num_gpus=1)
    else:
        raise ConfigError(f"device is cpu, cuda or auto on Ray, which chooses the GPUs; got {device}", param="device")
    return replace(config, device=replace(config.device, device=device, threads=threads)), resources
