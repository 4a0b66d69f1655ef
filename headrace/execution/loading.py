"""`load_model`: from a model's name to a built model with its weights.

Refuses: pools and page counts. Architectures are known to the catalog alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from headrace.base.cache import CacheGroup, CacheSpec, group_layers
from headrace.base.config import LEAST_CONTEXT, NARROW_KEYS, EngineConfig, ModelConfig
from headrace.base.errors import ConfigError, ModelError, RequestError
from headrace.base.quantization import AS_PLAIN, AS_STORED, GROUPED, GROUPED_METHODS
from headrace.execution.device import is_out_of_memory, resolve_dtypes
from headrace.kernels.coded_linear.choice import CodedChoice
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.layers.build import Build, deferred_matrices
from headrace.layers.draft import DraftModel
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.sites import AdapterBanks
from headrace.layers.model import ServedModel
from headrace.layers.moe.balancing import ExpertBalancer, find_balancer, list_mixtures
from headrace.layers.moe.choice import keep_faster_experts
from headrace.layers.moe.contract import Mixture
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.pooling import EmbeddingHead, PoolingHead
from headrace.layers.quantization import SchemeChain, SchemeQuery, chain_schemes, names_form
from headrace.layers.quantization.coded import Storing, find_form, prepare_products
from headrace.layers.quantization.storage import (
    can_store_blocks,
    count_bytes,
    count_elements,
    find_stored,
    store_fastest,
)
from headrace.memory.pools import POOLS
from headrace.models.checkpoint import has_blocks, open_weights, untie, weigh_layers
from headrace.models.family import Family
from headrace.models.finding import find_safetensors
from headrace.models.pooling import PoolingPlan
from headrace.models.reading import count_layers, read_model
from headrace.models.source import ModelSource
from headrace.models.weights.dummy import fill_dummy_weights, read_initializer_range
from headrace.models.weights.gguf_tensors import is_mostly_blocks
from headrace.models.weights.safetensors_file import read_safetensors
from headrace.parallel.division import Division
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group
from headrace.parallel.layout import Layout, Stage, stage_of
from headrace.parallel.ranks import Ranks
from headrace.parallel.share import share_kv_heads

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Fill = Callable[[ServedModel, ModelSource, EngineConfig, Build, Progress], None]


def ignore_progress(stage: str, fraction: float) -> None:
    """A `Progress` that reports to nobody."""


@dataclass(frozen=True)
class LoadedDraft:
    """A drafter on the target's device. ``groups``: the cache groups of both models, without pages yet; the drafter's
    layer i is layer ``first_layer + i`` there, in the target's group if that has an equal spec and as many query heads,
    so that the two share pages and prefixes. ``num_layers``: of both models, layers without cache too."""

    method: str
    model: DraftModel
    groups: list[CacheGroup]
    first_layer: int

    @property
    def num_layers(self) -> int:
        return self.first_layer + self.model.num_layers

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and buffers of its own."""
        return count_bytes(self.model)


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, or the part of one that this rank of ``ranks`` has: of ``stage`` alone. ``groups`` are the
    cache groups of all stages, without pages yet, each with the layers that are here; ``num_layers`` counts those of
    all stages, without cache too. ``kv_dtype``: name of the dtype of cached keys and values. ``draft``: a drafter for
    it."""

    source: ModelSource
    family: Family
    spec: Any
    model: ServedModel
    dtype: torch.dtype
    kv_dtype: str
    groups: list[CacheGroup]
    num_layers: int
    vocab_size: int
    max_model_len: int
    pooling: PoolingPlan | None = None
    draft: LoadedDraft | None = None
    ranks: Ranks = field(default_factory=Ranks)
    stage: Stage = field(default_factory=Stage)
    balancer: ExpertBalancer | None = None

    @property
    def cache_groups(self) -> list[CacheGroup]:
        """The groups of the model and its drafter."""
        return self.groups if self.draft is None else self.draft.groups

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The model, and its drafter's if there is one."""
        return (self.model,) if self.draft is None else (self.model, self.draft.model)

    def move(self, device: torch.device) -> None:
        """Move all weights to another device."""
        for model in self.models:
            model.to(device)
            for stored in find_stored(model):
                if isinstance(stored, CodedWeight):
                    stored.move(device)

    @property
    def num_parameters(self) -> int:
        """Parameters of this rank, tied ones once."""
        return count_elements(self.model)

    def count_active_parameters(self) -> int:
        """Parameters of this rank, of experts only as many as a token chooses on average."""
        idle = sum(mixture.count_idle() for mixture in self.model.modules() if isinstance(mixture, Mixture))
        return self.num_parameters - idle

    def count_all_parameters(self) -> int:
        """Parameters of all ranks together: what is on several counts once."""
        whole = Build(torch.device("meta"), self.dtype, self.max_model_len)
        return count_elements(self.model if self.ranks.world.size == 1 else self.family.build_model(self.spec, whole))

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and buffers, tied ones once."""
        return count_bytes(self.model) + (0 if self.draft is None else self.draft.num_bytes)


def load_model(
    config: EngineConfig, device: torch.device, progress: Progress, ranks: Ranks | None = None,
    stage: Stage | None = None, *, fill: Fill | None = None
) -> LoadedModel:
    """Find, build and fill the model, of which this rank of ``ranks`` has a part: ``stage``, or what it gets when
    layers are divided evenly. ``fill``: instead of the weights. Raises `ModelError`, `ConfigError` or `WeightError`."""
    ranks = ranks or Ranks()
    group = ranks.tensor
    progress("reading the model's configuration", 0.0)
    source, family, spec, pooling = read_model(config.model)
    spec = untie(source, family, spec)
    rounds_inputs = _rounds_inputs(source, config.model, device, progress)
    dtype, resolved = resolve_dtypes(
        config.model.dtype, config.cache.kv_dtype, source.config, device, rounds_inputs=rounds_inputs
    )
    kv_dtype = str(resolved).removeprefix("torch.")
    if config.speculation.options.method != "off":
        family = family.verifying(spec)
    if config.cache.kv_dtype == NARROW_KEYS:
        family = family.narrowing(spec)
    if config.cache.hot_slots:
        family = family.hosting(spec, config.cache.hot_slots)
    specs = family.cache_specs(spec, kv_dtype)
    stage = stage or choose_stage(source, family, spec, config, ranks.layout)
    check_codes(specs, device)
    max_model_len = _limit_context(
        config.model.max_model_len, spec.max_model_len, pooling.max_text_len if pooling else 0
    )
    with explain_full_device(device):
        keeps = keeps_blocks(source, config.model, device, dtype, progress)
        schemes = choose_schemes(source, config.model, dtype, device, keeps_blocks=keeps)
        build = Build(
            device=device, dtype=dtype, max_model_len=max_model_len, moe_experts=config.device.moe_experts,
            schemes=schemes, keeps_blocks=keeps, tensor=group,
            experts=ranks.experts or ExpertRanks(group if config.parallel.enable_expert_parallel else Group()),
            all2all_backend=config.parallel.all2all_backend, stage=stage,
            redundant_experts=config.parallel.balancing.num_redundant_experts if config.parallel.enable_eplb else None,
            scales_cache=resolved == torch.float8_e4m3fn,
            # beside weights of 8 or 4 bits, additions in more would be read for longer than they are worth
            adapters=choose_banks(config, is_coded=rounds_inputs and device.type == "cpu"),
        )
        with deferred_matrices():
            model = family.build_model(spec, build)
        if stage.is_whole:
            mixtures = [module for module in model.modules() if isinstance(module, ExpertWeights | Mxfp4ExpertWeights)]
            Division.of(config.parallel).check_has_experts(len(mixtures))
        model.adapters = find_banks(model, build, family)
        (fill or _fill)(model, source, config, build, progress)
        balancer = _finish(model, config, build, progress)
        if pooling is not None:
            _attach_pooling_head(model, pooling, build)
    return LoadedModel(
        source, family, spec, model, dtype, kv_dtype, own_groups(specs, model.own_caches(len(specs)), group),
        len(specs), spec.vocab_size, max_model_len, pooling, ranks=ranks, stage=stage, balancer=balancer
    )


def _finish(
    model: ServedModel, config: EngineConfig, build: Build, progress: Progress
) -> ExpertBalancer | None:
    """Choose forms and kernels of weights that are all in; returns what moves the model's experts, if they move."""
    build.schemes.finish(model)  # those that quantise at load replace what the layers keep
    if build.device.type == "cuda":
        progress("choosing kernels", 0.8)
        keep_faster_experts(model)
    # A stage may have dense layers alone.
    has_experts = build.stage.is_whole or bool(list_mixtures(model))
    moves_experts = build.moves_experts and has_experts
    balancer = find_balancer(model, build.experts, config.parallel.balancing) if moves_experts else None
    if build.device.type == "cpu":
        store_fastest(model)
    if model.adapters is not None:
        model.adapters.place_behind_weights()
    return balancer


