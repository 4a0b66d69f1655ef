"""The coordinators that every engine has: requests wait for their grammars, and for hooks that hold them, in no step's
way.

Refuses: compiling, and knowing what hooks wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.hooks import Hooks
from headrace.base.messages import EngineRequest
from headrace.service.coordination import LetGo
from headrace.service.executor import Executor

logger = logging.getLogger(__name__)

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
