"""`AdapterSlots`: which adapters are on the device, in which slot, and the requests that wait for theirs.

Refuses: names and files; an adapter is a number here, 0 the base model. Loading takes one step: the plan that carries
the load lets the requests wait that need it, as long as it has others to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from headrace.base.step import AdapterLoad
from headrace.scheduling.request import Request

NO_ADAPTER = 0
MOST_OVERTAKINGS = 64
"""Admissions of younger requests after which a request that waits for a slot gets the next: one adapter is then closed
to younger requests, until those that use it have ended."""


class AdapterSlots:
    """Slots are accounts like pages: an adapter stays while requests use it, and longer if it is pinned; of others the
    one that was used least lately goes first. A request whose adapter has no slot leaves the queue until there is one,
    so that it holds nobody up. Sets are dicts with None values, for a fixed order. ``is_ready``: whether a plan may
    load an adapter; where not, requests wait until `note_ready`, as one that cannot be loaded fails the step of others.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a heap: few adapters are in the first slots, which is faster
        self.resident: dict[int, int] = {}  # slots by adapter, the one used least lately first
        self.users: dict[int, int] = {}  # running requests by adapter
        self.pinned: set[int] = set()
        self._arriving: set[int] = set()  # loads that no plan has carried yet
        self._loads: list[AdapterLoad] = []  # of the next plan
        self.waiting: dict[Request, None] = {}
        self._closed = NO_ADAPTER
        self._num_overtakings = 0
        self._is_due = False  # something changed for those that wait
        self.is_ready: Callable[[int], bool] = lambda adapter: True
        self.loads_total = self.evictions_total = 0

    def slot_of(self, adapter: int) -> int:
        """The slot of a resident adapter, -1 for the base model."""
        return self.resident[adapter] if adapter else -1

    def admit(self, request: Request, *, is_alone: bool) -> bool:
        """Whether a request of the queue may run by its adapter; if not it waits here, out of the queue, until `wake`
        returns it. ``is_alone``: nothing else is computed meanwhile, so it need not wait for the load."""
        adapter = request.adapter
        if not adapter:
            return True
        if adapter not in self.resident and not (self.is_ready(adapter) and self._acquire(adapter)):
            return self._park(request)
        if adapter in self._arriving:
            if not is_alone:
                return self._park(request)
            self._arriving.discard(adapter)
        if self._waits_longer(request):
            self._num_overtakings += 1
            if self._num_overtakings > MOST_OVERTAKINGS and not self._closed:
                self._close_one()
            if adapter == self._closed:
                return self._park(request)
        return True

    def enter(self, request: Request) -> None:
        """The request runs."""
        if request.adapter:
            adapter = request.adapter
            self.users[adapter] = self.users.get(adapter, 0) + 1
            self.resident[adapter] = self.resident.pop(adapter)  # used last

    def leave(self, request: Request) -> None:
        """The request runs no longer."""
        adapter = request.adapter
        if adapter:
            self.users[adapter] -= 1
            if not self.users[adapter]:
                del self.users[adapter]
                self._is_due = True

    def wake(self, *, is_alone: bool) -> list[Request]:
        """Requests for the queue, whose adapter has a slot now or can get one. Before each plan; O(1) if nothing
        changed. ``is_alone``: nothing runs."""
        if is_alone:
            self._arriving.clear()  # no step goes on meanwhile, so their loads need not be waited for
        if self._closed and all(request.adapter in self.resident for request in self.waiting):
            self._closed, self._is_due = NO_ADAPTER, True  # those it was closed for have ended
        if not self.waiting or not (self._is_due or is_alone):
            return []
        self._is_due = False
        room = len(self._free) + sum(self._is_idle(adapter) for adapter in self.resident)
        hoped: set[int] = set()
        woken = []
        for request in sorted(self.waiting, key=lambda request: request.seq):
            adapter = request.adapter
            if adapter in self.resident:
                can_run = (is_alone or adapter not in self._arriving) and adapter != self._closed
            else:
                can_run = adapter in hoped or room > 0
                if can_run and adapter not in hoped:
                    hoped.add(adapter)
                    room -= 1
            if can_run:
                del self.waiting[request]
                woken.append(request)
        return woken

    def note_ready(self) -> None:
        """An adapter that was not ready may be now."""
        self._is_due = True

    def take_loads(self) -> list[AdapterLoad]:
        """The loads of the plan that is being made; requests may use them from the next on."""
        loads, self._loads = self._loads, []
        if loads:
            self._arriving.clear()
            self._is_due = True
        return loads

    def pin(self, adapter: int, is_pinned: bool = True) -> bool:
        """Keep an adapter on the device once it is there; False if no slot would be left for others."""
        if not is_pinned:
            self.pinned.discard(adapter)
            self._is_due = True
        elif adapter not in self.pinned and len(self.pinned) + 1 >= self.num_slots:
            return False
        else:
            self.pinned.add(adapter)
        return True

    def drop(self, adapter: int) -> None:
        """Empty the slot of an adapter that no request uses any more, if it has one."""
        assert adapter not in self.users, f"adapter {adapter} is in use"
        self.pinned.discard(adapter)
        if adapter in self.resident:
            slot = self.resident.pop(adapter)
            self._arriving.discard(adapter)
            self._loads = [load for load in self._loads if load.slot != slot]
            self._loads.append(AdapterLoad(slot, NO_ADAPTER))
            heappush(self._free, slot)
            self._is_due = True

    def forget_device(self) -> None:
        """A step failed, and with it perhaps the loads of plans, or the device was cleared. All slots are emptied, and
        adapters are loaded when requests need them: one that cannot be loaded must not fail step after step. Nothing
        runs."""
        assert not self.users, "adapters are in use"
        slots = {*self.resident.values(), *(load.slot for load in self._loads)}
        self._loads = [AdapterLoad(slot, NO_ADAPTER) for slot in sorted(slots)]
        self._free = list(range(self.num_slots))
        self.resident.clear()
        self._arriving.clear()
        self._closed, self._is_due = NO_ADAPTER, True

    def check(self, running: list[Request]) -> None:
        """Raise `AssertionError` unless slots and users are those of the running requests."""
        slots = [*self._free, *self.resident.values()]
        assert sorted(slots) == list(range(self.num_slots)), f"adapter slots lost or doubled: {slots}"
        users: dict[int, int] = {}
        for request in running:
            if request.adapter:
                users[request.adapter] = users.get(request.adapter, 0) + 1
        assert users == self.users, f"adapters are used by {users}, not {self.users}"
        assert users.keys() <= self.resident.keys(), "an adapter in use has no slot"

    def _acquire(self, adapter: int) -> bool:
        """Give an adapter a slot if one is free or can be emptied."""
        if not self._free:
            victim = next((other for other in self.resident if self._is_idle(other)), None)
            if victim is None:
                return False
            heappush(self._free, self.resident.pop(victim))
            self.evictions_total += 1
            if victim == self._closed:
                self._closed = NO_ADAPTER
        slot = self.resident[adapter] = heappop(self._free)
        self._loads = [load for load in self._loads if load.slot != slot]
        self._loads.append(AdapterLoad(slot, adapter))
        self._arriving.add(adapter)
        self.loads_total += 1
        self._num_overtakings = 0
        return True

    def _is_idle(self, adapter: int) -> bool:
        return adapter not in self.users and adapter not in self.pinned and adapter not in self._arriving

    def _park(self, request: Request) -> bool:
        self.waiting[request] = None
        return False

    def _waits_longer(self, request: Request) -> bool:
        """Whether an older request waits for a slot."""
        return any(other.seq < request.seq and other.adapter not in self.resident for other in self.waiting)

    def _close_one(self) -> None:
        """Close the unpinned adapter with the fewest users."""
        candidates = [adapter for adapter in self.resident if adapter not in self.pinned]
        self._closed = min(candidates, key=lambda adapter: self.users.get(adapter, 0), default=NO_ADAPTER)
