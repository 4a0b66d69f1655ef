"""`Assembly`: the parts that runners are built from: a loaded model, its configuration, and an attention backend for
each cache group. Backends are chosen by the capabilities that they declare, never by name.

Refuses: deciding how many pages there are; that is in the layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from headrace.base.cache import CACHE_BACKENDS, CacheGroup, CacheLayout
from headrace.base.config import CacheConfig, EngineConfig
from headrace.base.errors import ConfigError, PluginError
from headrace.base.registry import Registry
from headrace.base.speculation import BENCH, Speculation
from headrace.base.step import MAX_DRAFTS, MAX_ENTRIES
from headrace.execution.captures import Recorder
from headrace.execution.device import is_out_of_memory
from headrace.execution.draft_loading import describe_speculation
from headrace.execution.graph_sizes import GraphSizes, bucket_sizes, step_sizes
from headrace.execution.loading import LoadedModel, Progress
from headrace.execution.runner import Runner
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import AttentionBackend, AttentionGeometry, UnusedBackend
from headrace.layers.build import Build
from headrace.layers.moe.contract import DISPATCHERS, EXPERTS
from headrace.layers.self_attention import AttentionLayer
from headrace.memory.plan import CachePlan, check_host, free_bytes
from headrace.memory.storage import find_remote_store

DEFAULT_PAGE_SIZE = 16

DRIVER_BYTES_PER_LAYER = 64 * 2**10
"""Launch parameters and node state of a layer in a captured step: twice what was measured."""
LIBRARY_BYTES = 64 * 2**20
"""Workspace that a matrix library (cuBLAS) allocates for the capture stream."""


@dataclass(frozen=True)
class ChosenBackends:
    """One backend per cache group, all made for ``page_size``. Cache kinds with a backend of the family's own get that
    `CacheBackend`, whose class the family's layers know."""

    page_size: int
    backends: list[AttentionBackend]


