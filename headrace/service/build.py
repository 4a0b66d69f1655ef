"""`build_engine`: from configuration to a ready `Engine` in this process."""

from __future__ import annotations

from headrace.base.config import EngineConfig
from headrace.execution.executor import build_executor
from headrace.scheduling.scheduler import Scheduler
from headrace.service.engine import Engine
from headrace.service.executor import Progress


def ignore_progress(stage: str, fraction: float) -> None:
    """A `Progress` that tells nobody."""


def build_engine(config: EngineConfig, progress: Progress = ignore_progress) -> Engine:
    """Load the model onto its device and put a scheduler in front; raises the typed errors of base/errors."""
    executor = build_executor(config, progress)
    scheduler = Scheduler(executor.config.scheduler, executor.config.cache, executor.layout)
    return Engine(scheduler, executor)
