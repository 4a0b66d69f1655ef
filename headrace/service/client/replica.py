"""`Replica`: one supervised engine as a client sees it: its state, its facts, the requests it holds, calls.

Refuses: choosing among engines, request ids and tokenizers; those are the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.admin import VITAL_PARTS, AcquireMemory, ReleaseMemory
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineAsleep, EngineUnavailable, HeadraceError
from headrace.base.messages import (
    Abort,
    Call,
    Decline,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    FromEngine,
    MemoryLine,
    ModelFacts,
    Outputs,
    Ready,
    Reply,
    RequestOutput,
    Starting,
)
from headrace.service.balancing import ReplicaState
from headrace.service.client.boards import Boards
from headrace.service.client.outputs import ReplicaStatus
from headrace.service.client.statistics import continue_stats, counters_of
from headrace.service.client.stream import RequestStream
from headrace.service.spawn import ENGINE_BUILDER, SpawnedEngine, spawn_engine
from headrace.service.supervisor import STALL_TIMEOUT_S, Supervisor

CALL_TIMEOUT_S = 60.0
RETRY_AFTER_S = 5.0
UP = frozenset({"ready", "asleep"})
"""States in which an engine answers calls."""


@dataclass(frozen=True)
class Supervision:
    """How engine processes are started and watched; see `headrace.service.supervisor.Supervisor`. ``boards``: for
    replicas that take their steps together."""

    max_restarts: int = 5
    stall_timeout_s: float = STALL_TIMEOUT_S
    builder: str = ENGINE_BUILDER
    boards: Boards | None = None

    def spawn(self, config: EngineConfig) -> SpawnedEngine:
        """Start a process for a replica."""
        spawn = spawn_engine if self.boards is None else self.boards.spawn
        return spawn(config, self.builder)


@dataclass(frozen=True)
class Notices:
    """What a replica calls in the event loop: ``changed`` after a change of its state, ``ended`` when its engine holds
    no choice of a stream any more."""

    changed: Callable[[Replica], None]
    ended: Callable[[RequestStream], None]


@dataclass(slots=True)
class _Child:
    """One choice. ``prefill_tokens``: what is still to be computed of its prompt; ``context``: prompt and output so
    far, 0 before the first output."""

    stream: RequestStream
    prefill_tokens: int
    prompt_len: int
    context: int = 0


class Replica:
    """``state`` is ``starting``, ``ready``, ``asleep``, ``restarting`` or, when it is not started again, ``stopped``
    (then ``failure`` says why). ``facts`` and ``memory`` are known once it was ready. Counters of ``last_stats`` go on
    when its engine is started again."""

    def __init__(
        self, config: EngineConfig, notices: Notices, supervision: Supervision, engine: SpawnedEngine | None = None
    ):
        self.index, self.name = config.replica, config.replica_name
        self.state = "starting"
        self.facts: ModelFacts | None = None
        self.memory: list[MemoryLine] = []
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.last_stats = self._past_stats = EngineStats()
        self.failure: HeadraceError | None = None
        self.num_ends = 0
        """Engine processes that have ended without being asked to."""
        self.supervisor = Supervisor(
            config, self, max_restarts=supervision.max_restarts, stall_timeout_s=supervision.stall_timeout_s,
            spawn=supervision.spawn, engine=engine,
        )
        self._notices = notices
        self._children: dict[str, _Child] = {}  # by engine request id
        self._prefill_tokens = self._running_tokens = 0
        self.num_waiting = 0
        """Choices without output so far."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()

    @property
    def is_up(self) -> bool:
        """Whether it answers calls."""
        return self.state in UP

    @property
    def load(self) -> ReplicaState:
        """Its load for a balancing policy: exact in what was sent to it, and at most some steps old in the rest."""
        stats = self.last_stats
        return ReplicaState(
            self.index, self.num_waiting, len(self._children) - self.num_waiting, self._prefill_tokens,
            self._running_tokens, stats.num_used_pages / max(1, stats.num_pages),
            self.facts.num_kv_tokens if self.facts else 0,
        )

    @property
    def status(self) -> ReplicaStatus:
        """For reports."""
        stage, fraction = self.progress
        return ReplicaStatus(
            self.index, self.state, self.last_stats, stage=stage, progress=fraction, pid=self.supervisor.pid,
            num_restarts=self.supervisor.num_restarts, facts=self.facts
        )

    def holds(self, child_id: str) -> bool:
        """Whether the engine works on a choice of this id."""
        return child_id in self._children

    def send(self, requests: Sequence[EngineRequest], stream: RequestStream, cached_len: int = 0) -> None:
        """Send the choices of a request, of whose prompt ``cached_len`` tokens are probably cached. Raises
        `EngineUnavailable` when there is no engine to take them."""
        # No await from here on: outputs are delivered in this event loop, so none can come before the stream is known.
        for request in requests:
            self.supervisor.send(request)
        for request in requests:
            prompt_len = len(request.prompt_token_ids)
            child = self._children[request.request_id] = _Child(stream, max(1, prompt_len - cached_len), prompt_len)
            self._prefill_tokens += child.prefill_tokens
            self.num_waiting += 1

    def send_aborts(self, aborts: Iterable[Abort]) -> None:
        """End requests; a dead engine has nothing to end."""
        with contextlib.suppress(EngineUnavailable):
            for abort in aborts:
                self.supervisor.send(abort)

    def decline(self, rooms: Sequence[str], reason: str) -> None:
        """Have engines that wait for pages in these rooms hear that none will come: the request was refused here."""
        with contextlib.suppress(EngineUnavailable):
            self.supervisor.send(Decline(list(rooms), reason))

    async def call(
        self, method: str, arguments: dict[str, object] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Make a control call and return its result; raises what the engine answers, and `EngineUnavailable` when there
        is none or no answer in time."""
        self.require_up()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.supervisor.send(Call(call_id, method, arguments or {}))
            result = await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine did not answer {method} within {timeout_s:.0f} s") from error
        except EngineAsleep:
            self._set_asleep(True)
            raise
        finally:  # so that a late reply to a call that timed out finds none
            del self._calls[call_id]
        if method in (ReleaseMemory.method, AcquireMemory.method):
            self._set_asleep(bool(VITAL_PARTS & set(result)))
        return result

    async def fetch_stats(self) -> None:
        """Bring ``last_stats`` up to date; raises `EngineUnavailable` when the engine dies meanwhile."""
        self._note_stats(msgspec.convert(await self.call("stats"), EngineStats))

    def require_up(self) -> None:
        """Raise `EngineUnavailable` unless it answers calls."""
        if not self.is_up:
            raise EngineUnavailable(
                f"the engine is {self.state} and takes no requests now", retry_after=RETRY_AFTER_S
            )

    def fail_all(self, error: HeadraceError) -> None:
        """End all requests and calls with an error, without a message to the engine."""
        streams = dict.fromkeys(child.stream for child in self._children.values())
        self._children.clear()
        self._prefill_tokens = self._running_tokens = self.num_waiting = 0
        for stream in streams:
            stream.fail(ErrorInfo.of(error))
            self._notices.ended(stream)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def on_message(self, message: FromEngine) -> None:
        """A message of the engine; called by the supervisor."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._deliver(output)
            if message.stats is not None:
                self._note_stats(message.stats)
        elif isinstance(message, Starting):
            self.progress = (message.stage, message.fraction)
        elif isinstance(message, Ready):
            self.facts, self.memory, self.progress = message.facts, message.memory, ("ready", 1.0)
            self.state = "ready"
            self._notices.changed(self)
        elif isinstance(message, Reply):
            self._resolve_call(message)

    def on_exit(self, error: HeadraceError, *, is_final: bool) -> None:
        """The engine process is gone; called by the supervisor."""
        self.num_ends += 1
        self.state = "stopped" if is_final else "restarting"
        self.failure = error if is_final else None
        self.progress = ("starting", 0.0)
        self.last_stats = self._past_stats = counters_of(self.last_stats)
        self.fail_all(EngineUnavailable(
            f"{self.name} stopped while this request ran: {error.message}", retry_after=RETRY_AFTER_S
        ))
        self._notices.changed(self)

    def _note_stats(self, stats: EngineStats) -> None:
        self.last_stats = continue_stats(self._past_stats, stats) if self.num_ends else stats

    def _set_asleep(self, is_asleep: bool) -> None:
        if self.is_up:
            self.state = "asleep" if is_asleep else "ready"

    def _deliver(self, output: RequestOutput) -> None:
        child = self._children.get(output.request_id)
        if child is None:  # it failed with an earlier life of the engine
            return
        num_tokens = len(output.token_ids)
        if not child.context and (num_tokens or output.finish is not None):
            self._prefill_tokens -= child.prefill_tokens
            self.num_waiting -= 1
            child.context = child.prompt_len
            self._running_tokens += child.prompt_len
        child.context += num_tokens
        self._running_tokens += num_tokens
        child.stream.feed(output)
        # Fed first: a reader may have looked at the load, but the id must stay taken until now.
        if output.finish is not None and self._children.pop(output.request_id, None) is not None:
            self._running_tokens -= child.context
            if not child.stream.is_running:
                self._notices.ended(child.stream)

    def _resolve_call(self, reply: Reply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or call.done():
            return
        if reply.error is not None:
            call.set_exception(reply.error.to_error())
        else:
            call.set_result(reply.result)
