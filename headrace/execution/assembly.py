"""`Assembly`: how a model is loaded and a runner built over it, the same way at the start and whenever either comes
back.

Refuses: deciding sizes; they are in the resolved configuration and the layout.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import msgspec
import torch

from headrace.base.cache import CacheLayout
from headrace.base.config import DeviceConfig, EngineConfig, ModelConfig
from headrace.base.errors import ConfigError
from headrace.execution.backends import ChosenBackends, choose_backends
from headrace.execution.captures import NoRecorder, Recorder
from headrace.execution.device import is_out_of_memory
from headrace.execution.graphs import GraphSizes, bucket_sizes, step_sizes
from headrace.execution.loading import LoadedModel, Progress, load_model
from headrace.execution.runner import Runner
from headrace.execution.warmup import measure_largest_steps, measure_peak, run_tiny_steps
from headrace.layers.build import Build
from headrace.memory.plan import CachePlan, free_bytes

DRIVER_BYTES_PER_LAYER = 64 * 2**10
"""Launch parameters and node state of a layer in a captured step: twice what was measured."""
LIBRARY_BYTES = 64 * 2**20
"""What a library of products takes for the stream that records."""


@dataclass(frozen=True)
class StepBytes:
    """What steps take beyond what is there before them: the largest as written, and the largest ones that graphs are
    made of, one for each kind, together."""

    largest: int = 0
    captured: int = 0


@dataclass(frozen=True)
class Assembly:
    """``config`` has no device default left open; ``layout`` has the pages of all cache groups."""

    config: EngineConfig
    layout: CacheLayout
    device: torch.device

    def load(self, model: ModelConfig, progress: Progress) -> LoadedModel:
        """Read a model; raises what `load_model` does."""
        return load_model(replace(self.config, model=model), self.device, progress)

    def build_runner(self, loaded: LoadedModel, chosen: ChosenBackends) -> Runner:
        """Pools, page tables, rows and sampler over a model, and a first step."""
        runner = build_runner(self.config, loaded, chosen, self.layout, self.device)
        run_tiny_steps(runner.execute, self.layout, is_reader=loaded.pooling is not None)
        return runner

    @torch.inference_mode()
    def capture_graphs(self, runner: Runner, loaded: LoadedModel, chosen: ChosenBackends, progress: Progress) -> int:
        """Let steps run as graphs where there is anything to capture: all recorded now, or the largest alone and the
        others when they are wanted. Returns the bytes that those recorded take."""
        if not has_graphs(self.config, self.device):
            return 0
        sizes, done, free = graph_sizes(self.config, loaded, chosen), itertools.count(1), free_bytes(self.device)
        captured = runner.capture(sizes, Recorder(self.device))
        progress("capturing graphs", 0.9)
        if self.config.device.graphs == "lazy":
            captured.record_largest()
        else:
            captured.record_all(lambda: progress("capturing graphs", 0.9 + 0.1 * next(done) / len(sizes)))
        return max(0, free - free_bytes(self.device))

    def rebuild_runner(self, loaded: LoadedModel, *, captures: bool, progress: Progress) -> Runner:
        """What the start does once the layout is known: measure, allocate, run, capture."""
        build = Build(device=self.device, dtype=loaded.dtype)
        chosen = choose_backends(
            loaded.model, loaded.groups, build, self.config.cache, self.config.device.attention_backend
        )
        measure_steps(self.config, loaded, chosen, self.device)
        runner = self.build_runner(loaded, chosen)
        if captures:
            self.capture_graphs(runner, loaded, chosen, progress)
        return runner


def limit_graphs(device: DeviceConfig, loaded: LoadedModel, chosen: ChosenBackends) -> DeviceConfig:
    """Without graphs where the model or a backend says that it cannot be captured."""
    is_capturable = loaded.model.is_capturable and all(backend.is_capturable for backend in chosen.backends)
    return device if is_capturable else replace(device, graphs="off")


def has_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are captured."""
    return device.type == "cuda" and config.device.graphs != "off"


def graph_sizes(config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends) -> GraphSizes:
    """Buckets to capture."""
    assert config.scheduler.max_running_requests and config.scheduler.max_step_tokens
    decodes = bucket_sizes(config.scheduler.max_running_requests)
    if not all(backend.supports_dynamic_lengths for backend in chosen.backends):
        return GraphSizes(decodes, [])
    return GraphSizes(decodes, step_sizes(config.scheduler.max_step_tokens, loaded.num_parameters))


def graph_reserve(
    config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, captured: int, device: torch.device
) -> int:
    """Bytes kept for graphs, which are captured once the pools are in place (they hold the pools' addresses): what was
    ``captured`` by `measure_steps`, since all sizes share the memory of the largest, and what the driver takes for
    each. The same whenever they are captured."""
    if not has_graphs(config, device):
        return 0
    return (
        captured + len(graph_sizes(config, loaded, chosen)) * loaded.num_layers * DRIVER_BYTES_PER_LAYER + LIBRARY_BYTES
    )


def layout_of(config: EngineConfig, plan: CachePlan) -> CacheLayout:
    """The layout that a plan of the cache amounts to."""
    assert config.cache.page_size and config.scheduler.max_running_requests
    return CacheLayout(config.cache.page_size, config.scheduler.max_running_requests, plan.max_model_len, plan.groups)


def build_runner(
    config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, layout: CacheLayout, device: torch.device
) -> Runner:
    """A runner over a model; raises `ConfigError` when its pools do not fit the device."""
    assert config.scheduler.max_step_tokens
    try:
        return Runner(
            loaded.model, layout, chosen.backends, num_layers=loaded.num_layers, vocab_size=loaded.vocab_size,
            max_tokens=config.scheduler.max_step_tokens, device=device, check_finite=config.device.check_finite,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the KV cache does not fit the device: lower memory_fraction or kv_pages", param="memory_fraction"
        ) from error


def build_small_runner(
    config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, device: torch.device
) -> Runner:
    """A runner with two pages per group: for steps before it is known how many pages there will be."""
    groups = [msgspec.structs.replace(group, num_pages=2) for group in loaded.groups]
    return build_runner(config, loaded, chosen, layout_of(config, CachePlan(groups, loaded.max_model_len)), device)


def measure_steps(config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, device: torch.device) -> StepBytes:
    """Run the largest steps over two pages per group and keep torch's pool warm for them. A CPU has nothing to
    reserve."""
    if device.type != "cuda":
        return StepBytes()
    runner = build_small_runner(config, loaded, chosen, device)
    assert config.scheduler.max_step_tokens
    largest = measure_largest_steps(
        runner.execute, runner.layout, config.scheduler.max_step_tokens, device, is_reader=loaded.pooling is not None
    )
    if not has_graphs(config, device):
        return StepBytes(largest)
    sizes = graph_sizes(config, loaded, chosen)
    ends = (GraphSizes(sizes.decodes[-1:], []), GraphSizes([], sizes.tokens[-1:]))
    with torch.inference_mode():
        captured = sum(measure_peak(runner.capture(end, NoRecorder()).record_largest, device) for end in ends)
    return StepBytes(largest, captured)