def choose_banks(config: EngineConfig, *, is_coded: bool = False) -> BankSizes | None:
    """What layers make room for, in 8 bits and elsewhere in bfloat16 if ``is_coded``, else in the dtype of weights."""
    adapters = config.adapters
    if not adapters.enable_lora:
        return None
    dtype = torch.bfloat16 if is_coded else None
    return BankSizes(adapters.max_loras, adapters.max_lora_rank, dtype, is_coded)


def find_banks(model: ServedModel, build: Build, family: Family) -> AdapterBanks | None:
    """The banks that a model was built with; raises `ConfigError` for one that takes no adapters."""
    if build.adapters is None:
        return None
    sites = model.find_adapter_sites()
    if sites is None:
        raise ConfigError(f"{family.name} models take no adapters; leave out enable_lora", param="enable_lora")
    return AdapterBanks(model, sites, build.adapters, build.step)


def choose_stage(
    source: ModelSource, family: Family, spec: Any, config: EngineConfig, layout: Layout
) -> Stage:
    """The layers of a rank: as ``pipeline_layers`` says, or such that the stage with the most bytes of weights has as
    few as possible; raises `ConfigError`."""
    if layout.pipeline == 1:
        return Stage()
    if not family.model_class(spec).supports_stages:
        raise ConfigError(
            f"{family.name} models cannot be divided into pipeline stages; use tensor_parallel_size",
            param="pipeline_parallel_size",
        )
    weights, head = [1] * spec.num_layers, 0
    if config.parallel.pipeline_layers is None and config.model.load_format != "dummy":
        weights, head = weigh_layers(source, family, spec.num_layers)
    return stage_of(count_layers(spec, config.parallel, weights, head), layout.stage)


