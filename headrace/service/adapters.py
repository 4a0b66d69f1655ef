"""`AdapterRegistry`: the adapters of one engine by name: loaded, drained and unloaded between steps, and found for each
request.

Refuses: files (the executor reads them) and slots (the scheduler gives them out).
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from headrace.base.adapters import (
    AdapterConfig,
    AdapterFacts,
    AdapterInfo,
    AdapterStats,
    LoadAdapter,
    PinAdapter,
    UnloadAdapter,
)
from headrace.base.errors import AdapterError, Conflict, HeadraceError, ModelError, NotFound, RequestError
from headrace.base.messages import EngineRequest
from headrace.scheduling.adapters import AdapterSlots
from headrace.service.executor import Executor

logger = logging.getLogger(__name__)

MAX_NAME_LEN = 256
IDLE_WAIT_S = 0.002
"""How long an engine with nothing else to do waits for an adapter before it looks for messages again."""
NUM_NAMED = 8
"""Most loaded adapters that an error lists."""


@dataclass(eq=False)
class Adapter:
    """One version of an adapter; a reload makes another of the same name. ``number``: by which the scheduler and the
    executor know it. ``requests``: ids of those that have begun and not ended."""

    name: str
    path: str
    number: int
    facts: AdapterFacts
    is_draining: bool = False
    requests: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Load:
    """An adapter that is being read."""

    call: LoadAdapter
    number: int
    facts: Future[AdapterFacts]
    answer: Future[AdapterInfo]


class AdapterRegistry:
    """Called by the engine's thread alone."""

    def __init__(self, slots: AdapterSlots, executor: Executor):
        self._slots, self._executor = slots, executor
        self._numbers = count(1)
        self._by_name: dict[str, Adapter] = {}
        self._draining: list[Adapter] = []  # unloaded or replaced, with requests
        self.by_request: dict[str, Adapter] = {}
        self._loads: dict[str, _Load] = {}  # by name
        self._awaited: dict[int, Future[Any]] = {}  # read again for requests that wait for a slot, by number
        slots.is_ready = self._is_ready

    # -- admin calls --------------------------------------------------------------------------------------------

    def begin_load(self, call: LoadAdapter) -> Future[AdapterInfo]:
        """Begin to read an adapter; a later call of `settle` makes it known and the future done. Raises `Conflict` or
        `RequestError`; the future raises what reading raises."""
        self._check(call)
        number = next(self._numbers)
        load = self._loads[call.name] = _Load(call, number, self._executor.adapters.read(number, call), Future())
        return load.answer

    def settle(self) -> None:
        """Make adapters known that have been read meanwhile. Cheap when there are none."""
        for name, load in list(self._loads.items()):
            if not load.facts.done():
                continue
            del self._loads[name]
            error = load.facts.exception()
            if error is None:
                load.answer.set_result(self._add(load, load.facts.result()))
            else:
                self._executor.adapters.forget(load.number)
                load.answer.set_exception(error)

    def load(self, call: LoadAdapter) -> AdapterInfo:
        """Load an adapter and wait for it; raises what reading it raises."""
        answer = self.begin_load(call)
        wait([self._loads[call.name].facts])
        self.settle()
        return answer.result()

    def load_modules(self, config: AdapterConfig) -> None:
        """Load the adapters of the configuration; raises what reading one raises."""
        if config.enable_lora:
            answers = [self.begin_load(LoadAdapter(module.name, module.path)) for module in config.modules]
            wait([load.facts for load in self._loads.values()])
            self.settle()
            for answer in answers:
                answer.result()

    def unload(self, call: UnloadAdapter) -> AdapterInfo:
        """Let no further request use it, and free it when those that do have ended."""
        adapter = self._get(call.name)
        del self._by_name[call.name]
        self._drain(adapter)
        return self._describe(adapter)

    def pin(self, call: PinAdapter) -> AdapterInfo:
        """Keep it on the device, or no longer; raises `Conflict`."""
        adapter = self._get(call.name)
        if not self._slots.pin(adapter.number, call.is_pinned):
            raise _no_room(call.name, self._slots.num_slots)
        return self._describe(adapter)

    def describe_all(self) -> list[AdapterInfo]:
        """All that are loaded or draining, by name."""
        every = sorted([*self._by_name.values(), *self._draining], key=lambda adapter: (adapter.name, adapter.number))
        return [self._describe(adapter) for adapter in every]

    def stats(self) -> AdapterStats:
        """Counters and gauges."""
        slots, running, waiting = self._slots, Counter[str](), Counter[str]()
        for adapter in {*self.by_request.values()}:
            num_running = slots.users.get(adapter.number, 0)
            running[adapter.name] += num_running
            waiting[adapter.name] += len(adapter.requests) - num_running
        return AdapterStats(
            len(self._by_name), len(slots.resident), slots.loads_total, slots.evictions_total, dict(+running),
            dict(+waiting),
        )

    # -- requests -----------------------------------------------------------------------------------------------

    def enter(self, request: EngineRequest) -> tuple[EngineRequest, int]:
        """A new request, with the content of its adapter in its namespace, and the adapter's number; 0 for the base
        model. Raises `NotFound`. If it is then refused, `leave` must be called."""
        if not request.adapter:
            # clients choose namespaces: behind a slash, none of the base model's is an adapter's
            salt = f"/{request.namespace}" if request.namespace else ""
            return msgspec.structs.replace(request, namespace=salt) if salt else request, 0
        adapter = self._get(request.adapter)
        if request.request_id in self.by_request:
            raise RequestError(
                f"request id {request.request_id!r} is already in use; choose another", param="request_id"
            )
        self.by_request[request.request_id] = adapter
        adapter.requests.add(request.request_id)
        namespace = f"{adapter.facts.digest}/{request.namespace}"
        return msgspec.structs.replace(request, namespace=namespace), adapter.number

    def leave(self, request_id: str) -> None:
        """A request has ended; does nothing for one without an adapter."""
        adapter = self.by_request.pop(request_id, None)
        if adapter is not None:
            adapter.requests.discard(request_id)
            if adapter.is_draining and not adapter.requests:
                self._draining.remove(adapter)
                self._free(adapter)

    @property
    def awaited(self) -> list[Future[Any]]:
        """What is read again for requests of the scheduler."""
        return list(self._awaited.values())

    def take_failed(self) -> list[tuple[str, HeadraceError]]:
        """The ids of requests that wait for a slot, but whose adapter cannot be read again, and why; those whose
        adapter has been read again get their turn."""
        failed: list[tuple[str, HeadraceError]] = []
        for number, prepared in [each for each in self._awaited.items() if each[1].done()]:
            del self._awaited[number]
            self._slots.note_ready()
            if (error := prepared.exception()) is not None:
                waiting = [request for request in self._slots.waiting if request.adapter == number]
                names = {request.request_id: self.by_request[request.request_id].name for request in waiting}
                failed += [(request_id, _describe_failure(name, error)) for request_id, name in names.items()]
        return failed

    def _is_ready(self, number: int) -> bool:
        """Whether an adapter is in host memory. It stays there until a plan that is made now has loaded it."""
        if number not in self._awaited:
            prepared = self._executor.adapters.prepare(number)
            if _is_prepared(prepared):
                return True
            self._awaited[number] = prepared
        return False

    def _check(self, call: LoadAdapter) -> None:
        if not 0 < len(call.name) <= MAX_NAME_LEN:
            raise RequestError(f"an adapter's name has 1 to {MAX_NAME_LEN} characters", param="lora_name")
        if call.name in self._loads or (call.name in self._by_name and not call.replaces):
            raise Conflict(
                f"an adapter {call.name!r} is loaded already; unload it first, or load it in place", param="lora_name"
            )

    def _add(self, load: _Load, facts: AdapterFacts) -> AdapterInfo:
        before = self._by_name.get(load.call.name)
        is_pinned = load.call.is_pinned or (before is not None and before.number in self._slots.pinned)
        if before is not None:
            self._drain(before)
        adapter = self._by_name[load.call.name] = Adapter(load.call.name, load.call.path, load.number, facts)
        if is_pinned and not self._slots.pin(load.number):
            logger.warning("adapter %s is not pinned: no slot would be left for others", adapter.name)
        return self._describe(adapter)

    def _drain(self, adapter: Adapter) -> None:
        self._slots.pin(adapter.number, False)
        if adapter.requests:
            adapter.is_draining = True
            self._draining.append(adapter)
        else:
            self._free(adapter)

    def _free(self, adapter: Adapter) -> None:
        self._slots.drop(adapter.number)
        self._awaited.pop(adapter.number, None)
        self._executor.adapters.forget(adapter.number)

    def _get(self, name: str) -> Adapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            known = sorted(self._by_name)
            more = ", ..." if len(known) > NUM_NAMED else ""
            told = f"loaded: {', '.join(known[:NUM_NAMED])}{more}" if known else "none is loaded"
            raise NotFound(f"this engine has no adapter {name!r}, load it first; {told}", param="model")
        return adapter

    def _describe(self, adapter: Adapter) -> AdapterInfo:
        facts, slots = adapter.facts, self._slots
        return AdapterInfo(
            adapter.name, adapter.path, facts.digest, facts.rank, facts.num_bytes,
            is_pinned=adapter.number in slots.pinned, is_resident=adapter.number in slots.resident,
            is_draining=adapter.is_draining, num_requests=len(adapter.requests), modules=facts.modules,
        )