@dataclass(frozen=True)
class Assembly:
    """``config`` has all device defaults filled in. ``backends[g]`` reads cache group g."""

    config: EngineConfig
    loaded: LoadedModel
    backends: list[AttentionBackend]
    device: torch.device

    @classmethod
    def of(cls, config: EngineConfig, loaded: LoadedModel, device: torch.device) -> Assembly:
        """Choose backends, and settle the page size and whether there are graphs."""
        chosen = _choose_for(config, loaded, Build(device=device, dtype=loaded.dtype))
        is_capturable = loaded.model.is_capturable and all(backend.is_capturable for backend in chosen.backends)
        is_capturable = is_capturable and (loaded.draft is None or loaded.draft.model.is_capturable)
        graphs = config.device.graphs if is_capturable else "off"
        config = replace(
            config, cache=replace(config.cache, page_size=chosen.page_size),
            device=replace(config.device, graphs=graphs),
        )
        return cls(config, loaded, chosen.backends, device)

    @property
    def speculation(self) -> Speculation:
        """How the model is drafted for; raises `ConfigError`."""
        most_drafts = min((backend.most_drafts for backend in self.backends), default=MAX_DRAFTS)
        found = describe_speculation(self.config, self.loaded, most_drafts)
        return replace(found, most_drafts=most_drafts, max_entries=self.max_entries if self.has_graphs else MAX_ENTRIES)

    @property
    def is_pooling(self) -> bool:
        """Whether the model computes embeddings, scores or classes instead of tokens."""
        return self.loaded.pooling is not None

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured."""
        return self.device.type == "cuda" and self.config.device.graphs != "off"

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step."""
        assert self.config.scheduler.max_step_tokens
        return self.config.scheduler.max_step_tokens

    @property
    def max_rows(self) -> int:
        """Requests that run at a time."""
        assert self.config.scheduler.max_running_requests
        return self.config.scheduler.max_running_requests

    @property
    def max_entries(self) -> int:
        """Decode entries of the largest captured step."""
        if self.loaded.draft is None:
            return self.max_rows
        return max(self.max_rows, min(self.max_rows * (1 + MAX_DRAFTS), MAX_ENTRIES, self.max_step_tokens))

    def graph_sizes(self) -> GraphSizes:
        """Buckets to capture."""
        decodes = bucket_sizes(self.max_entries)
        has_dynamic_lengths = all(backend.supports_dynamic_lengths for backend in self.backends)
        if not has_dynamic_lengths or not self.loaded.model.captures_prefill:
            return GraphSizes(decodes, [])
        loaded = self.loaded
        num_layers = len(loaded.stage.layers(loaded.num_layers))
        return GraphSizes(
            decodes, step_sizes(self.max_step_tokens, loaded.count_active_parameters(), num_layers)
        )

    def graph_reserve(self, captured: int) -> int:
        """Bytes to reserve for graphs before the pools are sized. Graphs hold the pools' addresses, so they can only be
        captured (and measured) afterwards. ``captured`` bytes of activations serve all sizes, which share the memory of
        the largest; what the driver takes for each graph comes on top. The same for lazy and eager capture."""
        if not self.has_graphs:
            return 0
        sizes, model = self.graph_sizes(), self.loaded.model
        num_graphs = len(sizes) * (1 if model.adapters is None else 1 + model.adapters.num_captured)
        num_graphs += len(sizes.with_prefixes) if any(backend.prefix_members for backend in self.backends) else 0
        num_graphs += len(sizes.with_media) if model.media is not None and model.media.captured is not None else 0
        return captured + num_graphs * self.loaded.num_layers * DRIVER_BYTES_PER_LAYER + LIBRARY_BYTES

    @property
    def context_bytes(self) -> int:
        """Bytes that the largest step takes at the end of the longest context beyond those at its beginning. On a CPU
        nothing is reserved for activations."""
        if self.device.type == "cpu":
            return 0
        tokens, longest = self.max_step_tokens, self.loaded.max_model_len
        return sum(
            max(0, backend.context_bytes(tokens, longest) - backend.context_bytes(tokens, min(tokens, longest)))
            for backend in self.backends
        )

    def layout_of(self, plan: CachePlan) -> CacheLayout:
        """The layout of a planned cache."""
        cache = self.config.cache
        assert cache.page_size
        return CacheLayout(cache.page_size, self.max_rows, plan.max_model_len, plan.groups, cache.has_storage)

    def build_runner(self, layout: CacheLayout) -> Runner:
        """Pools, page tables, rows and sampler over the model; raises `ConfigError` when the pools do not fit the
        device, or the host."""
        check_host(layout.groups, layout.page_size)
        try:
            runner = Runner(
                self.loaded.model, layout, self.backends, num_layers=self.loaded.num_layers,
                vocab_size=self.loaded.vocab_size, max_tokens=self.max_step_tokens, device=self.device,
                check_finite=self.config.device.check_finite,
            )
            runner.join(self.loaded.ranks, self.loaded.dtype)
            draft = self.loaded.draft
            if draft is not None:
                sizes = self.graph_sizes()
                runner.draft_with(
                    draft.model, hidden_size=self.loaded.spec.hidden_size, dtype=self.loaded.dtype,
                    max_tokens=max(*sizes.decodes, *sizes.tokens),
                )
                if draft.method == BENCH:
                    runner.accept_at_rate(self.config.speculation.options.acceptance_rate or 0.0)
            return runner
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            remedy = "memory_fraction or kv_pages"
            if self.config.cache.hot_slots:
                remedy = "hot_slots, max_running_requests or hot_host_gb"
            raise ConfigError(
                f"the KV cache does not fit the device: lower {remedy}", param=remedy.replace(",", "").split()[0]
            ) from error

    def build_small_runner(self) -> Runner:
        """A runner with two pages per group: for steps before it is known how many pages there will be."""
        groups = [msgspec.structs.replace(group, num_pages=2) for group in self.loaded.cache_groups]
        return self.build_runner(self.layout_of(CachePlan(groups, self.loaded.max_model_len)))

    @torch.inference_mode()
    def capture_graphs(self, runner: Runner, progress: Progress) -> int:
        """Let steps run as graphs where they can: record all now, or (lazy) the largest now and the others when needed
        or in idle moments. Returns the bytes of those recorded now."""
        if not self.has_graphs:
            return 0
        # What is measured here is reported; the room for it was reserved by `graph_reserve`.
        sizes, done, free = self.graph_sizes(), itertools.count(1), free_bytes(self.device)
        captured = runner.capture(sizes, Recorder(self.device))
        progress("capturing graphs", 0.9)
        if self.config.device.graphs == "lazy":
            captured.record_largest()
        else:
            captured.record_all(lambda: progress("capturing graphs", min(1.0, 0.9 + 0.1 * next(done) / len(sizes))))
        if self.loaded.draft is not None:
            runner.times = captured.measure()
        return max(0, free - free_bytes(self.device))


@dataclass(frozen=True)
class _Choice:
    """The backend of a group: ``make`` builds it."""

    preferred_page_size: int | None
    make: Callable[[], AttentionBackend]


