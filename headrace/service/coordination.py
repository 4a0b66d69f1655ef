"""Request coordinators: each may hold new requests until something outside the step loop is ready for them, such as a
compiled grammar. Held requests are in the scheduler, which counts, expires and aborts them like any other.

Installed packages add theirs through the entry-point group ``headrace.coordinators``; all that are installed are used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from headrace.base.errors import HeadraceError, PluginError, RequestError
from headrace.base.hooks import Hooks
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.registry import Registry
from headrace.service.executor import Executor

if TYPE_CHECKING:
    from headrace.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headrace.coordinators"

Released = tuple[EngineRequest, HeadraceError | None]
"""A request that stops waiting, with the error that ends it or None when it can run."""


class RequestCoordinator(Protocol):
    """Built once per engine and called from the engine's thread alone. It may go on holding a request that has ended
    meanwhile (aborted, expired): releasing an unknown id does nothing."""

    def __init__(self, executor: Executor, hooks: Hooks): ...

    @property
    def is_waiting(self) -> bool:
        """Whether it holds any request."""

    def concerns(self, request: EngineRequest) -> bool:
        """Whether a new request must wait for it. No side effects: it is called more than once per request."""

    def hold(self, request: EngineRequest) -> None:
        """Take the request and start whatever it waits for; `poll` returns it later."""

    def poll(self) -> list[Released]:
        """Requests that became ready, or failed. Called in every step, and while the engine is idle: it must not block.
        """

    def pause(self) -> None:
        """Wait briefly for something to become ready; called when the engine has nothing else to do."""


class Gate(RequestCoordinator, Protocol):
    """A coordinator with resources of its own, such as a process or a socket; it is closed with the engine."""

    def decline(self, rooms: Sequence[str], reason: str) -> None:
        """A request with a transfer was refused before it came here."""

    def close(self) -> None:
        """Release them."""


COORDINATORS: Registry[type[RequestCoordinator]] = Registry("request coordinator")
"""Every one that loads is used. A request passes them one after the other, highest priority first: hooks, then
grammars, then those of other packages."""

COORDINATORS.add("hooks", "headrace.service.coordination:HookGate", priority=20, doc="requests that step hooks hold")
COORDINATORS.add(
    "grammar", "headrace.service.coordination:GrammarGate", priority=10,
    doc="requests whose grammars are being compiled",
)


def add_installed_coordinators() -> None:
    """Register the coordinators of installed packages, without importing them."""
    COORDINATORS.add_installed(ENTRY_POINT_GROUP)


def create_coordinator(name: str, executor: Executor, hooks: Hooks) -> RequestCoordinator:
    """Build one; raises `PluginError` that lists the known names or has the original error."""
    coordinator: RequestCoordinator = COORDINATORS.make(name, executor, hooks)
    return coordinator


def create_coordinators(executor: Executor, hooks: Hooks) -> list[RequestCoordinator]:
    """Build all; one of another package that fails to load is left out with a warning."""
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
    """Passes each request through the coordinators that apply to it, in order, then to the scheduler's queue."""

    def __init__(self, scheduler: Scheduler, coordinators: Sequence[Any]):
        self._scheduler, self._coordinators = scheduler, list(coordinators)
        # by id; also such as have ended, for as long as a coordinator holds them, which may drop them
        self._waiting: WeakValueDictionary[str, EngineRequest] = WeakValueDictionary()

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits here."""
        return any(coordinator.is_waiting for coordinator in self._coordinators)

    def concerns(self, request: EngineRequest) -> bool:
        """Whether a new request must wait here; the caller then adds it to the scheduler as held."""
        return any(coordinator.concerns(request) for coordinator in self._coordinators)

    def enter(self, request: EngineRequest) -> None:
        """Hold a request in the first coordinator that applies to it."""
        self._waiting[request.request_id] = request
        self._pass_on(request, 0)

    def forget(self, request_id: str) -> None:
        """A new request has this id: what still happens to one that ended while it waited here concerns nobody."""
        self._waiting.pop(request_id, None)

    def poll(self) -> list[RequestOutput]:
        """Release the requests that no coordinator holds any more. Outputs: of those that cannot run, and first tokens
        that other engines have sampled."""
        outputs = []
        # In order, so a request that moves on to a later coordinator is polled there in the same call.
        for position, coordinator in enumerate(self._coordinators):
            for request, error in coordinator.poll():
                if not self._is_latest(request):
                    continue
                output = self._pass_on(request, position + 1) if error is None else self._refuse(request, error)
                if output is not None:
                    outputs.append(output)
        return outputs

    def pause(self) -> None:
        """Wait briefly, in the first coordinator that holds a request."""
        next(coordinator for coordinator in self._coordinators if coordinator.is_waiting).pause()

    def _pass_on(self, request: EngineRequest, first: int) -> RequestOutput | None:
        """Hold the request in the next coordinator from index ``first`` on that applies, else release it."""
        for coordinator in self._coordinators[first:]:
            if coordinator.concerns(request):
                coordinator.hold(request)
                return None
        self.forget(request.request_id)
        return self._scheduler.release(request.request_id)

    def _is_latest(self, request: EngineRequest) -> bool:
        return self._waiting.get(request.request_id) is request

    def _refuse(self, request: EngineRequest, error: HeadraceError) -> RequestOutput | None:
        self.forget(request.request_id)
        return self._scheduler.refuse(request.request_id, error)


COMPILE_LIMIT_S = 30.0
HOOK_LIMIT_S = 60.0
IDLE_WAIT_S = 0.002
"""How long an engine with nothing else to do waits for a grammar before it looks for messages again."""


class GrammarGate:
    """Holds requests whose grammar is being compiled on another thread. One that fails to compile, or takes longer than
    ``limit_s`` seconds, ends the request with a `RequestError`; the compilation itself is not cancelled."""

    def __init__(
        self, executor: Executor, hooks: Hooks, *, limit_s: float = COMPILE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic
    ):
        self._executor, self._limit_s, self._clock = executor, limit_s, clock
        # By request id: the request, its compilation, and the deadline on `clock`.
        self._waiting: dict[str, tuple[EngineRequest, Future[object], float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any grammar is being compiled."""
        return bool(self._waiting)

    def concerns(self, request: EngineRequest) -> bool:
        """See `RequestCoordinator`."""
        return request.sampling.grammar is not None

    def hold(self, request: EngineRequest) -> None:
        """Start to compile. The executor shares one compilation among equal grammars."""
        grammar = request.sampling.grammar
        assert grammar is not None, "see concerns"
        self._waiting[request.request_id] = (
            request, self._executor.prepare_grammar(grammar), self._clock() + self._limit_s
        )

    def poll(self) -> list[Released]:
        """Requests whose grammars are compiled, or take too long."""
        ready: list[Released] = []
        for request, compiled, limit in list(self._waiting.values()):
            if compiled.done():
                error = compiled.exception()
                ready.append((request, None if error is None else describe_failure(error)))
            elif self._clock() >= limit:
                message = f"the grammar took more than {self._limit_s:.0f} s to compile; simplify it"
                ready.append((request, RequestError(message, param="grammar")))
        for request, _ in ready:
            del self._waiting[request.request_id]
        return ready

    def pause(self) -> None:
        """Wait briefly for a grammar."""
        wait([compiled for _, compiled, _ in self._waiting.values()], IDLE_WAIT_S, FIRST_COMPLETED)


