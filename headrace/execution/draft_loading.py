"""`load_with_draft`: a model with the drafter that the configuration asks for; `load_draft` builds and fills that."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import nn

from headrace.base.cache import CacheSpec, join_layers
from headrace.base.config import EngineConfig, ModelConfig
from headrace.base.errors import ConfigError, ModelError, PluginError
from headrace.base.speculation import OPTION, TEXT_METHODS, WITHOUT_STAGES, Speculation, SpeculativeOptions
from headrace.execution.loading import (
    LoadedDraft,
    LoadedModel,
    Progress,
    check_codes,
    choose_schemes,
    explain_full_device,
    keeps_blocks,
    load_model,
    share_caches,
)
from headrace.layers.build import Build
from headrace.layers.draft import DraftModel
from headrace.layers.moe.balancing import list_mixtures
from headrace.layers.quantization.storage import store_fastest
from headrace.layers.self_attention import AttentionLayer
from headrace.models.checkpoint import open_weights
from headrace.models.drafters.contract import (
    DraftKind,
    DraftQuery,
    DraftTarget,
    choose_draft_kind,
    find_draft_kind,
    is_draft_kind,
)
from headrace.models.source import ModelSource, resolve_source
from headrace.models.weights.dummy import fill_dummy_weights, read_initializer_range
from headrace.models.weights.safetensors_file import read_header
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group
from headrace.parallel.layout import Stage
from headrace.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftChoice:
    """Which drafter: ``method`` is a name in the registry of kinds. ``model``: folder or name of its checkpoint, for
    kinds that have one; ``revision``, ``load_format`` and ``quantization`` are that checkpoint's."""

    method: str
    model: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    quantization: str | None = None


DEFAULT_DRAFTS = 3
"""Drafts per row where neither the user nor the checkpoint says how many."""


def load_with_draft(
    config: EngineConfig, device: torch.device, progress: Progress, ranks: Ranks | None = None,
    stage: Stage | None = None
) -> LoadedModel:
    """Load the model, see `load_model`, and the drafter that the configuration asks for; raises what `load_model` and
    `load_draft` raise, the latter with ``speculative_config`` as the parameter. With method ``auto`` and no model
    named, the checkpoint's own module is used if it has a sound one."""
    loaded = load_model(config, device, progress, ranks, stage)
    options = config.speculation.options
    if loaded.pooling is not None:
        return loaded
    try:
        method = _choose_method(options, loaded)
        if method is None:
            return loaded
        if not loaded.stage.is_whole:
            raise ConfigError(WITHOUT_STAGES, param=OPTION)
        choice = DraftChoice(method, options.model, options.revision, options.load_format, options.quantization)
        return replace(loaded, draft=load_draft(choice, config, loaded, device, progress))
    except (ConfigError, ModelError) as error:
        if options.method == "auto" and options.model is None:
            logger.warning("the model's own drafter is not used: %s", error)
            return loaded
        if str(error.param).startswith(OPTION):
            raise
        # most of these are also said of the model, by the same words
        named = f"{OPTION}: the drafter {options.model or options.method}: {error}"
        raise error.with_message(named, param=OPTION) from error


def _choose_method(options: SpeculativeOptions, loaded: LoadedModel) -> str | None:
    """The kind of drafter to load; None for text drafters and none."""
    if options.method in ("off", *TEXT_METHODS):
        return None
    if options.method != "auto":
        return options.method if is_draft_kind(options.method) else None
    if options.model is None:
        return choose_draft_kind(loaded.source, has_checkpoint=False)
    source = resolve_source(ModelConfig(model=options.model, revision=options.revision))
    return choose_draft_kind(source, has_checkpoint=True)


def describe_speculation(config: EngineConfig, loaded: LoadedModel, most_drafts: int) -> Speculation:
    """How the loaded model is drafted for. Raises `ConfigError` where a method was asked for that cannot work.
    ``most_drafts``: see `headrace.layers.attention.contract.CacheBackend`."""
    options, hot_slots = config.speculation.options, config.cache.hot_slots
    if options.method == "off":
        return Speculation()
    reason = ""
    if loaded.pooling is not None:
        reason = f"{loaded.source.name} is served as a pooling model ({loaded.pooling.kind}), which generates no text"
    elif hot_slots and most_drafts < (options.num_fixed or int(options.method != "auto")):
        raise ConfigError(
            f"hot_slots {hot_slots} hold what a request's last token and {most_drafts} drafts select: raise it, or ask "
            "for fewer drafts (num_speculative_tokens), or none", param="hot_slots"
        )
    elif not most_drafts:
        reason = f"{loaded.family.name} models keep caches that cannot take drafts back"
    if reason:
        if options.method != "auto" or options.model is not None:
            raise ConfigError(f"speculative_config: {reason}; leave it out", param="speculative_config")
        return Speculation()
    if loaded.draft is not None:
        count = options.num_speculative_tokens or loaded.draft.model.num_tokens or DEFAULT_DRAFTS
        return Speculation(loaded.draft.method, min(count, most_drafts))
    return Speculation("suffix" if options.method == "auto" else options.method)


def _divide_experts(config: EngineConfig, ranks: Ranks) -> ExpertRanks:
    # Among replicas they are not divided: a drafter does not run behind each step of all of them.
    is_divided = config.parallel.enable_expert_parallel and ranks.experts is None
    return ExpertRanks(ranks.tensor if is_divided else Group())


