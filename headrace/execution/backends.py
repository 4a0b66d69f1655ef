"""Which attention backend serves each cache group, and the page size they like. Compares capabilities, knows no
name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.base.cache import CACHE_BACKENDS, CacheGroup
from headrace.base.config import CacheConfig
from headrace.base.errors import ConfigError, PluginError
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import AttentionBackend, AttentionGeometry, CacheBackend
from headrace.layers.build import Build
from headrace.layers.self_attention import AttentionLayer

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True)
class ChosenBackends:
    """One backend per cache group, all made for ``page_size``; a `CacheBackend` for kinds that have one."""

    page_size: int
    backends: list[AttentionBackend | CacheBackend]


@dataclass(frozen=True)
class _Choice:
    """What serves a group, not yet made. ``geometry`` is None for a reader."""

    group: CacheGroup
    geometry: AttentionGeometry | None
    cls: type[AttentionBackend] | type[CacheBackend]

    def make(self, page_size: int, device: torch.device) -> AttentionBackend | CacheBackend:
        return (
            self.cls(self.group.spec, page_size, device) if self.geometry is None else self.cls(self.geometry, device)
        )


def choose_backends(
    model: Any, groups: list[CacheGroup], build: Build, cache: CacheConfig, name: str
) -> ChosenBackends:
    """Take the named backend, or the best that can serve each group. The page size is the user's, else the one the
    first group's backend prefers (its class attribute ``preferred_page_size``), else 16."""
    wanted = None if name == "auto" else name
    page_size = cache.page_size or DEFAULT_PAGE_SIZE
    try:
        choices = _choose(model, groups, build, page_size, wanted)
        preferred = choices[0].cls.preferred_page_size if choices else None
        if cache.page_size is None and preferred not in (None, page_size):
            page_size = preferred
            choices = _choose(model, groups, build, page_size, wanted)
    except PluginError as error:
        raise ConfigError(f"attention_backend {name}: {error}", param="attention_backend") from error
    return ChosenBackends(page_size, [choice.make(page_size, build.device) for choice in choices])


def _choose(model: Any, groups: list[CacheGroup], build: Build, page_size: int, wanted: str | None) -> list[_Choice]:
    plain = [group for group in groups if group.spec.kind not in CACHE_BACKENDS]
    geometries = dict(zip((id(group) for group in plain), _geometries(model, plain, build, page_size), strict=True))
    return [
        _Choice(group, geometries[id(group)], ATTENTION_BACKENDS.choose(geometries[id(group)], wanted))
        if id(group) in geometries
        else _Choice(group, None, CACHE_BACKENDS.load(group.spec.kind))
        for group in groups
    ]


def _geometries(model: Any, groups: list[CacheGroup], build: Build, page_size: int) -> list[AttentionGeometry]:
    cached = sorted(layer for group in groups for layer in group.layers)
    attentions = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    assert len(attentions) == len(cached), f"{len(attentions)} attention layers, {len(cached)} layers with a cache"
    by_layer = dict(zip(cached, attentions, strict=True))
    return [_geometry(group, [by_layer[layer] for layer in group.layers], build, page_size) for group in groups]


def _geometry(group: CacheGroup, attentions: list[AttentionLayer], build: Build, page_size: int) -> AttentionGeometry:
    spec = group.spec
    heads = {attention.num_heads for attention in attentions}
    assert len(heads) == 1, "layers of one cache group have the same number of heads"
    return AttentionGeometry(
        device=build.device.type, dtype=str(build.dtype).removeprefix("torch."), kv_dtype=spec.dtype,
        capability=build.capability,
        num_heads=heads.pop(), num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, value_dim=spec.value_dim,
        page_size=page_size,
        window=spec.window, has_softcap=any(a.params.softcap > 0 for a in attentions),
        has_sinks=any(a.params.sinks is not None for a in attentions),
        values_in_keys=any(a.values_in_keys for a in attentions),
    )
