"""Device-dependent defaults, decided in one place. Pure: takes and returns configuration."""

from __future__ import annotations

from dataclasses import replace

from headrace.base.config.engine import EngineConfig

DEVICE_DEFAULTS = {
    "cpu": {"max_running_requests": 64, "max_step_tokens": 1024, "overlap_depth": 1},
    "cuda": {"max_running_requests": 512, "max_step_tokens": 8192, "overlap_depth": 2},
}


def resolve_for_device(config: EngineConfig, device_type: str) -> EngineConfig:
    """Fill the scheduler options that the user left open with the device's defaults (an unknown device: the CPU's)."""
    defaults = DEVICE_DEFAULTS.get(device_type, DEVICE_DEFAULTS["cpu"])
    open_options = {name: value for name, value in defaults.items() if getattr(config.scheduler, name) is None}
    return replace(config, scheduler=replace(config.scheduler, **open_options))
