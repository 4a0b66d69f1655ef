"""`GrammarGate`: requests wait here, in no step's way, until their grammars are compiled. Refuses: compiling."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.messages import RequestOutput

if TYPE_CHECKING:
    from headrace.scheduling.scheduler import Scheduler

COMPILE_LIMIT_S = 30.0
IDLE_WAIT_S = 0.002
"""How long an engine with nothing else to do waits for a grammar before it looks for messages again."""


class GrammarGate:
    """The requests are held by the scheduler, which counts them, expires them and lets them be aborted as any other."""

    def __init__(self, scheduler: Scheduler, *, limit_s: float = COMPILE_LIMIT_S, clock: Callable[[], float] = time.monotonic):
        self._scheduler, self._limit_s, self._clock = scheduler, limit_s, clock
        self._waiting: dict[str, tuple[Future[object], float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any grammar is being compiled."""
        return bool(self._waiting)

    def wait(self, request_id: str, compiled: Future[object]) -> None:
        """Let a held request go on once its grammar is there."""
        self._waiting[request_id] = (compiled, self._clock() + self._limit_s)

    def settle(self) -> list[RequestOutput]:
        """Release the requests whose grammars are done; the outputs end those whose grammars cannot be had."""
        outputs = []
        for request_id, (compiled, limit) in list(self._waiting.items()):
            error: BaseException | None = None
            if compiled.done():
                error = compiled.exception()
            elif self._clock() < limit:
                continue
            else:
                error = RequestError(f"the grammar took more than {self._limit_s:.0f} s to compile; simplify it", param="grammar")
            del self._waiting[request_id]
            if error is None:
                self._scheduler.release(request_id)
            elif (output := self._scheduler.refuse(request_id, describe_failure(error))) is not None:
                outputs.append(output)
        return outputs

    def pause(self) -> None:
        """Wait a moment for a grammar; for an engine that has nothing else to do."""
        wait([compiled for compiled, _ in self._waiting.values()], IDLE_WAIT_S, FIRST_COMPLETED)


def describe_failure(error: BaseException) -> HeadraceError:
    """What users are told. Whatever a grammar library raises was caused by the grammar."""
    return error if isinstance(error, HeadraceError) else RequestError(f"the grammar cannot be compiled: {type(error).__name__}: {error}"[:500], param="grammar")
