"""`Control`: answers calls that concern the whole engine (pause, stats, admin calls), between two steps.

Refuses: requests. The work itself is done by the engine and its executor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import msgspec

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

    def answer(self, call: Call) -> Reply:
        """Run a call. Typed errors are sent as its reply; any other exception, and `EngineBroken`, means a broken
        engine."""
        try:
            plain = self._plain.get(call.method)
            return Reply(call.call_id, plain() if plain is not None else self._administer(_read(call)))
        except EngineBroken:
            raise
        except (HeadraceError, AssertionError) as error:
            return Reply(call.call_id, error=ErrorInfo.of(error))
        except OSError as error:
            return Reply(call.call_id, error=ErrorInfo.of(ModelError(f"cannot read: {error.strerror or error}")))

    def _administer(self, call: AdminCall) -> object:
        executor = self._engine.executor
        match call:
            case StartProfile():
                executor.start_profile(call)
                return None
            case StopProfile():
                return executor.stop_profile()
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
