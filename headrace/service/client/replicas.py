"""Calls to all replicas of an engine, answered as one: all or nothing where a call can be undone.

Refuses: requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.adapters import LoadAdapter, UnloadAdapter
from headrace.base.admin import AcquireMemory, AdminCall, ReleaseMemory, ReplaceWeights, StartProfile, StopProfile
from headrace.base.config import EngineConfig
from headrace.base.errors import AdapterError, EngineAsleep, EngineUnavailable, HeadraceError
from headrace.base.messages import MemoryLine, ModelFacts
from headrace.service.client.replica import CALL_TIMEOUT_S, RETRY_AFTER_S, Replica

logger = logging.getLogger(__name__)

Method = str | AdminCall
NEEDS_ALL = frozenset({"pause", ReleaseMemory.method, ReplaceWeights.method, StartProfile.method})
"""Calls that are refused while a replica restarts, which would come back without their effect. Others concern only
what lives: a new engine has an empty cache and is awake."""


async def call_all(replicas: Sequence[Replica], method: Method, config: EngineConfig, timeout_s: float) -> Any:
    """Make one call to all replicas at once and merge the results. ``config``: of the weights that are loaded now.

    When some fail, what the call did on the others is undone if possible, and the error of the first is raised; with
    several replicas it names those that failed. One that did not answer in time, and may obey later, is restarted, and
    so is one that has lost its cache while its weights were replaced: it may have either. One whose engine has obeyed
    and ended before the others answered has failed too: its next engine comes without the effect. But one that ends in
    a call about an adapter with a path is left out, if any other obeys: its next engine is given the adapters of then.
    """
    chosen = _concerned(replicas, method)
    lives = [replica.num_ends for replica in chosen]
    results = await asyncio.gather(
        *(_call(replica, method, timeout_s) for replica in chosen), return_exceptions=True
    )
    for i, replica in enumerate(chosen if _name_of(method) in NEEDS_ALL else ()):
        if replica.num_ends != lives[i] and not isinstance(results[i], BaseException):
            results[i] = EngineUnavailable("its engine has ended meanwhile; try again", retry_after=RETRY_AFTER_S)
    chosen, results = _leave_out_gone(method, chosen, results)
    failed: list[tuple[Replica, BaseException]] = [
        (replica, result) for replica, result in zip(chosen, results, strict=True) if isinstance(result, BaseException)
    ]
    if not failed:
        if isinstance(method, LoadAdapter) and not _are_alike(results):
            await _undo_all(chosen, UnloadAdapter(method.name), timeout_s)
            raise AdapterError(
                f"the files of adapter {method.name!r} changed while the replicas read them; it is unloaded on all: "
                "load it again when they are complete", param="lora_path"
            )
        return _merge(method, results)
    undo, is_partial = _undo(method, config), len(failed) < len(chosen)
    if undo is not None and is_partial:
        lost = {id(replica) for replica, _ in failed}
        await _undo_all([replica for replica in chosen if id(replica) not in lost], undo, timeout_s)
    elif isinstance(method, LoadAdapter) and is_partial:
        await _undo_all(chosen, UnloadAdapter(method.name), timeout_s)  # or the name would stand for two adapters
        raise _name_error(failed, len(replicas), "; it is unloaded on all, as the old one cannot be read again")
    if undo is not None and len(replicas) > 1:
        for replica, error in failed:
            if isinstance(error.__cause__, TimeoutError):
                _restart(replica, "it did not answer")
            elif isinstance(method, ReplaceWeights) and isinstance(error, EngineAsleep):
                _restart(replica, "it may have the new weights, without room for its cache")
    raise _name_error(failed, len(replicas), "; undone on the others" if undo is not None and is_partial else "")


def _concerned(replicas: Sequence[Replica], method: Method) -> list[Replica]:
    """The replicas that get the call; raises `EngineUnavailable` when there is none, or one is missing that must have
    it. Those that were given up count no more."""
    name, up = _name_of(method), [replica for replica in replicas if replica.is_up]
    if not up or len(replicas) == 1:
        replicas[0].require_up()
    missing = [replica for replica in replicas if not replica.is_up and replica.state != "stopped"]
    if missing and name in NEEDS_ALL:
        raise EngineUnavailable(
            f"{missing[0].name} is {missing[0].state}; {name} needs all replicas: try again when it is ready",
            retry_after=RETRY_AFTER_S
        )
    return up


def _leave_out_gone(
    method: Method, replicas: list[Replica], results: list[Any]
) -> tuple[list[Replica], list[Any]]:
    is_followed = isinstance(method, UnloadAdapter) or (isinstance(method, LoadAdapter) and method.path)
    left = [
        (replica, result) for replica, result in zip(replicas, results, strict=True)
        if type(result) is not EngineUnavailable or isinstance(result.__cause__, TimeoutError)
    ]
    if not is_followed or not left:
        return replicas, results
    return [replica for replica, _ in left], [result for _, result in left]


def _name_of(method: Method) -> str:
    return method if isinstance(method, str) else method.method


async def _call(replica: Replica, method: Method, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    if isinstance(method, str):
        return await replica.call(method, timeout_s=timeout_s)
    return await replica.call(method.method, msgspec.to_builtins(method), timeout_s)


def _merge(method: Method, results: Sequence[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    if isinstance(method, StopProfile):
        return ", ".join(results)
    if isinstance(method, ReleaseMemory | AcquireMemory):
        return sorted({part for parts in results for part in parts})
    if method == "reset_prefix_cache":
        return all(results)
    return results[0]


def _undo(method: Method, config: EngineConfig) -> Method | None:
    match method:
        case "pause":
            return "continue"
        case ReleaseMemory(parts):
            return AcquireMemory(parts)
        case StartProfile():
            return StopProfile()
        case LoadAdapter(name, replaces=False):
            return UnloadAdapter(name)
        case LoadAdapter(name, path, replaces=True, previous=previous) if previous not in ("", path):
            # A pin stays with the name. Files that were written anew in their place are lost.
            return LoadAdapter(name, previous, replaces=True)
        case ReplaceWeights():
            return ReplaceWeights(config.model.model, config.model.load_format)
    return None


async def _undo_all(replicas: Sequence[Replica], undo: Method, timeout_s: float) -> None:
    results = await asyncio.gather(
        *(_call(replica, undo, timeout_s) for replica in replicas), return_exceptions=True
    )
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, BaseException):
            logger.error("%s could not be put back: %s", replica.name, result)
            if isinstance(undo, ReplaceWeights):  # or the replicas would serve different weights
                _restart(replica, "its weights could not be put back")


def _are_alike(loaded: Sequence[Any]) -> bool:
    """Whether replicas have loaded the same adapter, by what they answered."""
    return len({info.get("digest") for info in loaded}) == 1


def _restart(replica: Replica, reason: str) -> None:
    error = EngineUnavailable(f"{replica.name} is restarted: {reason}", retry_after=RETRY_AFTER_S)
    replica.supervisor.replace_process(error)


def _name_error(failed: Sequence[tuple[Replica, BaseException]], count: int, ending: str) -> BaseException:
    error = failed[0][1]
    if count == 1 or not isinstance(error, HeadraceError):
        return error
    message = "; ".join(f"{replica.name}: {problem}" for replica, problem in failed)
    named = error.with_message(message + ending)
    named.__cause__ = error
    return named


def join_facts(facts: Sequence[ModelFacts]) -> ModelFacts:
    """The facts of all replicas: the shortest context, which any of them serves, and the room of all caches."""
    if len(facts) == 1:
        return facts[0]
    return msgspec.structs.replace(
        facts[0], max_model_len=min(one.max_model_len for one in facts),
        num_kv_tokens=sum(one.num_kv_tokens for one in facts),
        device=", ".join(dict.fromkeys(one.device for one in facts)),
    )


def join_memory(plans: Sequence[list[MemoryLine]]) -> list[MemoryLine]:
    """The memory plans of all replicas, added up by name; notes are those of the first."""
    if len(plans) == 1:
        return plans[0]
    lines: dict[str, MemoryLine] = {}
    for line in (line for plan in plans for line in plan):
        known = lines.get(line.name)
        lines[line.name] = line if known is None else MemoryLine(
            line.name, known.num_bytes + line.num_bytes, known.note
        )
    return list(lines.values())
