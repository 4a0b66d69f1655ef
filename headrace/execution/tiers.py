"""`DeviceTiers`: host memory beside a model's pools, and the lanes in which pages move. Built with the executor; the
pools may be replaced by others of the same layout."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch

from headrace.base.cache import group_layers
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError
from headrace.execution.sleep import DeviceModel
from headrace.layers.rotary import find_regimes
from headrace.memory.host import LOAD_BYTES, GpuHostLane, HostLane, HostPages
from headrace.memory.host_memory import host_share
from headrace.memory.moving import PageMover
from headrace.memory.paging import PageCopier
from headrace.memory.peer_lane import PeerLane
from headrace.memory.plan import CachePlan, free_bytes, plan_host
from headrace.memory.storage import PAGE_STORES, PageStore, StoreOptions, find_remote_store
from headrace.memory.storage.checked import CheckedStore
from headrace.memory.storage.isolated import IsolatedStore
from headrace.memory.storage.lane import StorageLane
from headrace.memory.transfer.contract import load_backend
from headrace.memory.transfer.device_region import read_region_bytes
from headrace.memory.transfer.door import RegionMapping
from headrace.models.source import digest_model
from headrace.parallel.share import Share, share_kv_heads

logger = logging.getLogger(__name__)

GIB = 2**30
CPU_MOVING_BYTES = 32 * 2**20
"""Bytes that are copied to the host's pages before a step on a CPU."""
GPU_SHARE = 128
"""On a GPU pages pass through this part of its memory: a gigabyte of an H200, a long prefill step of an 8B model."""

REGION_SHARE = 16
"""The part of a GPU's memory in which pages wait to leave or have arrived, with a backend between GPUs."""
AGENT_BYTES = 600 * 2**20
"""GPU memory that the driver takes for the context of a transfer agent."""


class DeviceTiers:
    """The cache tiers of one rank. ``page_bytes`` by cache group; ``peers``: set if pages go to other engines;
    ``rotary_regimes`` as of `headrace.layers.rotary.find_regimes`."""

    def __init__(self, model: DeviceModel):
        assert model.runner is not None
        groups, device = model.layout.groups, model.device
        copier = PageCopier(model.runner.pools, device)
        widths = [copier.page_bytes(group) for group in range(len(groups))]
        self._device, self.page_bytes = device, widths
        self.rotary_regimes = find_regimes(model.loaded.model)
        self._host = HostPages(groups, widths, device)
        self.mover = PageMover()
        self._lanes: list[GpuHostLane | HostLane | PeerLane] = []
        self.peers: PeerLane | None = None
        self._mapping: RegionMapping | None = None  # of rank 0's region, on other ranks
        if any(group.host_pages for group in groups):
            self._add("host", GpuHostLane(self._host, groups, widths, device) if device.type == "cuda"
                      else HostLane(self._host, self.mover.wake))
        if model.config.disaggregation.disaggregation_mode is not None:
            self.peers = PeerLane(device, *share_peer_pages(model))
            self._mapping = RegionMapping(self.peers.map)
            self.peers.find_region = self._mapping.retry
            self._add("peer", self.peers)
        self._attach(copier)
        self._source = model.loaded.source  # of the weights by which stored pages are named
        self._storage = self._open_storage(model) if model.layout.has_storage else None

    def _add(self, place: str, lane: GpuHostLane | HostLane | PeerLane) -> None:
        self._lanes.append(lane)
        self.mover.add("device", place, lane)
        self.mover.add(place, "device", lane)

    def _attach(self, copier: PageCopier | None) -> None:
        for lane in self._lanes:
            lane.attach(copier)

    def _open_storage(self, model: DeviceModel) -> StorageLane:
        lane = StorageLane(self._host, open_stores(model), describe_pages(model), self.mover.wake)
        for source, target in (("host", "storage"), ("storage", "host"), ("storage", "")):
            self.mover.add(source, target, lane)
        return lane

    def join(self, model: DeviceModel) -> None:
        """Move pages of the model's runner from now on."""
        assert model.runner is not None
        if self._storage is not None and model.loaded.source is not self._source:
            # Loaded anew. Weights that stayed in memory keep their name: their files may be others by now, or gone.
            self._storage.rename(describe_pages(model))
            self._source = model.loaded.source
        self._attach(PageCopier(model.runner.pools, self._device))

    def open_region(self, handle: bytes, epoch: int) -> None:
        """See `headrace.service.executor.Regions`. As long as a rank cannot map the region it loses the pages of all
        transfers, which are then computed."""
        assert self._mapping is not None
        self._mapping.open(handle, epoch)

    def leave(self) -> None:
        """End all moves and refer to the pools no longer."""
        self.mover.reset()
        self._attach(None)

    def close(self) -> None:
        """Free the host's memory; idempotent."""
        self.mover.close()
        self._host.close()


def build_tiers(model: DeviceModel) -> DeviceTiers | None:
    """None where the layout has no pages in host memory, and pages are not exchanged with other engines."""
    has_host = any(group.host_pages for group in model.layout.groups)
    exchanges = model.config.disaggregation.disaggregation_mode is not None
    return DeviceTiers(model) if has_host or exchanges else None