def check_names(config: EngineConfig) -> None:
    """Raise `ConfigError` for an option that names no plug-in, whether the model uses that kind or not."""
    named: tuple[tuple[Registry[Any], str, str], ...] = (
        (ATTENTION_BACKENDS, config.device.attention_backend, "attention_backend"),
        (EXPERTS, config.device.moe_experts, "moe_experts"),
        (DISPATCHERS, config.parallel.all2all_backend, "all2all_backend"),
    )
    for registry, name, param in named:
        if name != "auto":
            registry.require(name, param)
    if config.cache.remote_cache is not None:
        find_remote_store(config.cache.remote_cache)


def _choose_for(config: EngineConfig, loaded: LoadedModel, build: Build) -> ChosenBackends:
    """Backends for the model and its drafter; raises `ConfigError` that says whether it is the drafter's layers that
    none can serve."""
    name = config.device.attention_backend
    try:
        return choose_backends(loaded.models, loaded.cache_groups, build, config.cache, name)
    except ConfigError as error:
        if loaded.draft is None:
            raise
        choose_backends((loaded.model,), loaded.groups, build, config.cache, name)
        raise ConfigError(
            f"speculative_config: layers of the drafter cannot be served: {error}; choose another drafter, "
            "attention_backend or kv_dtype", param="speculative_config",
        ) from error


def choose_backends(
    models: Sequence[nn.Module], groups: list[CacheGroup], build: Build, cache: CacheConfig, name: str
) -> ChosenBackends:
    """Take the named attention backend, or the best that can serve each group. The page size is the user's, else the
    one that the backend of the first group with layers prefers, else 16."""
    wanted = None if name == "auto" else name
    page_size = cache.page_size or DEFAULT_PAGE_SIZE
    try:
        choices = _choose(models, groups, build, page_size, wanted)
        # A backend is chosen for a page size, and may prefer another: then all groups choose again, for that one.
        first = next((choice for group, choice in zip(groups, choices, strict=True) if group.layers), None)
        preferred = None if first is None else first.preferred_page_size
        if cache.page_size is None and preferred is not None and preferred != page_size:
            page_size = preferred
            choices = _choose(models, groups, build, page_size, wanted)
    except PluginError as error:
        raise ConfigError(f"attention_backend {name}: {error}", param="attention_backend") from error
    return ChosenBackends(page_size, [choice.make() for choice in choices])


def _choose(
    models: Sequence[nn.Module], groups: list[CacheGroup], build: Build, page_size: int, wanted: str | None
) -> list[_Choice]:
    by_layer = _attention_by_layer(models, groups)
    return [_choose_one(group, by_layer, build, page_size, wanted) for group in groups]


def _choose_one(
    group: CacheGroup, by_layer: dict[int, AttentionLayer], build: Build, page_size: int, wanted: str | None
) -> _Choice:
    kind = group.spec.kind
    if kind in CACHE_BACKENDS:
        own: Any = CACHE_BACKENDS.load(kind)
        return _Choice(own.preferred_page_size, lambda: own(group.spec, page_size, build.device))
    if not group.layers:
        return _Choice(None, UnusedBackend)
    geometry = _geometry(group, [by_layer[layer] for layer in group.layers], build, page_size)
    backend: Any = ATTENTION_BACKENDS.choose(geometry, wanted)
    return _Choice(backend.preferred_page_size, lambda: backend(geometry, build.device))


def _attention_by_layer(models: Sequence[nn.Module], groups: list[CacheGroup]) -> dict[int, AttentionLayer]:
    """The attention layers of the groups that attention backends read."""
    cached = sorted(layer for group in groups if group.spec.kind not in CACHE_BACKENDS for layer in group.layers)
    modules = [module for model in models for module in model.modules()]
    attentions = [module for module in modules if isinstance(module, AttentionLayer) and module.uses_backend]
    # By order: the i-th of these modules in the model is of the i-th layer with a cache that backends read.
    assert len(attentions) == len(cached), f"{len(attentions)} attention layers, {len(cached)} layers with a cache"
    return dict(zip(cached, attentions, strict=True))


def _geometry(group: CacheGroup, attentions: list[AttentionLayer], build: Build, page_size: int) -> AttentionGeometry:
    spec = group.spec
    heads = {attention.num_heads for attention in attentions}
    assert len(heads) == 1, "layers of one cache group have the same number of heads"
    return AttentionGeometry(
        device=build.device.type, dtype=str(build.dtype).removeprefix("torch."), kv_dtype=spec.dtype,
        capability=build.capability, num_heads=heads.pop(), num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        value_dim=spec.value_dim, page_size=page_size, window=spec.window,
        has_softcap=any(a.params.softcap > 0 for a in attentions),
        has_sinks=any(a.params.sinks is not None for a in attentions),
        values_in_keys=any(a.values_in_keys for a in attentions),
    )