def own_groups(specs: Sequence[CacheSpec | None], own: Collection[int], group: Group) -> list[CacheGroup]:
    """The cache groups of layers with these specs, with the ``own`` layers among theirs, and what this rank of
    ``group`` caches of them. Numbered alike on all ranks: some may be without layers here."""
    shared = [
        (cache, share_caches([cache.spec], group)[0]) for cache in group_layers(list(specs))
    ]
    return [CacheGroup(spec, [i for i in cache.layers if i in own]) for cache, spec in shared if spec is not None]


def share_caches(specs: Sequence[CacheSpec | None], group: Group) -> list[CacheSpec | None]:
    """What a rank of a group caches of these: some of the KV heads."""

    def share(spec: CacheSpec) -> CacheSpec:
        own = share_kv_heads(spec.num_kv_heads, group.size, group.rank)
        return msgspec.structs.replace(spec, num_kv_heads=own.length)

    return [spec and share(spec) for spec in specs]


@contextlib.contextmanager
def explain_full_device(device: torch.device) -> Iterator[None]:
    """Turn errors of a device without memory in the body into a `ConfigError` that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the model does not fit the memory of {device}: choose a smaller model, dtype or max_model_len, or free "
            "the device", param="model",
        ) from error


def check_alike(model: ModelConfig, loaded: LoadedModel) -> None:
    """Raise `RequestError` unless a model can replace the loaded one: the same family and the same ``spec``, which is
    the part of the configuration that the model is built from."""
    source, family, spec, _ = read_model(model)
    if family.name != loaded.family.name or untie(source, family, spec) != loaded.spec:
        differing = "architecture" if source.architecture != loaded.source.architecture else "configuration"
        raise RequestError(
            f"{source.name} has another {differing} than the served model; only weights of the same shapes can be "
            "replaced", param="model_path",
        )


def check_codes(specs: list[CacheSpec | None], device: torch.device, *, whose: str = "this model") -> None:
    """Raise `ConfigError` for 8-bit keys and values where no backend or pool takes them. ``whose`` specs they are."""
    for spec in specs:
        reason = None if spec is None else POOLS.load(spec.kind).reason_against(spec, device)
        if spec is not None and reason:
            raise ConfigError(
                f"{whose} cannot be served with kv_dtype {spec.dtype}, which {reason}; take kv_dtype auto",
                param="kv_dtype",
            )


def _limit_context(max_model_len: int | None, native: int, usual: int = 0) -> int:
    """The longest context in tokens: the user's, else ``usual`` (0: none), at most ``native``, which the model was
    trained for. Raises `ConfigError` for more."""
    if native < LEAST_CONTEXT:
        raise ConfigError(
            f"the model's configuration allows {native} tokens, less than the {LEAST_CONTEXT} that are served at "
            "least; check its max_position_embeddings"
        )
    if max_model_len is not None and max_model_len > native:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {native} tokens the model was made for; set it to "
            f"{native} or less, or change the model's own limit with config_overrides", param="max_model_len",
        )
    return max_model_len or min(usual or native, native)


def choose_schemes(
    source: ModelSource, model: ModelConfig, dtype: torch.dtype, device: torch.device, *, keeps_blocks: bool
) -> SchemeChain:
    """Schemes for the checkpoint's ``quantization_config`` (not for dummy weights) and the user's choice.
    ``keeps_blocks``: as in `Build`. Layers on a GPU can keep codes too, though no blocks."""
    stated = {} if model.load_format == "dummy" else source.quantization
    wanted, is_kept = model.quantization or "", keeps_form(source, model)
    return chain_schemes(SchemeQuery(
        device.type, str(dtype).removeprefix("torch."), stored=str(stated.get("quant_method") or ""),
        wanted="" if is_kept or wanted == AS_PLAIN else wanted, config=stated,
        keeps_codes=is_kept and (keeps_blocks or device.type == "cuda"),
    ))


def keeps_form(source: ModelSource, model: ModelConfig) -> bool:
    """Whether layers are to keep weights in the checkpoint's form, which the user may name: that changes nothing."""
    wanted = model.quantization
    return wanted in (None, AS_STORED) or names_form(wanted, str(source.quantization.get("quant_method") or ""))