class HookGate:
    """Holds requests for step hooks. A request is released when a hook returns it from ``ready_requests``, when the set
    of active hooks changes (the hook that holds it may be the one switched off), or after ``limit_s`` seconds. It then
    runs; unlike a grammar, a slow hook is no fault of the request."""

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
        """Remember the active hooks: if one is switched off later, its requests must not wait for ever."""
        self._waiting[request.request_id] = (request, self._hooks.names, self._clock() + self._limit_s)

    def poll(self) -> list[Released]:
        """Requests that hooks released, or held too long."""
        if not self._waiting:
            return []
        # First, because a hook that raises here is switched off, which the comparison of names below notices.
        ready: set[str] = set(self._hooks.collect("ready_requests"))
        released: list[Released] = []
        for request, names, limit in list(self._waiting.values()):
            if self._clock() >= limit:
                logger.warning(
                    "request %s was held by a step hook for more than %.0f s; it runs now", request.request_id,
                    self._limit_s
                )
            elif request.request_id not in ready and names == self._hooks.names:
                continue
            del self._waiting[request.request_id]
            released.append((request, None))
        return released

    def pause(self) -> None:
        """Wait briefly."""
        time.sleep(IDLE_WAIT_S)


def describe_failure(error: BaseException) -> HeadraceError:
    """The error for the user. Any exception of a grammar library was caused by the grammar."""
    return (
        error if isinstance(error, HeadraceError)
        else RequestError(f"the grammar cannot be compiled: {type(error).__name__}: {error}"[:500], param="grammar")
    )