class AdapterGate:
    """A `headrace.service.coordination.RequestCoordinator`: holds requests whose adapter has left host memory until it
    has been read again. Those whose adapter leaves it later wait for a slot, in the scheduler."""

    def __init__(self, registry: AdapterRegistry, slots: AdapterSlots, executor: Executor):
        self._registry, self._slots, self._executor = registry, slots, executor
        self._held: dict[str, tuple[EngineRequest, Future[Any]]] = {}  # by request

    @property
    def is_waiting(self) -> bool:
        """See `RequestCoordinator`."""
        return bool(self._held or self._registry.awaited)

    def concerns(self, request: EngineRequest) -> bool:
        """See `RequestCoordinator`: whether its adapter must be read again."""
        adapter = self._registry.by_request.get(request.request_id)
        return (
            adapter is not None and adapter.number not in self._slots.resident
            and not _is_prepared(self._executor.adapters.prepare(adapter.number))
        )

    def hold(self, request: EngineRequest) -> None:
        """See `RequestCoordinator`."""
        number = self._registry.by_request[request.request_id].number
        self._held[request.request_id] = request, self._executor.adapters.prepare(number)

    def poll(self) -> list[tuple[EngineRequest, HeadraceError | None]]:
        """See `RequestCoordinator`."""
        ready: list[tuple[EngineRequest, HeadraceError | None]] = []
        for request, prepared in [held for held in self._held.values() if held[1].done()]:
            del self._held[request.request_id]
            error = prepared.exception()
            ready.append((request, None if error is None else _describe_failure(request.adapter, error)))
        return ready

    def pause(self) -> None:
        """See `RequestCoordinator`."""
        held = [prepared for _, prepared in self._held.values()]
        wait([*held, *self._registry.awaited], IDLE_WAIT_S, FIRST_COMPLETED)


def _is_prepared(prepared: Future[Any]) -> bool:
    """Whether an adapter is in host memory; one that cannot be read is not."""
    return prepared.done() and prepared.exception() is None


def _no_room(name: str, num_slots: int) -> Conflict:
    return Conflict(
        f"adapter {name!r} cannot be pinned: of {num_slots} slots one must be left for others; unpin another, or raise "
        "max_loras", param="lora_name",
    )


def _describe_failure(name: str, error: BaseException) -> HeadraceError:
    """The error of a request, whose client need not know of the server's files."""
    if isinstance(error, HeadraceError) and not isinstance(error, AdapterError | ModelError):
        return error
    logger.warning("adapter %s cannot be read again: %s: %s", name, type(error).__name__, error)
    return RequestError(
        f"adapter {name!r} has left host memory and its files cannot be read again (the server's log says why); load "
        "it again in place", param="model"
    )
