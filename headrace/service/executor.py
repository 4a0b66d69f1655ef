"""`Executor`: how the engine reaches the device. One process now; with tensor parallelism, all ranks behind this."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from headrace.base.cache import CacheLayout
from headrace.base.config import EngineConfig
from headrace.base.grammar import Grammar
from headrace.base.messages import MemoryLine, ModelFacts
from headrace.base.step import StepPlan, StepResult

Progress = Callable[[str, float], None]
"""Called during start-up with a stage's name and the fraction done, in [0, 1]."""


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return what it did; raises what the step raised."""


class Executor(Protocol):
    """``config`` is the resolved one (no device default left open). Runs plans in the order given. ``execute`` may return before the device is done; results are read in order."""

    config: EngineConfig
    layout: CacheLayout
    facts: ModelFacts
    memory: list[MemoryLine]

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one plan; never waits for the device on a GPU."""

    def prepare_grammar(self, grammar: Grammar) -> Future[object]:
        """Compile a grammar on another thread; requests with it are run when the future is done, and end with the
        `RequestError` that it may raise. Never raises itself."""

    def reset(self) -> None:
        """After a failed step: wait for the device and forget all rows (the scheduler has ended their requests)."""

    def close(self) -> None:
        """Free the device."""
