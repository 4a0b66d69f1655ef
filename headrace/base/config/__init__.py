"""Config sections, their documented options, and how flat options become sections."""

from headrace.base.config.engine import (
    ENGINE_SECTIONS,
    EngineConfig,
    ServeConfig,
    all_options,
    build_sections,
    engine_config,
    flatten,
)
from headrace.base.config.operations import OperationsConfig
from headrace.base.config.option import OptionInfo, option, options_of
from headrace.base.config.resolve import resolve_for_device
from headrace.base.config.sections import (
    LEAST_CONTEXT,
    SECTIONS,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)

__all__ = [
    "ENGINE_SECTIONS", "LEAST_CONTEXT", "SECTIONS", "CacheConfig", "DeviceConfig", "EngineConfig", "ModelConfig",
    "OperationsConfig", "OptionInfo",
    "SchedulerConfig", "ServeConfig", "ServerConfig", "all_options", "build_sections", "engine_config", "flatten",
    "option", "options_of", "resolve_for_device",
]
