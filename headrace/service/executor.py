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
    """How an engine keeps pace with others whose steps need it too; here with none. ``waker``: a descriptor that
    becomes readable when they wait for it."""

    waker: int | None = None

    def keep_pace(self) -> None:
        """Called in every round of the engine's loop, and when ``waker`` is readable: take part in steps that others
        wait for."""


class PendingStep(Protocol):
    """A launched step."""

    @property
    def waits_for_device(self) -> bool:
        """Whether all is launched, and the device is not through with it: `result` would only wait."""

    def result(self) -> StepResult:
        """Wait for the step and return what it did; raises what the step raised."""

    def take_arrived(self) -> list[Arrival]:
        """Page moves of this rank that have ended by now and that no result has told: where nobody reads results."""


class Adapters(Protocol):
    """Adapters in host memory, each under a number of its own."""

    def read(self, adapter_id: int, call: LoadAdapter) -> Future[AdapterFacts]:
        """Read an adapter on another thread; the future raises what reading it raises."""

    def prepare(self, adapter_id: int, digest: str = "") -> Future[Any]:
        """Have an adapter that was read in host memory, reading it again if it has been dropped there meanwhile. A plan
        that loads it may then be executed without waiting, and fails where the content has another digest than is
        given."""

    def forget(self, adapter_id: int) -> None:
        """Drop an adapter that no plan will load any more; harmless for an unknown number."""


class Regions(Protocol):
    """What maps the memory in which pages for and of other engines lie."""

    def open_region(self, handle: bytes, epoch: int) -> None:
        """In ranks beside that of the engine, which has it: map it by a handle of `Door`; none for an empty one."""


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
        """What decodes read from host memory, a few steps ago."""

    @property
    def late_kernels(self) -> int:
        """How many kernels were compiled while a step waited for them: none, if the start found all."""

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
