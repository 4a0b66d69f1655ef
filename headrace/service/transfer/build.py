"""`build_role_engine`: an engine that exchanges pages with others, with its transfer agent. Leads to torch."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from headrace.base.cache import CacheLayout
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError
from headrace.base.transfer import LEASE_S, AgentOptions, GroupShape, PeerFacts
from headrace.execution.executor import LocalExecutor
from headrace.execution.tiers import device_region_bytes
from headrace.memory.peer_lane import PeerLane
from headrace.memory.transfer.contract import AnyRegion
from headrace.memory.transfer.door import Door
from headrace.scheduling.exchange import Role
from headrace.scheduling.scheduler import Scheduler
from headrace.service.build import assemble_engine, build_rank_0, prepare_process
from headrace.service.engine import Engine
from headrace.service.executor import Executor, Pace, Progress, Regions
from headrace.service.transfer.gate import TransferGate
from headrace.service.transfer.leases import ALIGNMENT
from headrace.service.transfer.line import AgentLine

MOST_REGION_BYTES = 8 << 30


def build_role_engine(config: EngineConfig, progress: Progress, fingerprint: str) -> Engine:
    """Load the model, and start the transfer agent; raises the typed errors of base/errors. ``fingerprint`` tells the
    model's files from others."""
    prepare_process()
    executor = build_rank_0(config, progress)
    return assemble_role(executor, fingerprint)


@dataclass(frozen=True)
class OtherRanks:
    """The executor of all ranks, how they keep pace, and what opens regions in those beside rank 0."""

    executor: Executor
    pace: Pace
    regions: Regions


def assemble_role(own: LocalExecutor, fingerprint: str, ranked: OtherRanks | None = None) -> Engine:
    """The engine over the executor of rank 0, ``own``, or over those of several ranks, and the transfer agent. Pages of
    all ranks lie in one region, which the others map; raises `ConfigError`."""
    config, tiers = own.config, own.tiers
    if tiers is None or tiers.peers is None or not own.layout.groups:
        raise ConfigError("this model keeps no KV cache, so there is nothing to send", param="disaggregation_mode")
    peers = tiers.peers
    if ranked is not None and peers.device.type != "cpu":
        raise ConfigError(
            "on GPUs a server with a disaggregation_mode has one rank: leave tensor_parallel_size at 1",
            param="tensor_parallel_size"
        )
    role = Role(config.disaggregation.disaggregation_mode == "prefill", peers.page_bytes)
    line = AgentLine(_describe_agent(own, peers, fingerprint), RegionSharing(peers, ranked).attach)
    line.start()

    def join(scheduler: Scheduler) -> list[TransferGate]:
        scheduler.exchange.assume(role)
        return [TransferGate(role, line, scheduler.exchange)]

    if ranked is not None:
        return assemble_engine(ranked.executor, ranked.pace, join)
    return assemble_engine(own, join=join)


class RegionSharing:
    """Maps each new region on all ranks."""

    def __init__(self, peers: PeerLane, ranked: OtherRanks | None):
        self._peers, self._ranked = peers, ranked
        self._door: Door | None = None

    def attach(self, region: AnyRegion | None, epoch: int) -> None:
        """See `AgentLine`."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._ranked is not None:
            self._door = None if region is None else Door(region)
            self._ranked.regions.open_region(b"" if self._door is None else self._door.handle, epoch)
        self._peers.map(region, epoch)


def _describe_agent(own: LocalExecutor, peers: PeerLane, fingerprint: str) -> AgentOptions:
    config, page_bytes = own.config, peers.page_bytes
    num_bytes, most = region_bytes(own.layout, page_bytes), device_region_bytes(config, peers.device)
    is_prefill = config.disaggregation.disaggregation_mode == "prefill"
    return AgentOptions(
        describe_pages(own, peers, fingerprint), config.disaggregation.disaggregation_transfer_backend,
        min(num_bytes, most) if most else num_bytes, config.transfer_host if is_prefill else "",
        config.disaggregation.disaggregation_bootstrap_port, device=(peers.device.index or 0) if most else -1,
        lease_s=LEASE_S,
    )


def describe_pages(executor: LocalExecutor, peers: PeerLane, fingerprint: str) -> PeerFacts:
    """What a peer must have in common with this engine."""
    model, layout, tiers = executor.config.model, executor.layout, executor.tiers
    assert tiers is not None
    identity = [fingerprint, executor.facts.dtype, model.quantization or "", *map(str, tiers.rotary_regimes)]
    if model.load_format == "dummy":
        identity.append(str(model.seed))
    shapes = [
        GroupShape(msgspec.structs.replace(group.spec.plain, num_kv_heads=count), len(group.layers), size)
        for group, count, size in zip(layout.groups, peers.head_counts, peers.page_bytes, strict=True)
    ]
    return PeerFacts(blake2b(" ".join(identity).encode(), digest_size=16).hexdigest(), layout.page_size, shapes)


def region_bytes(layout: CacheLayout, page_bytes: list[int]) -> int:
    """Memory for pages under way: of two requests of the longest context at least, and a quarter of the pools, up to
    `MOST_REGION_BYTES`. On Linux it is committed as it is used."""
    num_pages = -(-layout.max_model_len // layout.page_size)
    longest = sum(page_bytes) * (num_pages + 1) + ALIGNMENT
    pools = sum(group.num_pages * size for group, size in zip(layout.groups, page_bytes, strict=True))
    return max(2 * longest, min(pools // 4, MOST_REGION_BYTES))