def load_draft(
    choice: DraftChoice, config: EngineConfig, target: LoadedModel, device: torch.device, progress: Progress
) -> LoadedDraft:
    """Find, build and fill the drafter; raises `ConfigError`, `ModelError` or `WeightError`. ``config`` is the
    target's."""
    kind = _find(choice.method)
    progress("reading the drafter's configuration", 0.0)
    model_config = _model_config(kind, choice, config.model)
    source = resolve_source(model_config) if kind.has_checkpoint else target.source
    is_dummy = model_config.load_format == "dummy"
    keeps = keeps_blocks(source, model_config, device, target.dtype, progress)
    experts = _divide_experts(config, target.ranks)
    # a module of the target's checkpoint has as many experts as the target; those of other models stay where they are
    moves_experts = target.balancer is not None and not kind.has_checkpoint and not experts.is_single
    build = Build(
        device=device, dtype=target.dtype, max_model_len=target.max_model_len, moe_experts=config.device.moe_experts,
        schemes=choose_schemes(source, model_config, target.dtype, device, keeps_blocks=keeps), keeps_blocks=keeps,
        tensor=target.ranks.tensor, experts=experts,
        redundant_experts=config.parallel.balancing.num_redundant_experts if moves_experts else None,
    )
    query = DraftQuery(
        source, None if is_dummy else _tensor_names(source),
        DraftTarget(target.source, target.family, target.spec, target.model, config.model.tokenizer), build,
        target.kv_dtype,
    )
    with explain_full_device(device), torch.no_grad():
        model = kind.build_model(query)
        model.cache_specs = share_caches(model.cache_specs, target.ranks.tensor)
        check_codes(model.cache_specs, device, whose=f"the drafter {source.name}")
        _check_context(model, source.name, target.max_model_len)
        progress("loading the drafter's weights", 0.5)
        if is_dummy:
            fill_dummy_weights(model, config.model.seed, std=read_initializer_range(source.config))
        else:
            wants = kind.wants(query)
            model.load_weights(open_weights(
                source, load_format=model_config.load_format, device=device, dtype=build.dtype,
                keeps_blocks=build.keeps_blocks, narrowing=model.find_narrowing(),
                wants=model.wants if wants is None else lambda name: wants(name) and model.wants(name),
            ))
        build.schemes.finish(model)
        if moves_experts and target.balancer is not None:
            target.balancer.include(list_mixtures(model))
        if device.type == "cpu":
            store_fastest(model)
    groups = join_layers(
        target.groups, model.cache_specs, target.num_layers, apart=_find_unlike(target, model)
    )
    return LoadedDraft(choice.method, model, groups, target.num_layers)


def _check_context(model: DraftModel, name: str, served: int) -> None:
    """Warn about a drafter whose context is shorter than the served one: wrong drafts cost time, never a token."""
    if model.max_model_len is not None and model.max_model_len < served:
        logger.warning(
            "the drafter %s was made for %d tokens of context, and %d are served: in longer requests its drafts may "
            "rarely be right; lower max_model_len, or let method auto leave them out", name, model.max_model_len,
            served,
        )


def _find_unlike(target: LoadedModel, model: DraftModel) -> set[CacheSpec]:
    """Specs of caches that both models have, but with other numbers of query heads: an attention backend serves one
    number, so they cannot be one group."""
    spec_of = {layer: group.spec for group in target.groups for layer in group.layers}
    ours = _count_heads(target.model, [spec_of[layer] for layer in sorted(spec_of)])
    theirs = _count_heads(model, [spec for spec in model.cache_specs if spec is not None])
    return {spec for spec in ours.keys() & theirs.keys() if ours[spec] != theirs[spec]}


def _count_heads(model: nn.Module, specs: list[CacheSpec]) -> dict[CacheSpec, int]:
    """Query heads by spec; ``specs`` are those of the layers with a cache. Empty for a family with caches of its own
    kinds, of which a layer may have several."""
    attentions = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    if len(attentions) != len(specs):
        return {}
    return {spec: attention.num_heads for spec, attention in zip(specs, attentions, strict=True)}


def _find(method: str) -> DraftKind:
    try:
        return find_draft_kind(method)
    except PluginError as error:
        raise ConfigError(f"speculative_config: {error}", param="speculative_config") from error


def _model_config(kind: DraftKind, choice: DraftChoice, target: ModelConfig) -> ModelConfig:
    """The configuration by which the drafter's checkpoint is found and read."""
    if not kind.has_checkpoint:
        if choice.model is not None:
            raise ConfigError(
                f"speculative_config: method {choice.method} takes no model, its weights are in the served checkpoint",
                param="speculative_config",
            )
        return replace(target, load_format="dummy", quantization=None) if kind.is_random else target
    if choice.model is None:
        raise ConfigError(
            f"speculative_config: method {choice.method} needs a model: a folder, GGUF file, installed model package "
            "or Hugging Face name", param="speculative_config",
        )
    return replace(
        target, model=choice.model, revision=choice.revision, tokenizer=None, load_format=choice.load_format,
        quantization=choice.quantization, config_overrides=None,
    )


def _tensor_names(source: ModelSource) -> frozenset[str]:
    if source.kind == "gguf":
        return frozenset(tensor.name for tensor in source.gguf_tensors)
    return frozenset(tensor.name for path in source.weight_files for tensor in read_header(path))
