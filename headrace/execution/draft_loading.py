"""`load_draft`: a drafter that computes on the device, built for a loaded model and filled with its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from headrace.base.cache import CacheGroup, CacheSpec, join_layers
from headrace.base.config import EngineConfig, ModelConfig
from headrace.base.errors import ConfigError, PluginError
from headrace.execution.loading import (
    LoadedModel,
    Progress,
    choose_schemes,
    explain_full_device,
    keeps_blocks,
)
from headrace.layers.build import Build
from headrace.layers.draft import DraftModel
from headrace.layers.quantization.storage import count_bytes, store_fastest
from headrace.layers.self_attention import AttentionLayer
from headrace.models.checkpoint import open_weights
from headrace.models.drafters.contract import DraftKind, DraftQuery, DraftTarget, find_draft_kind
from headrace.models.source import ModelSource, resolve_source
from headrace.models.weights.dummy import fill_dummy_weights
from headrace.models.weights.safetensors_file import read_header


@dataclass(frozen=True)
class DraftChoice:
    """Which drafter: ``method`` is a name in the registry of kinds. ``model``: folder or name of its checkpoint, for
    kinds that have one; ``revision``, ``load_format`` and ``quantization`` are that checkpoint's."""

    method: str
    model: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    quantization: str | None = None


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
    build = Build(
        device=device, dtype=target.dtype, max_model_len=target.max_model_len, moe_experts=config.device.moe_experts,
        schemes=choose_schemes(source, model_config, target.dtype, device),
        keeps_blocks=keeps_blocks(source, model_config, device, target.dtype, progress),
    )
    query = DraftQuery(
        source, None if is_dummy else _tensor_names(source),
        DraftTarget(target.source, target.family, target.spec, target.model, config.model.tokenizer), build,
        str(target.dtype).removeprefix("torch.") if config.cache.kv_dtype == "auto" else config.cache.kv_dtype,
    )
    with explain_full_device(device), torch.no_grad():
        model = kind.build_model(query)
        progress("loading the drafter's weights", 0.5)
        if is_dummy:
            fill_dummy_weights(model, config.model.seed)
        else:
            model.load_weights(open_weights(
                source, load_format=model_config.load_format, device=device, dtype=build.dtype,
                keeps_blocks=build.keeps_blocks, wants=kind.wants(query),
            ))
        build.schemes.finish(model)
        if device.type == "cpu":
            store_fastest(model)
    groups = join_layers(
        target.groups, model.cache_specs, target.num_layers, apart=_find_unlike(target, model)
    )
    return LoadedDraft(choice.method, model, groups, target.num_layers)


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
        return target
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
