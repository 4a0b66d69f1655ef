"""`build_executor`: from a configuration to a device that runs plans."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from traceback import clear_frames

import msgspec
import torch

from headrace.base.config import EngineConfig, resolve_for_device
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.messages import MemoryLine, Place
from headrace.execution.adapters import count_startup_bytes
from headrace.execution.assembly import Assembly, check_names
from headrace.execution.device import resolve_device, set_threads, take_cores
from headrace.execution.draft_loading import load_with_draft
from headrace.execution.executor import LocalExecutor
from headrace.execution.facts import read_facts
from headrace.execution.loading import LoadedModel, Progress, ignore_progress
from headrace.execution.sketch import kernels_ahead
from headrace.execution.sleep import DeviceModel, sweep
from headrace.execution.tiers import fit_host, staging_bytes
from headrace.execution.warmup import StepBytes, prepare_steps
from headrace.kernels.precompile import start_triton
from headrace.memory.host_memory import host_share
from headrace.memory.plan import CacheDemand, CachePlan, free_bytes, kv_budget, memory_lines, plan_cache, soft_budget
from headrace.parallel.group import Group
from headrace.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

FREE_SHARE = 0.5
"""Share of free host memory that entries behind hot slots take by default."""


def build_executor(
    config: EngineConfig, progress: Progress = ignore_progress, ranks: Ranks | None = None, place: Place | None = None
) -> LocalExecutor:
    """Load the model onto its device, size and allocate the cache, run a first step; raises typed errors. All ranks of
    ``ranks`` do so at the same time, each with its part of the model. ``place`` None: the replicas are on this
    machine, each with one rank.

    The order matters. Activations are measured with the weights in place and no pools, the KV cache gets what is then
    free less the reserve for graphs, and graphs are captured last, as they hold the addresses of the pools. After an
    error the device has its memory back, so that the caller may try again with less.
    """
    place = place or Place(config.replica, config.parallel.data_parallel_size)
    progress("starting the device", 0.0)
    check_names(config)
    device = resolve_device(config.device.device, place.index, config.parallel)
    try:
        return _build_on(device, config, progress, ranks or Ranks(), place)
    except (HeadraceError, RuntimeError, MemoryError) as error:
        cause: BaseException | None = error
        while cause is not None:
            clear_frames(cause.__traceback__)  # or the error would keep the model and its pools alive
            cause = cause.__cause__ or cause.__context__
        sweep(device)
        raise


def _build_on(
    device: torch.device, config: EngineConfig, progress: Progress, ranks: Ranks, place: Place
) -> LocalExecutor:
    if device.type == "cpu":
        take_cores(place.index, place.count)
    else:
        torch.cuda.set_device(device)
    threads = set_threads(config.device.threads, place.count)
    config = resolve_for_device(config, device.type)
    start_triton(device)
    progress("finding kernels", 0.0)
    with kernels_ahead(config, device, ranks, partial(_assemble, config, device)):
        loaded = load_with_draft(config, device, progress, ranks)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what quantising weights has left over is of no use for steps
        _log_memory("weights", device)
        assembly = _agree_on_backends(_assemble(config, device, loaded))
        config = assembly.config
        progress("running the largest steps", 0.8)
        with ranks.muted():
            measured = prepare_steps(assembly)
        progress("compiling kernels", 0.84)  # those that no step has waited for
    _log_memory("the largest steps", device)
    progress("sizing the KV cache", 0.85)
    reserve = assembly.graph_reserve(measured.captured) + _release_measured(config, device, measured)
    # Processes on the CPU share its memory; each GPU has its own.
    free = free_bytes(device) // (place.count if device.type == "cpu" else 1)
    reserve += staging_bytes(config, device) + assembly.context_bytes
    encoded = 0 if loaded.model.media is None else config.cache.encoder_cache_mib * 2**20
    adapters = count_startup_bytes(loaded.model.adapters, config.adapters, loaded.dtype.itemsize)
    budget = kv_budget(device.type, free - reserve - encoded - adapters, config.cache.memory_fraction)
    plan = plan_cache(_demand(assembly), config.cache, budget, soft_budget(device.type, loaded.num_bytes))
    plan = _agree(fit_host(plan, config, device), ranks.world)
    progress("running a first step", 0.9)
    model = DeviceModel(assembly, assembly.layout_of(plan))
    assert model.runner is not None
    graphs = assembly.capture_graphs(model.runner, progress)
    if config.device.graphs == "lazy":
        graphs = max(graphs, reserve)  # most are still to come
    kv_bytes = sum(pool.num_bytes for pool in model.runner.pools)
    memory = memory_lines(
        weights=loaded.num_bytes, activations=measured.largest + assembly.context_bytes, graphs=graphs,
        encoded=encoded, plan=plan, page_size=model.layout.page_size,
        free=free - kv_bytes - graphs - encoded - adapters,
        max_rows=assembly.max_rows,
    )
    if adapters:
        memory.insert(-1, MemoryLine("whole modules of adapters", adapters))
    facts = read_facts(loaded, model.layout, str(device), config.model)
    logger.info("%s (%s) on %s in %s, %d threads", facts.model, facts.family, device, facts.dtype, threads)
    progress("ready", 1.0)
    speculation = replace(assembly.speculation, times=model.runner.times)
    return LocalExecutor(model, facts=facts, memory=memory, progress=progress, speculation=speculation)


def _log_memory(after: str, device: torch.device) -> None:
    """Log how much of a GPU's memory torch uses and holds."""
    if device.type != "cuda":
        return
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    logger.info(
        "after %s: %.2f GiB in use, %.2f GiB held by torch, %.2f GiB free", after, used / 2**30, held / 2**30,
        free_bytes(device) / 2**30
    )


