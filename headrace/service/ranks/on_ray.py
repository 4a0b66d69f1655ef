"""`RayLauncher`: has a Ray cluster place and start workers. Each rank has a bundle of a placement group, and in it an
actor that is the agent of this rank alone. Ray carries no commands. Imports Ray when it is used.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from typing import Any

from headrace.base import env
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.messages import Place
from headrace.service.cluster import Resources, join_cluster, living_nodes, plan_rank
from headrace.service.executor import Progress
from headrace.service.ranks.agent import Session, connect
from headrace.service.ranks.launch import Host
from headrace.service.ranks.nodes import HostAssembly, check_hello
from headrace.service.ranks.remote import Arrival, Listener, RemoteHost
from headrace.service.ranks.wire import find_fingerprint
from headrace.service.ranks.worker import RANK_BUILDER

logger = logging.getLogger(__name__)

POLL_S = 1.0
REPORT_S = 10.0
NODE_LABEL = "ray.io/node-id"


class RankAgent:
    """The actor of a rank."""

    def run(self, address: str, port: int, token: bytes, rank: int, log_level: str) -> None:
        """Until the engine ends or is lost."""
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
        env.set_log_level(log_level)
        with connect((address, port), token, rank) as line:
            Session(line, token, rank, None).run()
        os._exit(0)  # at once: the worker ends with this process

    def find_gpus(self) -> list[str]:
        """The GPUs of this actor's bundle, as numbers of the node."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


class RayLauncher:
    """Rank 0 is this process; its bundle is on this node. Others are where there is room, together if that can be."""

    def __init__(self, config: EngineConfig, size: int, progress: Progress, builder: str = RANK_BUILDER):
        self._progress, self._builder = progress, builder
        self._keeps: list[Any] = []  # actors end when nobody refers to them
        self.place = Place()

    def launch(self, config: EngineConfig, size: int) -> list[Host]:
        """See `headrace.service.ranks.launch.Launcher`; waits for room in the cluster."""
        ray = self._join(config)
        config, resources = plan_rank(config)
        group, bundles = self._find_bundles(ray, config, resources, size)
        if not config.placement_group and resources.num_gpus:
            holder = self._start(ray, group, bundles[0], resources)
            self.place = Place(int(ray.get(holder.find_gpus.remote())[0]))
        token, fingerprint = secrets.token_bytes(32), find_fingerprint(config)
        names = self._name_nodes(ray)
        running: list[Any] = []

        def check() -> None:
            for reference in ray.wait(running, timeout=0)[0]:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[-1]
                    raise EngineUnavailable(f"a worker could not be started on the Ray cluster: {reason}") from error
                raise EngineUnavailable("a worker on the Ray cluster has ended while it started")

        def make(arrival: Arrival) -> RemoteHost:
            rank = arrival.hello.node
            host = RemoteHost(names.get(arrival.peer, arrival.peer), arrival, config, {rank: Place()})
            host.begin(self._builder, fingerprint)
            return host

        address = str(ray.util.get_node_ip_address())
        listener = Listener(address, 0, token, lambda hello: check_hello(hello, config))
        try:
            for rank in range(1, size):
                actor = self._start(ray, group, bundles[rank], resources)
                running.append(actor.run.remote(address, listener.port, token, rank, env.log_level()))
            return [*HostAssembly(listener, size - 1, make, self._progress, drops=False, check=check).wait()]
        finally:
            listener.close()

    def _join(self, config: EngineConfig) -> Any:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        ray = join_cluster(config.ray_address)
        for number, handler in handlers.items():  # Ray sets its own
            signal.signal(number, handler)
        return ray

    def _find_bundles(
        self, ray: Any, config: EngineConfig, resources: Resources, size: int
    ) -> tuple[Any, list[int]]:
        """A placement group that stands, and the bundle of each rank: neighbouring ranks are on one node."""
        from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

        if config.placement_group:
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(config.placement_group)))
        else:
            own = str(ray.get_runtime_context().get_node_id())
            node = next(node for node in ray.nodes() if node["NodeID"] == own)
            if not resources.fit_into(node["Resources"]):
                raise ConfigError(
                    f"rank 0 is on this node and takes {resources.describe()}, which the node does not have for Ray; "
                    "run this command on one that has", param="executor"
                )
            places: list[dict[str, str]] = [{NODE_LABEL: own}, *[{}] * (size - 1)]
            group = placement_group([resources.bundle] * size, strategy="PACK", bundle_label_selector=places)
            self._keeps.append(group)
            self._await_room(ray, group, resources, size)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        order = {node: place for place, node in enumerate(dict.fromkeys(nodes[index] for index in range(size)))}
        return group, sorted(range(size), key=lambda index: (order[nodes[index]], index))

    def _await_room(self, ray: Any, group: Any, resources: Resources, size: int) -> None:
        ready, report_at = group.ready(), time.monotonic() + POLL_S
        while not ray.wait([ready], timeout=POLL_S)[0]:
            text = f"waiting for room on the Ray cluster: {size} times {resources.describe()}"
            self._progress(text, 0.0)
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + REPORT_S
                nodes = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in living_nodes())
                logger.info("%s; the nodes have: %s", text, nodes)

    def _start(self, ray: Any, group: Any, bundle: int, resources: Resources) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(RankAgent).options(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_restarts=0, max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
        self._keeps.append(actor)
        return actor

    def _name_nodes(self, ray: Any) -> dict[str, str]:
        return {node["NodeManagerAddress"]: f"Ray node {node['NodeManagerAddress']}" for node in ray.nodes()}
