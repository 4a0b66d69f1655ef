"""`Control`: answers calls that concern the whole engine (pause, stats, admin calls), between two steps.

Refuses: requests. The work itself is done by the engine and its executor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from headrace.base.adapters import AdapterInfo, ListAdapters, LoadAdapter, PinAdapter, UnloadAdapter
from headrace.base.admin import (
    ADMIN_CALLS,
    VITAL_PARTS,
    AcquireMemory,
    AdminCall,
    ReleaseMemory,
    ReplaceWeights,
    StartProfile,
    StopProfile,
)
from headrace.base.errors import Conflict, EngineBroken, HeadraceError, ModelError, RequestError
from headrace.base.messages import Call, ErrorInfo, Reply
from headrace.service.engine import Engine


class Control:
    """``stop`` ends the loop that the engine is stepped by."""

    def __init__(self, engine: Engine, stop: Callable[[], None]):
        self._engine = engine
        self._pending: list[tuple[int, Future[AdapterInfo]]] = []  # calls by their ids
        # Calls without arguments. "ping" returns `Engine.step_bound_s`, which sets the supervisor's silence limit.
        self._plain: dict[str, Callable[[], object]] = {
            "stats": lambda: msgspec.to_builtins(engine.stats()),
            "reset_prefix_cache": engine.reset_prefix_cache,
            "check": engine.check,
            "pause": engine.pause,
            "continue": lambda: engine.pause(False),
            "freeze_gc": freeze_heap,
            "shutdown": stop,
            "ping": lambda: engine.step_bound_s,
        }

    @property
    def is_waiting(self) -> bool:
        """Whether `poll` will have replies."""
        return bool(self._pending)

    def poll(self) -> list[Reply]:
        """Replies of calls whose work was done on other threads meanwhile."""
        if not self._pending:
            return []
        self._engine.adapters.settle()
        done = [(call_id, work) for call_id, work in self._pending if work.done()]
        self._pending = [(call_id, work) for call_id, work in self._pending if not work.done()]
        return [self._reply(call_id, work.result) for call_id, work in done]

    def answer(self, call: Call) -> Reply | None:
        """Run a call; None if `poll` has its reply later. Typed errors are sent as its reply; any other exception, and
        `EngineBroken`, means a broken engine."""
        plain = self._plain.get(call.method)
        if plain is not None:
            return self._reply(call.call_id, plain)
        if call.method == LoadAdapter.method:
            return self._begin_load(call)
        return self._reply(call.call_id, lambda: self._administer(_read(call)))

    def _begin_load(self, call: Call) -> Reply | None:
        try:
            load = _read(call)
            assert isinstance(load, LoadAdapter)
            self._pending.append((call.call_id, self._engine.adapters.begin_load(load)))
        except HeadraceError as error:
            return Reply(call.call_id, error=ErrorInfo.of(error))
        return None

    def _reply(self, call_id: int, work: Callable[[], object]) -> Reply:
        try:
            return Reply(call_id, msgspec.to_builtins(work()))
        except EngineBroken:
            raise
        except (HeadraceError, AssertionError) as error:
            return Reply(call_id, error=ErrorInfo.of(error))
        except OSError as error:
            return Reply(call_id, error=ErrorInfo.of(ModelError(f"cannot read: {error.strerror or error}")))

    def _administer(self, call: AdminCall) -> object:
        executor = self._engine.executor
        match call:
            case StartProfile():
                executor.start_profile(call)
                return None
            case StopProfile():
                return executor.stop_profile()
            case UnloadAdapter():
                return self._engine.adapters.unload(call)
            case PinAdapter():
                return self._engine.adapters.pin(call)
            case ListAdapters():
                return self._engine.adapters.describe_all()
            case LoadAdapter():
                raise AssertionError("loading is begun, see `answer`")
        try:
            self._change_device(call)
        finally:  # also after an error: a failed change may have released parts already
            self._engine.is_asleep = bool(executor.released & VITAL_PARTS)
        return sorted(executor.released)

    def _change_device(self, call: ReleaseMemory | AcquireMemory | ReplaceWeights) -> None:
        executor = self._engine.executor
        match call:
            case ReleaseMemory(parts, discards_weights):
                self._engine.drain()
                executor.release_memory(parts, discards_weights=discards_weights)
            case AcquireMemory(parts) if set(parts) & executor.released:
                self._engine.drain()
                executor.acquire_memory(parts)
            case ReplaceWeights(model, load_format):
                if executor.config.disaggregation.disaggregation_mode is not None:
                    raise Conflict(
                        "the weights of a server that exchanges KV pages stay, as its peers would still take them for "
                        "the old ones; start it anew with the other model"
                    )
                if "weights" in executor.released:
                    raise Conflict("the weights are off the device; bring them back before they are replaced")
                self._engine.drain(retracts=True)
                executor.replace_weights(model, load_format)


def freeze_heap() -> None:
    """Collect garbage once, and exempt what survives from later collections."""
    gc.collect()
    gc.freeze()


def _read(call: Call) -> AdminCall:
    record = ADMIN_CALLS.get(call.method)
    if record is None:
        raise RequestError(f"unknown call {call.method!r}", param="method")
    try:
        return msgspec.convert(call.arguments, record)
    except msgspec.ValidationError as error:
        raise RequestError(f"{call.method}: {error}") from error