def _release_measured(config: EngineConfig, device: torch.device, measured: StepBytes) -> int:
    """Bytes to reserve for activations. What torch holds from the measurement counts as taken, as the largest step will
    need it again; but hot slots were allocated for it too, and are planned for."""
    if device.type != "cuda" or not config.cache.hot_slots:
        return 0
    torch.cuda.empty_cache()
    return measured.largest


def _assemble(config: EngineConfig, device: torch.device, loaded: LoadedModel) -> Assembly:
    return Assembly.of(_fit_steps(config, loaded), loaded, device)


def _agree_on_backends(assembly: Assembly) -> Assembly:
    """With one page size on all ranks, and graphs where all can capture: pipeline stages may have other backends."""
    config = assembly.config
    assert config.cache.page_size
    own = [config.cache.page_size, int(config.device.graphs != "off")]
    page_size, captures = agreed = assembly.loaded.ranks.world.agree(own)
    if agreed == own:
        return assembly
    graphs = config.device.graphs if captures else "off"
    config = replace(
        config, cache=replace(config.cache, page_size=page_size), device=replace(config.device, graphs=graphs)
    )
    return Assembly.of(config, assembly.loaded, assembly.device)


def _agree(plan: CachePlan, group: Group) -> CachePlan:
    """The smallest number of pages that any rank has room for: all ranks use the same pages."""
    names = ("num_pages", "soft_pages", "host_pages", "store_pages")
    wanted = [count for cache in plan.groups for count in msgspec.structs.astuple(cache)[-len(names) :]]
    max_model_len, *numbers = group.agree([plan.max_model_len, *wanted])
    counts = [dict(zip(names, numbers[at : at + len(names)], strict=True)) for at in range(0, len(numbers), len(names))]
    return CachePlan(
        [msgspec.structs.replace(cache, **own) for cache, own in zip(plan.groups, counts, strict=True)], max_model_len
    )


def _fit_steps(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Raise ``max_step_tokens`` to the longest text for a model without a KV cache, which cannot split it in chunks."""
    most = config.scheduler.max_step_tokens
    if loaded.groups or (most is not None and most >= loaded.max_model_len):
        return config
    logger.info(
        "max_step_tokens raised from %s to %d: this model computes a text in one step", most, loaded.max_model_len
    )
    return replace(config, scheduler=replace(config.scheduler, max_step_tokens=loaded.max_model_len))


def _demand(assembly: Assembly) -> CacheDemand:
    """What the cache must serve, for `plan_cache`."""
    config, loaded = assembly.config, assembly.loaded
    assert config.cache.page_size
    return CacheDemand(
        loaded.cache_groups, config.cache.page_size, loaded.max_model_len,
        is_len_fixed=config.model.max_model_len is not None, max_step_tokens=assembly.max_step_tokens,
        max_rows=assembly.max_rows, host_bytes=_host_bytes(config),
    )


def _host_bytes(config: EngineConfig) -> int:
    """This rank's part of the host memory behind hot slots. What is free is also for prefixes in host memory, whose
    pages are taken as they are filled, and for other replicas."""
    if not config.cache.hot_slots:
        return 0
    taken = host_share(config.cache.host_bytes, config)
    free = max(0, free_bytes(torch.device("cpu")) - taken)
    wanted = int(config.cache.hot_host_gb * 2**30) or int(free * FREE_SHARE) // config.parallel.data_parallel_size
    if host_share(wanted, config) > free:
        beside = f" beside {taken / 2**30:.1f} GiB of host_cache_gb" if taken else ""
        raise ConfigError(
            f"hot_host_gb {config.cache.hot_host_gb:g} is more than the {free / 2**30:.1f} GiB of host memory that are "
            f"free{beside}: lower it", param="hot_host_gb"
        )
    return wanted // config.parallel.num_ranks
