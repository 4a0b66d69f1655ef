"""Request coordinators: each may keep new requests from running until something off the step is ready for them. The
requests are held by the scheduler, which counts them, expires them and lets them be aborted as any other.

Packages outside this one add theirs through the entry-point group ``headrace.coordinators``; what is installed is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Protocol

from headrace.base.errors import HeadraceError, PluginError, RequestError
from headrace.base.hooks import Hooks
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.registry import Registry
from headrace.service.executor import Executor

if TYPE_CHECKING:
    from headrace.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headrace.coordinators"

LetGo = tuple[EngineRequest, HeadraceError | None]
"""A request that need not wait any longer, or the reason why it cannot run."""


class RequestCoordinator(Protocol):
    """Built once per engine, called by its thread."""

    def __init__(self, executor: Executor, hooks: Hooks): ...

    @property
    def is_waiting(self) -> bool:
        """Whether it holds any request."""

    def concerns(self, request: EngineRequest) -> bool:
        """Whether a new request must wait for it. Keeps nothing."""

    def hold(self, request: EngineRequest) -> None:
        """Begin what the request waits for."""

    def settle(self) -> list[LetGo]:
        """What has become ready, or never will; called in every step."""

    def pause(self) -> None:
        """Wait a moment at most for something to become ready; for an engine that has nothing else to do."""


COORDINATORS: Registry[type[RequestCoordinator]] = Registry("request coordinator")
"""All that load are used, in order of priority; a request passes them one after the other."""

COORDINATORS.add("hooks", "headrace.service.coordination:HookGate", priority=20, doc="requests that step hooks hold")
COORDINATORS.add(
    "grammar", "headrace.service.coordination:GrammarGate", priority=10, doc="requests whose grammars are being compiled"
)


def add_installed_coordinators() -> None:
    """Register the coordinators of installed packages, without importing them."""
    COORDINATORS.add_installed(ENTRY_POINT_GROUP)


def create_coordinator(name: str, executor: Executor, hooks: Hooks) -> RequestCoordinator:
    """Build one; `PluginError` lists the names there are, or tells the original error."""
    return COORDINATORS.make(name, executor, hooks)


def create_coordinators(executor: Executor, hooks: Hooks) -> list[RequestCoordinator]:
    """Build all; one of another package that cannot be had is left out with a warning."""
    add_installed_coordinators()
    coordinators = []
    for name in COORDINATORS.names():
        try:
            coordinators.append(create_coordinator(name, executor, hooks))
        except PluginError as error:
            if not COORDINATORS.entry(name).is_out_of_tree:
                raise
            logger.warning("served without it: %s", error)
    return coordinators


class WaitingRoom:
    """Sends each request through the coordinators that it concerns, and then to the scheduler's queue."""

    def __init__(self, scheduler: Scheduler, coordinators: Sequence[Any]):
        self._scheduler, self._coordinators = scheduler, list(coordinators)

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits here."""
        return any(coordinator.is_waiting for coordinator in self._coordinators)

    def concerns(self, request: EngineRequest) -> bool:
        """Whether a new request must wait here; the scheduler is then asked to hold it."""
        return any(coordinator.concerns(request) for coordinator in self._coordinators)

    def enter(self, request: EngineRequest) -> None:
        """Let a held request wait for the first coordinator that it concerns."""
        self._pass_on(request, 0)

    def settle(self) -> list[RequestOutput]:
        """Release the requests that everything is ready for; the outputs end those that cannot run."""
        outputs = []
        for place, coordinator in enumerate(self._coordinators):
            for request, error in coordinator.settle():
                if error is None:
                    self._pass_on(request, place + 1)
                elif (output := self._scheduler.refuse(request.request_id, error)) is not None:
                    outputs.append(output)
        return outputs

    def pause(self) -> None:
        """Wait a moment for one of those that are waited for."""
        next(coordinator for coordinator in self._coordinators if coordinator.is_waiting).pause()

    def _pass_on(self, request: EngineRequest, first: int) -> None:
        for coordinator in self._coordinators[first:]:
            if coordinator.concerns(request):
                coordinator.hold(request)
                return
        self._scheduler.release(request.request_id)


COMPILE_LIMIT_S = 30.0
HOOK_LIMIT_S = 60.0
IDLE_WAIT_S = 0.002
"""How long an engine with nothing else to do waits for a grammar before it looks for messages again."""


class GrammarGate:
    """See `RequestCoordinator`."""

    def __init__(
        self, executor: Executor, hooks: Hooks, *, limit_s: float = COMPILE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic
    ):
        self._executor, self._limit_s, self._clock = executor, limit_s, clock
        self._waiting: dict[str, tuple[EngineRequest, Future[object], float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any grammar is being compiled."""
        return bool(self._waiting)

    def concerns(self, request: EngineRequest) -> bool:
        """See `RequestCoordinator`."""
        return request.sampling.grammar is not None

    def hold(self, request: EngineRequest) -> None:
        """Start to compile, or wait for who started before."""
        grammar = request.sampling.grammar
        assert grammar is not None, "see concerns"
        self._waiting[request.request_id] = (
            request, self._executor.prepare_grammar(grammar), self._clock() + self._limit_s
        )

    def settle(self) -> list[LetGo]:
        """Those whose grammars are done, or take too long."""
        settled: list[LetGo] = []
        for request, compiled, limit in list(self._waiting.values()):
            if compiled.done():
                error = compiled.exception()
                settled.append((request, None if error is None else describe_failure(error)))
            elif self._clock() >= limit:
                settled.append(
                    (
                        request,
                        RequestError(
                            f"the grammar took more than {self._limit_s:.0f} s to compile; simplify it", param="grammar"
                        )
                    )
                )
        for request, _ in settled:
            del self._waiting[request.request_id]
        return settled

    def pause(self) -> None:
        """Wait a moment for a grammar."""
        wait([compiled for _, compiled, _ in self._waiting.values()], IDLE_WAIT_S, FIRST_COMPLETED)


