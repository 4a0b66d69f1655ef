"""The Ray cluster: joining it, and what a rank and a replica take of it. Imports Ray when it is used."""

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
    """CPUs and GPUs that a rank or replica takes of a node."""

    num_cpus: float
    num_gpus: float = 0.0

    @property
    def bundle(self) -> dict[str, float]:
        """As a bundle of a placement group."""
        return {name: value for name, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value}

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
    """`join_cluster`, and leave it at the end unless this process was in it before."""
    ray = require_ray()
    if ray.is_initialized():
        yield
        return
    join_cluster(address)
    try:
        yield
    finally:
        ray.shutdown()


def join_cluster(address: str | None) -> Any:
    """Join the cluster at ``address`` (with None: the one of ``RAY_ADDRESS`` or of this machine, else one of this
    machine alone, which is started), for as long as this process lives; returns the module ``ray``. Raises
    `ConfigError` if it cannot be reached."""
    ray = require_ray()
    if ray.is_initialized():
        return ray
    try:
        ray.init(address=address, logging_level="warning", include_dashboard=None if address else False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the Ray cluster {address or ''} cannot be joined: {error}; start one with: ray start --head",
            param="ray_address"
        ) from error
    return ray


def living_nodes() -> list[dict[str, float]]:
    """The resources of each node that lives."""
    nodes: list[dict[str, Any]] = require_ray().nodes()
    return [node["Resources"] for node in nodes if node["Alive"]]


def plan_rank(config: EngineConfig) -> tuple[EngineConfig, Resources]:
    """The resources of a rank, and the configuration with the device and the threads that belong to them. On GPUs a
    rank has one GPU; on CPUs ``threads`` cores, by default those of the smallest node."""
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


@dataclass(frozen=True)
class ReplicaPlan:
    """What a replica takes: ``ranks`` times ``rank``. ``config`` has executor ``ray`` where they may be on several
    nodes, and ``local`` where all are on that of the replica."""

    config: EngineConfig
    rank: Resources
    ranks: int

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of the replica's placement group; the replica's own actor is in the first."""
        if self.config.nodes.executor == "ray":
            return [self.rank.bundle] * self.ranks
        return [{name: value * self.ranks for name, value in self.rank.bundle.items()}]

    @property
    def own(self) -> Resources:
        """The resources of the replica's own actor."""
        first = self.bundles[0]
        return Resources(first.get("CPU", 0.0), first.get("GPU", 0.0))

    def describe(self) -> str:
        """``2 times 1 CPU, 1 GPU``."""
        return f"{self.ranks} times {self.rank.describe()}" if self.ranks > 1 else self.rank.describe()

    def count_fitting(self) -> int:
        """How many replicas the cluster can hold now, by its nodes' resources in all."""
        if len(self.bundles) == 1:
            return sum(self.own.fit_into(node) for node in living_nodes())
        return sum(self.rank.fit_into(node) for node in living_nodes()) // self.ranks


def plan_replica(config: EngineConfig, *, is_spread: bool = True) -> ReplicaPlan:
    """The resources of a replica, and its configuration. Its ranks are on one node if a node is large enough for them,
    or unless it ``is_spread``."""
    if config.parallel.data_parallel_size > 1:
        raise ConfigError("on Ray a replica is one engine: set num_replicas instead", param="data_parallel_size")
    if config.nodes.nnodes > 1:
        raise ConfigError("on Ray the hosts are those of the cluster; leave nnodes at 1", param="nnodes")
    config, rank = plan_rank(config)
    ranks = config.parallel.num_ranks
    whole = ReplicaPlan(replace(config, nodes=replace(config.nodes, executor="local")), rank, ranks)
    if not is_spread or ranks == 1 or any(whole.own.fit_into(node) for node in living_nodes()):
        return whole
    return ReplicaPlan(replace(config, nodes=replace(config.nodes, executor="ray")), rank, ranks)


def hand_over(config: EngineConfig) -> EngineConfig:
    """The configuration of the engine process, which takes the other bundles of this actor's placement group. Unchanged
    if all ranks are in the actor's own bundle."""
    if config.nodes.executor != "ray":
        return config
    import ray

    group = ray.util.get_current_placement_group()
    assert group is not None, "a replica of several bundles is in a placement group"
    return replace(config, placement_group=group.id.hex(), ray_address=ray.get_runtime_context().gcs_address)
