"""`build_role_engine`: an engine that exchanges pages with others, with its transfer agent. Leads to torch."""

from __future__ import annotations

from hashlib import blake2b

from headrace.base.cache import CacheLayout
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError
from headrace.base.transfer import AgentOptions, GroupShape, PeerFacts
from headrace.execution.executor import LocalExecutor
from headrace.execution.tiers import device_region_bytes
from headrace.scheduling.exchange import Role
from headrace.scheduling.scheduler import Scheduler
from headrace.service.build import assemble_engine, build_rank_0, prepare_process
from headrace.service.engine import Engine
from headrace.service.executor import Progress
from headrace.service.transfer.gate import TransferGate
from headrace.service.transfer.leases import ALIGNMENT
from headrace.service.transfer.line import AgentLine

MOST_REGION_BYTES = 8 << 30


def build_role_engine(config: EngineConfig, progress: Progress, fingerprint: str) -> Engine:
    """Load the model, and start the transfer agent; raises the typed errors of base/errors. ``fingerprint`` tells the
    model's files from others."""
    prepare_process()
    executor = build_rank_0(config, progress)
    tiers = executor.tiers
    if tiers is None or tiers.peers is None or not tiers.page_bytes:
        raise ConfigError("this model keeps no KV cache, so there is nothing to send", param="disaggregation_mode")
    peers, page_bytes = tiers.peers, tiers.page_bytes
    role = Role(config.disaggregation.disaggregation_mode == "prefill", page_bytes)
    facts = describe_pages(executor, page_bytes, fingerprint)
    num_bytes, most = region_bytes(executor.layout, page_bytes), device_region_bytes(config, peers.device)
    options = AgentOptions(
        facts, config.disaggregation.disaggregation_transfer_backend, min(num_bytes, most) if most else num_bytes,
        config.transfer_host if role.is_prefill else "", config.disaggregation.disaggregation_bootstrap_port,
        device=(peers.device.index or 0) if most else -1,
    )
    line = AgentLine(options, peers.map)
    line.start()

    def join(scheduler: Scheduler) -> list[TransferGate]:
        scheduler.exchange.assume(role)
        return [TransferGate(role, line, scheduler.exchange)]

    return assemble_engine(executor, join=join)


def describe_pages(executor: LocalExecutor, page_bytes: list[int], fingerprint: str) -> PeerFacts:
    """What a peer must have in common with this engine."""
    model, layout = executor.config.model, executor.layout
    identity = [fingerprint, executor.facts.dtype, model.quantization or ""]
    if model.load_format == "dummy":
        identity.append(str(model.seed))
    shapes = [
        GroupShape(group.spec, len(group.layers), size) for group, size in zip(layout.groups, page_bytes, strict=True)
    ]
    return PeerFacts(blake2b(" ".join(identity).encode(), digest_size=16).hexdigest(), layout.page_size, shapes)


def region_bytes(layout: CacheLayout, page_bytes: list[int]) -> int:
    """Memory for pages under way: of two requests of the longest context at least, and a quarter of the pools, up to
    `MOST_REGION_BYTES`. On Linux it is committed as it is used."""
    num_pages = -(-layout.max_model_len // layout.page_size)
    longest = sum(page_bytes) * (num_pages + 1) + ALIGNMENT
    pools = sum(group.num_pages * size for group, size in zip(layout.groups, page_bytes, strict=True))
    return max(2 * longest, min(pools // 4, MOST_REGION_BYTES))
