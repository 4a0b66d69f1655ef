"""`Executor`: the contract between the engine and the device. One executor may drive several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol

from headrace.base.adapters import AdapterFacts, LoadAdapter
from headrace.base.admin import DevicePart, StartProfile
from headrace.base.cache import CacheLayout
from headrace.base.config import EngineConfig
from headrace.base.grammar import Grammar
from headrace.base.messages import ExpertStats, HotSlotStats, MemoryLine, ModelFacts
from headrace.base.speculation import Speculation
from headrace.base.step import Arrival, StepPlan, StepResult

Progress = Callable[[str, float], None]
"""Called during start-up with a stage's name and the fraction done, in [0, 1]."""


class Pace:
    """Hook for replicas that take every step together (data-parallel attention). This base class is that of an engine
    of its own and does nothing. ``waker``: a descriptor that becomes readable when others wait for this replica."""

    waker: int | None = None

    def keep_pace(self) -> None:
        """Take part in steps that other replicas wait for. Called in every round of the engine's loop, and when
        ``waker`` is readable."""


class PendingStep(Protocol):
    """A launched step."""

    @property
    def waits_for_device(self) -> bool:
        """Whether the step is launched and the device still computes it, so that `result` would block."""

    def result(self) -> StepResult:
        """Wait for the step and return what it did; raises what the step raised."""

    def take_arrived(self) -> list[Arrival]:
        """Page moves that have ended on this rank. For workers, whose results nobody reads."""


class Adapters(Protocol):
    """Adapters in host memory, each under a number of its own."""

    def read(self, adapter_id: int, call: LoadAdapter) -> Future[AdapterFacts]:
        """Read an adapter on another thread; the future raises what reading it raises."""

    def prepare(self, adapter_id: int, digest: str = "") -> Future[Any]:
        """Make sure that an adapter which was read before is in host memory; one that was evicted is read again. When
        the future is done, a plan that loads the adapter does not wait. The plan fails if the files have changed, so
        that their digest is not ``digest``."""

    def forget(self, adapter_id: int) -> None:
        """Drop an adapter that no plan will load any more; harmless for an unknown number."""


class Regions(Protocol):
    """Maps the shared memory through which KV pages are exchanged with other engines."""

    def open_region(self, handle: bytes, epoch: int) -> None:
        """Called on ranks other than 0, which owns the memory: map it by a handle of rank 0's `Door`, or unmap it if
        the handle is empty."""


class Executor(Protocol):
    """Runs plans in the order given, for one engine thread. ``execute`` may return before the device is done; the
    engine reads results in the same order."""

    @property
    def regions(self) -> Regions | None:
        """None in an engine that exchanges no pages."""

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration: defaults that depend on the device are filled in."""

    @property
    def layout(self) -> CacheLayout:
        """Page size, rows and cache groups of the device."""

    facts: ModelFacts
    memory: list[MemoryLine]
    speculation: Speculation

    @property
    def adapters(self) -> Adapters:
        """Adapters in host memory; reading one raises `UnsupportedFeature` where none are served."""

    @property
    def experts(self) -> ExpertStats:
        """Loads of experts that move between ranks."""

    @property
    def hot_slots(self) -> HotSlotStats:
        """Counters of KV entries that decodes fetched from host memory, as of a few steps ago."""

    @property
    def late_kernels(self) -> int:
        """Kernels that were compiled while a step waited; 0 if warm-up has compiled all that are used."""

    @property
    def fallen_back(self) -> tuple[str, ...]:
        """What runs instead of kernels that could not be compiled or loaded here, and why; empty as a rule."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one plan; never waits for the device on a GPU."""

    def check(self) -> None:
        """Raise `headrace.parallel.group.PeerTimeout` if results are meaningless because another rank came too late,
        and with several ranks what a launched step has failed with since. Never waits for the device."""

    def use_idle_moment(self) -> bool:
        """Called while the engine is idle: do part of the work that later steps would need, such as capturing a graph,
        for at most a tenth of a second (a request that arrives waits for it). Returns False when nothing is left."""

    def prepare_grammar(self, grammar: Grammar) -> Future[Any]:
        """Compile a grammar on another thread. Never raises itself: the future does, with a `RequestError` for the
        requests that wait for it."""

    def reset(self) -> None:
        """After a failed step: wait for the device and forget all rows. The scheduler has ended or retracted their
        requests, so that rows and pages may be used again."""

    @property
    def released(self) -> frozenset[DevicePart]:
        """Parts that are off the device; without `headrace.base.admin.VITAL_PARTS` nothing can be executed."""

    def release_memory(self, parts: Collection[DevicePart], *, discards_weights: bool = False) -> None:
        """Take parts off the device, and forget all rows and pages. No plan may be in flight, here and below."""

    def acquire_memory(self, parts: Collection[DevicePart]) -> None:
        """Bring parts back; raises `EngineAsleep` when the device has no room for them. The KV cache comes back empty.
        """

    def replace_weights(self, model: str, load_format: str) -> None:
        """Load another checkpoint of the same shapes, and forget all rows and pages. Raises typed errors; the old
        weights are then in place again."""

    def start_profile(self, options: StartProfile) -> None:
        """Record a trace; `Conflict` while another is recorded."""

    def stop_profile(self) -> str:
        """Write the trace; returns its file's name. `Conflict` when there is none."""

    def close(self) -> None:
        """Free the device."""
