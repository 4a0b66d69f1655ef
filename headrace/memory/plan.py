"""The memory plan: free memory, the pages of each cache group, and the longest context they can hold.

The executor measures weights and activations.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import torch

from headrace.base.cache import CACHE_POLICIES, CacheGroup, CacheSpec
from headrace.base.config import CacheConfig
from headrace.base.errors import ConfigError
from headrace.base.messages import MemoryLine
from headrace.memory.host_memory import free_host_bytes
from headrace.memory.hot_pool import HotSizes, hosted_page_bytes
from headrace.memory.pools import group_page_bytes

logger = logging.getLogger(__name__)

CPU_KV_LIMIT = 4 * 2**30
"""The most bytes of KV on a CPU: the host's memory is shared with other processes."""

CPU_SOFT_LIMIT = 192 * 2**20
"""Bytes of KV that a CPU may use before cached prefixes are evicted, however small the model."""

MIN_WINDOW_SHARE = 0.25
"""Requests are mostly shorter than the longest one: a window group sized for the longest alone would run out first."""

SHORTEST_CONTEXT = 8
"""Tokens. A cache that holds fewer is an error, not a reason to lower ``max_model_len``."""


@dataclass(frozen=True)
class CacheDemand:
    """What the pages must serve. ``groups`` have no pages assigned yet. ``is_len_fixed``: the user set
    ``max_model_len``, so it may not be lowered. ``host_bytes``: for groups whose pages are in host memory."""

    groups: list[CacheGroup]
    page_size: int
    max_model_len: int
    is_len_fixed: bool
    max_step_tokens: int
    max_rows: int
    host_bytes: int = 0

    @property
    def hot_bytes(self) -> int:
        """Bytes that those groups take of the device, whatever their pages."""
        return sum(HotSizes.of(g, self.page_size, self.max_rows, self.max_model_len).num_bytes for g in self.hosted)

    @property
    def hosted_page_bytes(self) -> int:
        """Bytes of host memory that a page of all of those groups takes."""
        return sum(hosted_page_bytes(group.spec, self.page_size) * len(group.layers) for group in self.hosted)

    @property
    def hosted(self) -> list[CacheGroup]:
        """Groups whose pages are in host memory."""
        return [group for group in self.groups if group.spec.hot_slots]


@dataclass(frozen=True)
class CachePlan:
    """The groups with their page counts (null page included), and the longest context they can hold."""

    groups: list[CacheGroup]
    max_model_len: int


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now, on a GPU or by this process on the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def kv_budget(device_type: str, free: int, fraction: float) -> int:
    """Bytes for KV, given what is free once all else is in place."""
    budget = int(free * fraction)
    return min(budget, CPU_KV_LIMIT) if device_type == "cpu" else budget


