"""`EngineConfig`: the sections one engine needs, and how flat options (flags, ``LLM`` keyword arguments) become
them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headrace.base.config.operations import OperationsConfig
from headrace.base.config.option import OptionInfo, options_of
from headrace.base.config.sections import (
    SECTIONS,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process is started with; crosses the process border as msgpack."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything ``headrace serve`` takes. ``sources`` tells for each option set otherwise than by default where the
    value came from (``flag``, ``environment``, ``argument``)."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    sources: dict[str, str] = field(default_factory=dict)


ENGINE_SECTIONS = ("model", "cache", "scheduler", "device")


def all_options(sections: tuple[str, ...] = tuple(SECTIONS)) -> list[OptionInfo]:
    """Every documented option of the named sections; names are unique across sections."""
    return [info for name in sections for info in options_of(SECTIONS[name], name)]


def build_sections(options: dict[str, Any], sections: tuple[str, ...] = tuple(SECTIONS)) -> dict[str, Any]:
    """Sort flat options into section instances; raises `ConfigError` for an unknown name, with the nearest known."""
    owner = {info.name: info.section for info in all_options(sections)}
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for name, value in options.items():
        if name not in owner:
            near = get_close_matches(name, owner, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(owner))}"
            raise ConfigError(f"unknown option {name!r}{hint}", param=name)
        values[owner[name]][name] = value
    return {name: SECTIONS[name](**values[name]) for name in sections}


def engine_config(**options: Any) -> EngineConfig:
    """`EngineConfig` from flat keyword options, e.g. ``engine_config(model="x", page_size=32)``."""
    return EngineConfig(**build_sections(options, ENGINE_SECTIONS))


def flatten(config: Any) -> dict[str, Any]:
    """All option values by name, from an `EngineConfig` or `ServeConfig`."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, EngineConfig):
            flat.update(flatten(value))
        elif dataclasses.is_dataclass(value):
            flat.update({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return flat
