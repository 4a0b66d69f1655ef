"""`TransferGate`: a request coordinator. In a prefill engine it holds a request until there is memory for its pages to
leave by; in a decode engine until its pages have come, or will not: then it is computed here.

Refuses: bytes. It passes tickets between the scheduler's `Exchange` and the transfer agent.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.base.errors import HeadraceError
from headrace.base.messages import EngineRequest
from headrace.base.transfer import (
    Arrived,
    Cancel,
    Completed,
    Decline,
    Fetch,
    Filled,
    FromAgent,
    Lost,
    Offer,
    Reclaim,
    Released,
    digest_prompt,
)
from headrace.scheduling.exchange import Event, Exchange, Lease, Role
from headrace.service.transfer.leases import Leases
from headrace.service.transfer.line import AgentLine

logger = logging.getLogger(__name__)

ROOM_S = 5.0
"""How long a request waits for memory of the region before it goes on without."""
PATIENCE_S = 3.0
"""How long requests wait for an agent that says nothing. It is given up later: it may only be slow, and to compute a
prompt costs less than to start it anew."""
IDLE_WAIT_S = 0.002
SILENCE = f"the transfer agent has said nothing for {PATIENCE_S:g} s"
RECLAIM_EVERY_S = 0.5
LOG_EVERY_S = 5.0
"""The same reason is logged at most so often."""


@dataclass(eq=False)
class _Held:
    """A request under a ticket. The lease is free when ``agent_uses`` and ``engine_uses`` are both false."""

    request: EngineRequest
    lease: Lease
    agent_uses: bool = True
    engine_uses: bool = False
    is_waiting: bool = False


class TransferGate:
    """See `headrace.service.coordination.RequestCoordinator`."""

    def __init__(
        self, role: Role, line: AgentLine, exchange: Exchange, *, clock: Callable[[], float] = time.monotonic
    ):
        self._is_prefill, self._line, self._exchange, self._clock = role.is_prefill, line, exchange, clock
        self._leases = Leases(line.num_bytes)
        self._held: dict[int, _Held] = {}
        self._no_room: deque[tuple[EngineRequest, float]] = deque()  # with the time until which they wait
        self._ready: list[tuple[EngineRequest, HeadraceError | None]] = []
        self._next_ticket = 1
        self._epoch = line.epoch
        self._reclaimed_at = -RECLAIM_EVERY_S
        self._logged: dict[str, float] = {}
        self.outcomes = exchange.outcomes

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits here."""
        return bool(self._no_room or self._ready) or any(held.is_waiting for held in self._held.values())

    def concerns(self, request: EngineRequest) -> bool:
        """Requests whose pages are exchanged. Those for hidden states or logprobs of the prompt are computed where they
        are answered."""
        return (
            request.transfer is not None and request.pooling is None and request.sampling.num_prompt_logprobs < 0
            and request.stop.max_tokens > 0 and not request.media
        )

    def hold(self, request: EngineRequest) -> None:
        """See `RequestCoordinator`."""
        for waiting in [one for one in self._no_room if one[0].request_id == request.request_id]:
            self._no_room.remove(waiting)  # it has ended, and its id comes again
        if not self._line.is_up:
            self._go_alone(request, "the transfer agent is being started")
        elif self._line.silent_s > PATIENCE_S:
            self._go_alone(request, SILENCE)
        elif self._no_room or not self._begin(request):
            self._no_room.append((request, self._clock() + ROOM_S))

    def poll(self) -> list[tuple[EngineRequest, HeadraceError | None]]:
        """Pass on what happened on either side; returns requests that go on."""
        for event in self._exchange.take_events():
            self._pass_on(event)
        for message in self._line.poll():
            self._take(message)
        if self._line.epoch != self._epoch or not self._line.is_up:
            self._forget_agent()
        elif self._line.silent_s > PATIENCE_S:
            self._await_no_more()
        while self._no_room:
            request, until = self._no_room[0]
            if self._begin(request):
                self._no_room.popleft()
            elif self._clock() >= until:
                self._no_room.popleft()
                self._forgo(request)
                self._go_alone(request, f"no memory for its pages within {ROOM_S:g} s")
            else:
                self._reclaim()
                break
        ready, self._ready = self._ready, []
        return ready

    def decline(self, rooms: Sequence[str], reason: str) -> None:
        """See `headrace.service.coordination.Gate`."""
        for room in rooms if self._is_prefill and self._line.is_up else ():
            self._line.send(Decline(room, reason))

    def pause(self) -> None:
        """Wait briefly for the agent."""
        line = self._line.descriptor
        if line is not None and not self._ready:
            select.select([line], [], [], IDLE_WAIT_S)

    def close(self) -> None:
        """End the agent."""
        self._line.close()

    def _begin(self, request: EngineRequest) -> bool:
        """Give a request a lease, and say so to the agent; False when there is no room now."""
        spec = request.transfer
        assert spec is not None, "see concerns"
        if request.request_id not in self._exchange.expected:  # it has ended meanwhile
            self._forgo(request)
            return True
        extent = self._exchange.measure(len(request.prompt_token_ids))
        if extent.num_bytes > self._leases.num_bytes:
            self._forgo(request)
            self._go_alone(request, f"its pages are {extent.num_bytes} bytes, more than there are for transfers")
            return True
        begin = self._leases.acquire(self._next_ticket, extent.num_bytes)
        if begin is None:
            return False
        lease = Lease(self._next_ticket, self._epoch, begin, extent)
        self._next_ticket += 1
        held = self._held[lease.ticket] = _Held(request, lease)
        prompt = digest_prompt(request.prompt_token_ids, request.namespace)
        if self._is_prefill:
            held.engine_uses = True
            self._exchange.export(request.request_id, lease)
            self._line.send(Offer(lease.ticket, spec.room, prompt, begin, extent.num_bytes))
            self._ready.append((request, None))
        else:
            held.is_waiting = True
            self._exchange.expected[request.request_id] = lease.ticket
            self._line.send(Fetch(lease.ticket, spec, prompt, begin, extent.num_bytes))
        return True

    def _reclaim(self) -> None:
        if self._is_prefill and self._clock() - self._reclaimed_at >= RECLAIM_EVERY_S:
            self._reclaimed_at = self._clock()
            self._line.send(Reclaim())

    def _forgo(self, request: EngineRequest) -> None:
        """The pages of a request will not be fetched: else they would keep memory of the prefill engine for long."""
        spec = request.transfer
        assert spec is not None, "see concerns"
        if not self._is_prefill:
            prompt = digest_prompt(request.prompt_token_ids, request.namespace)
            self._line.send(Fetch(self._next_ticket, spec, prompt, 0, 0))
            self._next_ticket += 1

    def _take(self, message: FromAgent) -> None:
        held = self._held.get(message.ticket) if isinstance(message, (Arrived, Lost, Released)) else None
        if held is None:
            return
        match message:
            case Arrived():
                held.agent_uses = False
                if held.is_waiting:  # else the request has ended, while this was on its way
                    held.is_waiting, held.engine_uses = False, True
                    self.outcomes["received"] += 1
                    self._exchange.arrive(held.request.request_id, held.lease, message.first)
                    self._ready.append((held.request, None))
            case Lost():
                if held.is_waiting:
                    held.is_waiting = False
                    self._go_alone(held.request, message.reason)
            case Released():
                held.agent_uses = False
                if self._is_prefill:
                    self.outcomes["lost" if message.reason else "sent"] += 1
                    if message.reason:
                        self._log(f"pages were not fetched: {message.reason}")
                    self._exchange.stop(held.request.request_id, message.ticket)
        self._drop_if_free(held)

    def _pass_on(self, event: Event) -> None:
        held = self._held.get(event.ticket)
        if held is None or held.lease.epoch != self._epoch:
            return
        if event.spans:
            self._line.send(Filled(event.ticket, event.spans))
        if event.first is not None:
            self._line.send(Completed(event.ticket, event.first))
        elif event.reason:
            self._line.send(Cancel(event.ticket, event.reason))
        if event.is_over:
            held.engine_uses = held.is_waiting = False
            self._drop_if_free(held)

    def _drop_if_free(self, held: _Held) -> None:
        if not held.agent_uses and not held.engine_uses:
            self._held.pop(held.lease.ticket, None)
            self._leases.release(held.lease.ticket)

    def _await_no_more(self) -> None:
        """Compute what waits for the agent. Its leases stay taken until it goes on and has stopped, or is gone."""
        for held in self._held.values():
            if held.is_waiting:
                held.is_waiting = False
                self._line.send(Cancel(held.lease.ticket, SILENCE))
                self._go_alone(held.request, SILENCE)
        while self._no_room:
            self._go_alone(self._no_room.popleft()[0], SILENCE)

    def _forget_agent(self) -> None:
        """The agent is gone, with its region: what waits for it is computed here."""
        for held in self._held.values():
            if held.is_waiting:
                self._go_alone(held.request, "the transfer agent was lost")
            self._exchange.stop(held.request.request_id, held.lease.ticket)
        self._held.clear()
        self._leases.clear()
        while self._no_room:
            self._go_alone(self._no_room.popleft()[0], "the transfer agent was lost")
        self._epoch = self._line.epoch

    def _go_alone(self, request: EngineRequest, reason: str) -> None:
        self._ready.append((request, None))
        if not self._is_prefill:
            self.outcomes["lost"] += 1
            self._log(f"a request is computed here, without the prefill engine: {reason}")
        else:
            assert request.transfer is not None, "see concerns"
            self.decline([request.transfer.room], reason)
            self._log(f"a request is computed without a transfer: {reason}")

    def _log(self, text: str) -> None:
        now = self._clock()
        if now - self._logged.get(text, -LOG_EVERY_S) >= LOG_EVERY_S:
            if len(self._logged) > 256:
                self._logged.clear()
            self._logged[text] = now
            logger.warning("%s", text)