def soft_budget(device_type: str, weights: int) -> int:
    """Bytes of KV above which cached prefixes are evicted before fresh pages are used, 0 for no bound. On a CPU memory
    is committed only when first written; unused prefixes should not take more than half of what the weights take."""
    return max(CPU_SOFT_LIMIT, weights // 2) if device_type == "cpu" else 0


def plan_cache(demand: CacheDemand, config: CacheConfig, budget: int, soft: int = 0) -> CachePlan:
    """Divide ``budget`` bytes (overridden by ``config.kv_pages``) among the groups; ``soft``: see `soft_budget`, in
    bytes. Lowers ``max_model_len`` to what fits, unless the user fixed it. Raises `ConfigError` with the fix."""
    if not demand.groups:
        return CachePlan([], demand.max_model_len)
    if demand.hosted:
        budget -= demand.hot_bytes
        _check_hosted(demand, budget, config.kv_pages or 2)
    base = config.kv_pages or _most_pages(demand, config, budget)
    if base < 2:  # the null page takes one
        page = sum(_device_page_bytes(g, demand.page_size) for g in demand.groups)
        raise ConfigError(
            f"no memory is left for the KV cache ({_mib(budget)} MiB, a page takes {page / 2**20:.2f}): "
            "free memory on the device, raise memory_fraction, or serve a smaller model", param="memory_fraction",
        )
    soft_base = 0 if config.kv_pages else _most_pages(demand, config, soft)
    groups = [
        msgspec.structs.replace(
            g, num_pages=_pages_of(g, base, demand, config),
            soft_pages=soft_base and _pages_of(g, soft_base, demand, config)
        )
        for g in demand.groups
    ]
    return CachePlan(groups, _longest_context(demand, groups))


def _check_hosted(demand: CacheDemand, budget: int, least: int) -> None:
    """Raise `ConfigError` unless hot slots leave ``budget`` bytes of the device, and host memory has room for ``least``
    pages."""
    if budget <= 0:
        raise ConfigError(
            f"hot slots of {demand.max_rows} requests take {_mib(demand.hot_bytes)} MiB of the device, "
            f"{_mib(-budget) + 1} more than there are: lower max_running_requests or hot_slots", param="hot_slots"
        )
    page = demand.hosted_page_bytes
    if demand.host_bytes < least * page:
        raise ConfigError(
            f"hot_host_gb leaves {_mib(demand.host_bytes)} MiB of host memory to this rank, and {least} pages take "
            f"{_mib(least * page)}: raise it, lower kv_pages, or free host memory", param="hot_host_gb"
        )


def check_host(groups: list[CacheGroup], page_size: int) -> None:
    """Raise `ConfigError` unless the host has room now for what of the groups is in its memory: it may have gone to
    others since the plan, and taking more than there is ends the process."""
    wanted = sum(hosted_page_bytes(g.spec, page_size) * len(g.layers) * g.num_pages for g in groups if g.spec.hot_slots)
    if wanted and wanted > (free := free_bytes(torch.device("cpu"))):
        raise ConfigError(
            f"pages behind hot slots take {_mib(wanted)} MiB of host memory, and {_mib(free)} MiB are free: free some, "
            "or start with a lower hot_host_gb", param="hot_host_gb"
        )


def _device_page_bytes(group: CacheGroup, page_size: int) -> int:
    """Bytes of the device that a page takes in all layers of a group."""
    on_host = hosted_page_bytes(group.spec, page_size) * len(group.layers) if group.spec.hot_slots else 0
    return group_page_bytes(group, page_size) - on_host


def plan_host(groups: list[CacheGroup], page_size: int, budget: int, most_moving: int) -> list[CacheGroup]:
    """The groups with pages in ``budget`` bytes of host memory, in the same proportion as those of the device.
    ``most_moving``: bytes that may be on their way there at a time. Raises `ConfigError` when not a page of each
    fits."""
    sizes = [group_page_bytes(group, page_size) for group in groups]
    total = sum(size * (group.num_pages - 1) for size, group in zip(sizes, groups, strict=True))
    planned = []
    for group, size in zip(groups, sizes, strict=True):
        # of a group without layers in this pipeline stage, the other stages bound the pages
        count = budget * (group.num_pages - 1) // max(1, total)
        if count < 1:
            raise ConfigError(
                f"host_cache_gb leaves no room for a page of {size / 2**20:.1f} MiB: raise it, or leave it out",
                param="host_cache_gb"
            )
        most = max(1, most_moving // len(groups) // max(1, size))
        planned.append(msgspec.structs.replace(group, host_pages=count, store_pages=min(count, most)))
    return planned


def memory_lines(
    *, weights: int, activations: int, graphs: int, plan: CachePlan, page_size: int, free: int, encoded: int = 0,
    max_rows: int = 0,
) -> list[MemoryLine]:
    """The memory plan as a table; ``free`` is what remains once the pools are allocated, ``encoded`` what
    outputs of encoders may take."""
    lines = [MemoryLine("weights", weights), MemoryLine("activations", activations), MemoryLine("graphs", graphs)]
    lines.append(MemoryLine("encoded media", encoded))
    for group in plan.groups:
        num_bytes = group.num_pages * group_page_bytes(group, page_size)
        note = (
            f"{(group.num_pages - 1) * page_size:,} tokens in {group.num_pages - 1:,} pages, {len(group.layers)} layers"
        )
        if group.spec.hot_slots:
            on_host = hosted_page_bytes(group.spec, page_size) * len(group.layers) * group.num_pages
            note = (
                f"{group.spec.hot_slots:,} hot slots for each of {max_rows:,} requests; {note}, "
                f"{on_host / 2**30:.1f} GiB of host memory"
            )
            num_bytes += HotSizes.of(group, page_size, max_rows, plan.max_model_len).num_bytes - on_host
        lines.append(MemoryLine(f"KV {group.spec.kind.replace('_', ' ')}", num_bytes, note))
    return [line for line in lines if line.num_bytes] + [MemoryLine("free", max(0, free))]


def base_group(groups: list[CacheGroup]) -> CacheGroup:
    """The group that ``kv_pages`` counts: the first that keeps all tokens, or the widest window."""
    return next((g for g in groups if not g.spec.window), max(groups, key=lambda g: g.spec.window))


def _longest_context(demand: CacheDemand, groups: list[CacheGroup]) -> int:
    """The longest context, in tokens, that one request can have alone in the cache."""
    short = [g for g in groups if g.num_pages < _pages_needed(g, demand)]
    if not short:
        return demand.max_model_len
    fits = (min(g.num_pages for g in short) - 1) * demand.page_size
    if demand.is_len_fixed or fits < SHORTEST_CONTEXT:
        # The advice is left out where even that would be too short to serve.
        shorter = f"set max_model_len to {fits} or less, or " if fits >= SHORTEST_CONTEXT else ""
        raise ConfigError(
            f"max_model_len {demand.max_model_len} does not fit the KV cache, which holds {fits} tokens: "
            f"{shorter}give the cache more memory (kv_pages, memory_fraction, kv_dtype)", param="max_model_len",
        )
    logger.warning("max_model_len lowered from %d to %d: the KV cache holds no more", demand.max_model_len, fits)
    return fits


def _most_pages(demand: CacheDemand, config: CacheConfig, budget: int) -> int:
    """The most pages of the base group with which all groups stay within the budget."""
    # Bisection: a window group's pages are no linear function of the base group's. ``low`` fits, ``high`` does not.
    # Groups may be without layers in a pipeline stage, and take no bytes there: the other stages bound their pages.
    sizes = [_device_page_bytes(group, demand.page_size) for group in demand.groups]
    base = _device_page_bytes(base_group(demand.groups), demand.page_size)
    low, high = 0, max(budget, 0) // (base or min((size for size in sizes if size), default=1)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        total = sum(_pages_of(g, middle, demand, config) * size for g, size in zip(demand.groups, sizes, strict=True))
        low, high = (middle, high) if total <= budget else (low, middle)
    hosted = demand.hosted_page_bytes
    return min(low, demand.host_bytes // hosted) if hosted else low


def _pages_of(group: CacheGroup, base: int, demand: CacheDemand, config: CacheConfig) -> int:
    """Pages of a group when the base group has ``base``. No group can use more than that: each of its pages goes with
    a page of the base group."""
    if not group.spec.window or group.spec == base_group(demand.groups).spec:
        return base
    window, page = group.spec.window, demand.page_size
    if config.window_share is not None:
        wanted = -(-base * config.window_share // 1)
    else:
        # ``most``: all rows hold as many pages as they ever need at once, and two steps' chunks are live.
        share = max(MIN_WINDOW_SHARE, (window + demand.max_step_tokens) / demand.max_model_len)
        held = _most_held(group.spec, page, demand.max_model_len)
        most = demand.max_rows * held + 2 * -(-demand.max_step_tokens // page) + 1
        wanted = min(-(-base * share // 1), most)
    return min(base, max(int(wanted), _pages_needed(group, demand)))


def _most_held(spec: CacheSpec, page_size: int, max_model_len: int) -> int:
    """Pages that a decoding request holds at most of a kind with a window."""
    if spec.kind in CACHE_POLICIES:
        return int(CACHE_POLICIES.load(spec.kind)(spec, page_size).peak_pages(max_model_len))
    return -(-spec.window // page_size) + 1  # a window may straddle one more page


def _pages_needed(group: CacheGroup, demand: CacheDemand) -> int:
    """Pages that one request of ``max_model_len`` needs at a time, and the null page. Behind a window two chunks may be
    live (the plan in flight and the next), each starting and ending inside a page."""
    page = demand.page_size
    whole = -(-demand.max_model_len // page) + 1
    if not group.spec.window:
        return whole
    # Two chunks of max_step_tokens behind the window; 3: the null page, and pages shared at chunk borders.
    return min(whole, -(-(group.spec.window + 2 * demand.max_step_tokens) // page) + 3)


def _mib(num_bytes: int) -> int:
    return max(0, num_bytes) // 2**20
