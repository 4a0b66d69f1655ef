"""`build_executor`: everything between a configuration and a device that runs plans. `LocalExecutor`: one process, one device.

Refuses: scheduling. The parts are built here in order and handed what they need; none of them sees the whole config.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import torch

from headrace.base.cache import CacheLayout
from headrace.base.config import DeviceConfig, EngineConfig, resolve_for_device
from headrace.base.errors import ConfigError, OutOfDeviceMemory, UnsupportedFeature
from headrace.base.grammar import Grammar, Vocabulary
from headrace.base.messages import MemoryLine, ModelFacts
from headrace.base.step import StepPlan
from headrace.execution.backends import ChosenBackends, choose_backends
from headrace.execution.device import resolve_device, set_threads
from headrace.execution.facts import read_facts
from headrace.execution.graphs import bucket_sizes
from headrace.execution.loading import LoadedModel, Progress, load_model
from headrace.execution.result import PendingSample
from headrace.execution.runner import Runner
from headrace.execution.structured.library import CompiledGrammar
from headrace.execution.structured.store import GrammarStore
from headrace.execution.warmup import measure_largest_steps, run_tiny_steps
from headrace.layers.build import Build
from headrace.memory.capacity import free_bytes
from headrace.memory.plan import CacheDemand, CachePlan, kv_budget, memory_lines, plan_cache

logger = logging.getLogger(__name__)

DRIVER_BYTES_PER_GRAPH = 8 * 2**20
"""Launch parameters and node state of a captured step; more than was measured for 32 layers."""


class LocalExecutor:
    """Runs plans in this process; see `headrace.service.executor.Executor`."""

    def __init__(self, config: EngineConfig, runner: Runner, layout: CacheLayout, *, facts: ModelFacts, memory: list[MemoryLine], device: torch.device):
        self.config, self.layout, self.facts, self.memory = config, layout, facts, memory
        self._runner: Runner | None = runner
        self._device = device
        self._grammars: GrammarStore | None = None

    def execute(self, plan: StepPlan) -> PendingSample:
        """Launch a plan. On a CPU the step is done when this returns."""
        assert self._runner is not None, "the executor is closed"
        try:
            return self._runner.execute(plan)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(f"no device memory for a step of {sum(plan.lengths)} tokens: {error}") from error

    def serve_grammars(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        """Take requests with grammars from now on. ``read_vocabulary`` reads the tokenizer; it is called when the first
        of them comes, on another thread."""
        assert self._runner is not None, "the executor is closed"
        self._grammars = GrammarStore(read_vocabulary, self.facts.vocab_size, self.facts.eos_ids)
        self._runner.serve_grammars(self._grammars)

    def prepare_grammar(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile a grammar on another thread."""
        if self._grammars is not None:
            return self._grammars.prepare(grammar)
        refused: Future[CompiledGrammar] = Future()
        refused.set_exception(UnsupportedFeature("structured outputs are not served here", param="grammar"))
        return refused

    def reset(self) -> None:
        """Wait for the device after a failed step. Rows need no clearing: whatever still runs is started anew."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if self._runner is not None:
            self._runner.reset()

    def close(self) -> None:
        """Free the device; idempotent."""
        self._runner = None
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def ignore_progress(stage: str, fraction: float) -> None:
    """A `Progress` that tells nobody."""


def build_executor(config: EngineConfig, progress: Progress = ignore_progress) -> LocalExecutor:
    """Load the model onto its device, size and allocate the cache, run a first step; raises typed errors."""
    device = resolve_device(config.device.device)
    threads = set_threads(config.device.threads)
    config = resolve_for_device(config, device.type)
    loaded = load_model(config, device, progress)
    config = _fit_steps(config, loaded)
    chosen = choose_backends(
        loaded.model, loaded.groups, Build(device=device, dtype=loaded.dtype), config.cache, config.device.attention_backend,
    )
    config = replace(config, cache=replace(config.cache, page_size=chosen.page_size), device=_limit_graphs(config.device, loaded, chosen))
    progress("sizing the KV cache", 0.8)
    activations = _measure_activations(config, loaded, chosen, device)
    free = free_bytes(device)
    budget = kv_budget(device.type, free - _graph_reserve(config, loaded, device), config.cache.memory_fraction)
    plan = plan_cache(_demand(config, loaded), config.cache, budget)
    layout = _layout(config, plan)
    runner = _build_runner(config, loaded, chosen, layout, device)
    progress("running a first step", 0.9)
    run_tiny_steps(runner.execute, layout, is_reader=loaded.pooling is not None)
    graphs = _capture_graphs(config, runner, layout, device, progress)
    kv_bytes = sum(pool.num_bytes for pool in runner.pools)
    memory = memory_lines(
        weights=loaded.num_bytes, activations=activations, graphs=graphs, plan=plan, page_size=layout.page_size, free=free - kv_bytes - graphs,
    )
    facts = read_facts(loaded, layout, str(device))
    logger.info("%s (%s) on %s in %s, %d threads", facts.model, facts.family, device, facts.dtype, threads)
    progress("ready", 1.0)
    return LocalExecutor(config, runner, layout, facts=facts, memory=memory, device=device)


def _limit_graphs(device: DeviceConfig, loaded: LoadedModel, chosen: ChosenBackends) -> DeviceConfig:
    """Without graphs where the model or a backend says that it cannot be captured."""
    return replace(device, graphs=device.graphs and all(getattr(part, "is_capturable", True) for part in (loaded.model, *chosen.backends)))


def _fit_steps(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """A step must hold the longest text of a model that keeps nothing between steps."""
    most = config.scheduler.max_step_tokens
    if loaded.groups or (most is not None and most >= loaded.max_model_len):
        return config
    logger.info("max_step_tokens raised from %s to %d: this model computes a text in one step", most, loaded.max_model_len)
    return replace(config, scheduler=replace(config.scheduler, max_step_tokens=loaded.max_model_len))


def _demand(config: EngineConfig, loaded: LoadedModel) -> CacheDemand:
    scheduler = config.scheduler
    assert config.cache.page_size and scheduler.max_step_tokens and scheduler.max_running_requests
    return CacheDemand(
        loaded.groups, config.cache.page_size, loaded.max_model_len, is_len_fixed=config.model.max_model_len is not None,
        max_step_tokens=scheduler.max_step_tokens, max_rows=scheduler.max_running_requests,
    )


def _layout(config: EngineConfig, plan: CachePlan) -> CacheLayout:
    assert config.cache.page_size and config.scheduler.max_running_requests
    return CacheLayout(config.cache.page_size, config.scheduler.max_running_requests, plan.max_model_len, plan.groups)


def _build_runner(config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, layout: CacheLayout, device: torch.device) -> Runner:
    assert config.scheduler.max_step_tokens
    try:
        return Runner(
            loaded.model, layout, chosen.backends, num_layers=loaded.num_layers, vocab_size=loaded.vocab_size,
            max_tokens=config.scheduler.max_step_tokens, device=device, check_finite=config.device.check_finite,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError("the KV cache does not fit the device: lower memory_fraction or kv_pages", param="memory_fraction") from error


def _graph_reserve(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> int:
    """Bytes kept for graphs, which are captured once the pools are in place (they hold the pools' addresses): the logits
    of the largest bucket in three forms, and what the driver takes for each graph."""
    if device.type != "cuda" or not config.device.graphs:
        return 0
    sizes = bucket_sizes(config.scheduler.max_running_requests or 1)
    return sizes[-1] * loaded.vocab_size * 10 + len(sizes) * DRIVER_BYTES_PER_GRAPH


def _capture_graphs(config: EngineConfig, runner: Runner, layout: CacheLayout, device: torch.device, progress: Progress) -> int:
    if device.type != "cuda" or not config.device.graphs:
        return 0
    return runner.capture_graphs(bucket_sizes(layout.max_rows), lambda done, total: progress("capturing decode steps", 0.9 + 0.1 * done / total))


def _measure_activations(config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, device: torch.device) -> int:
    """Run the largest steps over two pages per group and keep torch's pool warm for them. A CPU has nothing to reserve."""
    if device.type != "cuda":
        return 0
    groups = [msgspec.structs.replace(group, num_pages=2) for group in loaded.groups]
    layout = _layout(config, CachePlan(groups, loaded.max_model_len))
    runner = _build_runner(config, loaded, chosen, layout, device)
    assert config.scheduler.max_step_tokens
    return measure_largest_steps(runner.execute, layout, config.scheduler.max_step_tokens, device, is_reader=loaded.pooling is not None)