def open_stores(model: DeviceModel) -> list[PageStore]:
    """Those that the configuration names, the fastest first; raises `ConfigError`."""
    config, ranks = model.config, model.ranks
    place = config.replica * ranks.world.size + ranks.layout.rank
    num_places = config.parallel.data_parallel_size * ranks.world.size
    stores: list[PageStore] = []
    if config.cache.disk_cache:
        capacity = int(config.cache.disk_cache_gb * GIB) // num_places
        options = StoreOptions(place, num_places, Path(config.cache.disk_cache).expanduser(), capacity)
        stores.append(PAGE_STORES.load("disk")(options))
    if config.cache.remote_cache:
        name = find_remote_store(config.cache.remote_cache)
        options = StoreOptions(place, num_places, config=config.cache.remote_options)
        stores.append(CheckedStore(IsolatedStore(name, options)))
    return stores


def describe_pages(model: DeviceModel) -> str:
    """A digest of all that decides what a page of this rank holds for given tokens: weights, configuration, layout. The
    same on every machine that has the same."""
    loaded, config, layout = model.loaded, model.config, model.layout
    # a page's bytes are the same wherever it is
    groups = [(group.spec.plain, group.layers) for group in layout.groups]
    parts = (
        digest_model(loaded.source), None if loaded.source.weight_files else config.model.seed, str(loaded.dtype),
        config.model.quantization, layout.page_size, groups,
        repr(config.speculation.options), model.ranks.layout.rank, model.ranks.world.size, model.device.type,
        *find_regimes(loaded.model),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def share_peer_pages(model: DeviceModel) -> tuple[list[Share], list[bool]]:
    """By cache group, the kv heads of this rank, and whether it is the first that has them. On GPUs servers that
    exchange pages have one rank each, and pages travel as they are: all heads count as one. Raises `ConfigError` where
    ranks divide caches whose heads are not known."""
    loaded, group = model.loaded, model.ranks.tensor
    if model.device.type != "cpu" and group.size == 1:
        return [Share.whole(1) for _ in model.layout.groups], [True for _ in model.layout.groups]
    whole = [cache.spec for cache in group_layers(loaded.family.cache_specs(loaded.spec, loaded.kv_dtype))]
    own = [cache.spec for cache in model.layout.groups]
    if group.size == 1:
        whole = own
    elif len(own) != len(whole) or any(layer >= loaded.num_layers for g in model.layout.groups for layer in g.layers):
        raise ConfigError(
            "with several ranks, a server with a disaggregation_mode takes no drafter that has caches of its own",
            param="speculative_config"
        )
    shares = [share_kv_heads(spec.num_kv_heads, group.size, group.rank) for spec in whole]
    before = [share_kv_heads(spec.num_kv_heads, group.size, max(0, group.rank - 1)) for spec in whole]
    return shares, [group.rank == 0 or last.stop <= share.start for last, share in zip(before, shares, strict=True)]


def staging_bytes(config: EngineConfig, device: torch.device) -> int:
    """Device memory that moving pages takes."""
    if device.type != "cuda":
        return 0
    region = device_region_bytes(config, device)
    host = most_moving(device) + LOAD_BYTES if config.cache.host_bytes else 0
    return host + (region + AGENT_BYTES if region else 0)


def device_region_bytes(config: EngineConfig, device: torch.device) -> int:
    """Device memory in which pages wait to leave for another engine, or have arrived: 0 where the host's memory is used
    for that. Raises `ConfigError`, `PluginError` for a transfer backend that there is not."""
    if config.disaggregation.disaggregation_mode is None:
        return 0
    backend, options = load_backend(config.disaggregation.disaggregation_transfer_backend)
    if backend.memory == "host":
        return 0
    if device.type != "cuda":
        raise ConfigError(
            "this transfer backend is for engines on GPUs; on CPUs take shared-memory",
            param="disaggregation_transfer_backend"
        )
    share = torch.cuda.get_device_properties(device).total_memory // REGION_SHARE
    return read_region_bytes(options) or share


def most_moving(device: torch.device) -> int:
    """Bytes that may be on their way to the host at a time."""
    if device.type != "cuda":
        return CPU_MOVING_BYTES
    return torch.cuda.get_device_properties(device).total_memory // GPU_SHARE


def fit_host(plan: CachePlan, config: EngineConfig, device: torch.device) -> CachePlan:
    """The plan with this rank's part of host memory; raises `ConfigError` when there is not so much."""
    if not config.cache.host_bytes or not plan.groups:
        return plan
    budget = config.cache.host_bytes // config.parallel.num_ranks
    free = free_bytes(torch.device("cpu"))
    if host_share(config.cache.host_bytes, config) > free:
        raise ConfigError(
            f"host_cache_gb {config.cache.host_bytes / GIB:g} is more than the {free / GIB:.1f} GiB of host memory "
            "that are free: lower it", param="host_cache_gb"
        )
    groups = plan_host(plan.groups, config.cache.page_size or 1, budget, most_moving(device))
    return CachePlan(groups, plan.max_model_len)