def keeps_blocks(
    source: ModelSource, model: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress
) -> bool:
    """Whether layers keep a file's quantised blocks. For a file that has some, waits for the CPU kernels."""
    if model.load_format == "dummy" or not keeps_form(source, model):
        return False

    def report(num_done: int, num_files: int) -> None:
        progress(f"compiling CPU kernels: {num_done} of {num_files} files", 0.1 * num_done / max(1, num_files))

    if device.type == "cuda":
        return has_blocks(source)
    return can_store_blocks(device, dtype, waits=has_blocks(source), report=report)


def _rounds_inputs(source: ModelSource, model: ModelConfig, device: torch.device, progress: Progress) -> bool:
    """Whether most products will take weights with a scale per group, and round their inputs by groups, which costs
    less than activations in bfloat16 do. Rounding by rows costs far more than either."""
    if keeps_form(source, model):
        method = source.quantization.get("quant_method")
        has_groups = is_mostly_blocks(source.gguf_tensors) or method in GROUPED_METHODS
        return has_groups and keeps_blocks(source, model, device, torch.float32, progress)
    return model.quantization in GROUPED


@torch.no_grad()
def _fill(model: Any, source: ModelSource, config: EngineConfig, build: Build, progress: Progress) -> None:
    form = find_form(source.quantization) if keeps_form(source, config.model) else None
    if config.model.load_format == "dummy":
        progress("filling in random weights", 0.1)
        can_store = build.device.type == "cuda" or can_store_blocks(build.device, build.dtype, waits=False)
        std = read_initializer_range(source.config)
        if form is None or not can_store:
            fill_dummy_weights(model, config.model.seed, std=std)
        else:
            storing = Storing(model, form)
            fill_dummy_weights(model, config.model.seed, std=std, store=storing.store)
            storing.finish()
        return
    if form is not None:
        progress("choosing kernels", 0.1)
        prepare_products(model, form, CodedChoice())
    tensors = open_weights(
        source, load_format=config.model.load_format, device=build.device, dtype=build.dtype,
        keeps_blocks=build.keeps_blocks, wants=model.wants, narrowing=model.find_narrowing()
    )
    model.load_weights(_watch(tensors, sum(p.numel() for p in model.parameters()), progress))


def _watch(
    tensors: Iterable[tuple[str, torch.Tensor]], total: int, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on and report how many of ``total`` elements have passed, in steps of two percent."""
    seen, reported = 0, -1
    for name, tensor in tensors:
        if seen * 50 // max(total, 1) > reported:
            reported = seen * 50 // max(total, 1)
            progress("loading weights", 0.1 + 0.7 * min(1.0, seen / max(total, 1)))
        yield name, tensor
        seen += tensor.numel()


@torch.no_grad()
def _attach_pooling_head(model: ServedModel, plan: PoolingPlan, build: Build) -> None:
    """Set ``model.pooling_head``, in the last stage. Dense layers of an embedding are in folders of their own; raises
    `WeightError`."""
    model.is_capturable = False  # texts are computed in steps of their own length
    if not build.stage.is_last:
        return
    if plan.kind == "classify":
        assert model.scores is not None, "a family that classifies builds its classifier"
        model.pooling_head = PoolingHead(plan.reduction, model.scores, takes=build.dtype)
    else:
        model.pooling_head = PoolingHead(plan.reduction, _embedding_head(plan, build))


def _embedding_head(plan: PoolingPlan, build: Build) -> EmbeddingHead:
    shapes = [(layer.in_features, layer.out_features, layer.has_bias, layer.activation) for layer in plan.dense]
    head = EmbeddingHead(build, shapes, normalise=plan.normalise)
    for layer, module in zip(plan.dense, head.dense, strict=True):
        files = find_safetensors(layer.folder)
        if not files:
            raise ModelError(f"{layer.folder} has no *.safetensors with the weights of the dense layer it describes")
        fill_targets(
            find_targets(module, {"linear.weight": "weight", "linear.bias": "bias"}), read_safetensors(files)
        )
    return head
