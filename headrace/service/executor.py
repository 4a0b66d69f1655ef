"""`Executor`: the contract between the engine and the device; several ranks will stand behind one executor."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol

from headrace.base.admin import DevicePart, StartProfile
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
    """``config`` is the resolved one (no device default left open). Runs plans in the order given. ``execute`` may
    return before the device is done; results are read in order."""

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""

    @property
    def layout(self) -> CacheLayout:
        """Page size, rows and cache groups of the device."""

    facts: ModelFacts
    memory: list[MemoryLine]

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one plan; never waits for the device on a GPU."""

    def use_idle_moment(self) -> bool:
        """Called while the engine is idle: do work that later steps would need, such as capturing a graph, for a tenth
        of a second at most; False when nothing is left."""

    def prepare_grammar(self, grammar: Grammar) -> Future[Any]:
        """Compile a grammar on another thread; requests with it are run when the future is done, and end with the
        `RequestError` that it may raise. Never raises itself."""

    def reset(self) -> None:
        """After a failed step: wait for the device and forget all rows (the scheduler has ended their requests)."""

    @property
    def released(self) -> frozenset[DevicePart]:
        """Parts that are off the device; without `headrace.base.admin.VITAL_PARTS` nothing can be executed."""

    def release_memory(self, parts: Collection[DevicePart], *, discards_weights: bool = False) -> None:
        """Take parts off the device, and forget all rows and pages. No plan may be in flight, here and below."""

    def acquire_memory(self, parts: Collection[DevicePart]) -> None:
        """Bring parts back, empty; raises `EngineAsleep` when there is no room for them."""

    def replace_weights(self, model: str, load_format: str) -> None:
        """Read another checkpoint of the same shapes, and forget all rows and pages. Raises typed errors, the old
        weights in place again."""

    def start_profile(self, options: StartProfile) -> None:
        """Record a trace; `Conflict` while another is recorded."""

    def stop_profile(self) -> str:
        """Write the trace; returns its file's name. `Conflict` when there is none."""

    def close(self) -> None:
        """Free the device."""