class HookGate:
    """See `RequestCoordinator`. What a hook holds is let go when it says so, when it is switched off, or after a
    minute."""

    def __init__(
        self, executor: Executor, hooks: Hooks, *, limit_s: float = HOOK_LIMIT_S,
        clock: Callable[[], float] = time.monotonic
    ):
        self._hooks, self._limit_s, self._clock = hooks, limit_s, clock
        self._waiting: dict[str, tuple[EngineRequest, list[str], float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a hook holds any request."""
        return bool(self._waiting)

    def concerns(self, request: EngineRequest) -> bool:
        """See `RequestCoordinator`."""
        return bool(self._hooks) and self._hooks.any("holds_request", request)

    def hold(self, request: EngineRequest) -> None:
        """Remember which hooks there were."""
        self._waiting[request.request_id] = (request, self._hooks.names, self._clock() + self._limit_s)

    def settle(self) -> list[LetGo]:
        """Those that hooks let go, or must."""
        if not self._waiting:
            return []
        ready, settled = set(self._hooks.collect("ready_requests")), []
        for request, names, limit in list(self._waiting.values()):
            if self._clock() >= limit:
                logger.warning(
                    "request %s was held by a step hook for more than %.0f s; it runs now", request.request_id,
                    self._limit_s
                )
            elif request.request_id not in ready and names == self._hooks.names:
                continue
            del self._waiting[request.request_id]
            settled.append((request, None))
        return settled

    def pause(self) -> None:
        """Wait a moment."""
        time.sleep(IDLE_WAIT_S)


def describe_failure(error: BaseException) -> HeadraceError:
    """What users are told. Whatever a grammar library raises was caused by the grammar."""
    return (
        error if isinstance(error, HeadraceError)
        else RequestError(f"the grammar cannot be compiled: {type(error).__name__}: {error}"[:500], param="grammar")
    )
