"""`Offers`: the prefill side of an agent: what its engine offers, and the links of decode agents that fetch it.

Refuses: knowing pages; it writes spans of leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.base.errors import TransferFailed
from headrace.base.transfer import (
    LEASE_S,
    Alive,
    Cancel,
    Completed,
    Decline,
    Done,
    Failed,
    Filled,
    FirstTokens,
    FromAgent,
    Hello,
    Offer,
    Reclaim,
    Refusal,
    Released,
    Span,
    Stop,
    Stopped,
    Want,
    Written,
    decode_from_decode,
    rooms_like,
)
from headrace.memory.transfer.contract import AnyRegion, Copy, Destination, TransferBackend
from headrace.service.transfer.wire import (
    BEAT_S,
    HELLO_S,
    MAX_HELLO_BYTES,
    PIECE_BYTES,
    Checksums,
    PeerLine,
    Result,
    run_in_thread,
    split_spans,
)
from headrace.service.transport import prepare_line

logger = logging.getLogger(__name__)

OFFER_S = 5.0
"""How long a decode agent may ask for a room before it is offered: a router sends both requests at once."""
UNWANTED_S = 6.0
"""For so long complete pages are kept for somebody who wants them where others have no memory: a decode engine wants
them at once, or goes on without (`gate.ROOM_S`); that of another router may be told of them only now."""
WRITE_S = 30.0
"""Most seconds for one write: then the agent must end, as nothing else ends what a backend may still write."""
WRITE_BYTES = 64 << 20
"""Of one write, so that those of a slow network end in time; where the host reads them, for their checksums."""
MOST_WAITING = 1 << 14
MOST_FAILED = 1 << 10


def call_backend(call: Callable[..., Result], *arguments: object) -> Result:
    """Return what a backend does; raises `TransferFailed` for whatever one of another package raises."""
    try:
        return call(*arguments)
    except TransferFailed:
        raise
    except Exception as error:
        raise TransferFailed(f"the transfer backend failed: {type(error).__name__}: {error}") from error


@dataclass(eq=False)
class _Room:
    offer: Offer
    spans: list[Span] = field(default_factory=list)
    first: FirstTokens | None = None
    completed_at: float = 0.0  # by `time.monotonic`
    failure: str = ""
    is_taken: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        return self.first is None and not self.failure


@dataclass(eq=False)
class _Delivery:
    want: Want
    is_stopped: bool = False
    room: _Room | None = None

    def stop(self) -> None:
        self.is_stopped = True
        if self.room is not None:
            self.room.changed.set()


class Offers:
    """``report`` tells the engine. ``silence``: seconds for which the engine has shown no sign of life.
    ``lease_s``: how long complete pages wait for somebody who wants them."""

    def __init__(
        self, hello: Hello, region: AnyRegion, backend: TransferBackend, report: Callable[[FromAgent], None],
        silence: Callable[[], float], *, lease_s: float = LEASE_S,
    ):
        self._hello, self._region, self._backend = hello, region, backend
        self._report, self._silence, self._lease_s = report, silence, lease_s
        self._checksums = Checksums()
        self._rooms: dict[str, _Room] = {}
        self._tickets: dict[int, _Room] = {}
        self._asked: dict[str, asyncio.Future[_Room]] = {}  # rooms that were wanted before they were offered
        self._failed: dict[str, str] = {}  # rooms that failed before they were wanted, latest last
        self._links: dict[_Link, int] = {}  # with the epochs of their decode agents

    def take(self, message: Offer | Filled | Completed | Cancel | Decline | Reclaim) -> None:
        """A message of the engine."""
        if isinstance(message, Offer):
            self._add(message)
            return
        if isinstance(message, Decline):
            self._decline(message.room, message.reason)
            return
        if isinstance(message, Reclaim):
            self._reclaim()
            return
        room = self._tickets.get(message.ticket)
        if room is None:  # delivered or expired meanwhile
            return
        match message:
            case Filled():
                room.spans += message.spans
            case Completed():
                room.first, room.completed_at = message.first, time.monotonic()
            case Cancel():
                room.failure = message.reason
        room.changed.set()
        if not room.is_open and not room.is_taken:
            if room.failure:
                self._note_failed(room.offer.room, room.failure)
                self.end(room, room.failure)
            else:
                asyncio.get_running_loop().call_later(self._lease_s, self._expire, room)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One link, from its greeting to its end."""
        prepare_line(writer.get_extra_info("socket"))
        address = writer.get_extra_info("peername") or ("a peer",)
        line = PeerLine(reader, writer, f"decode agent at {address[0]}")
        try:
            epoch, destination = await self._greet(line)
        except (TransferFailed, TimeoutError) as error:
            logger.warning("%s gets nothing: %s", line.name, error or "it did not greet in time")
            line.send(Refusal(str(error) or "no greeting"))
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.drain(), HELLO_S)
            writer.close()
            return
        link = _Link(self, line, destination)
        self._links[link] = epoch
        try:
            await link.run()
        except TransferFailed as error:
            logger.info("%s", error)
        finally:
            line.close()
            del self._links[link]

    async def _greet(self, line: PeerLine) -> tuple[int, Destination]:
        hello = await line.receive(decode_from_decode, HELLO_S, MAX_HELLO_BYTES)
        if not isinstance(hello, Hello):
            raise TransferFailed("the first message must be a greeting")
        for earlier in [link for link, epoch in self._links.items() if epoch == hello.epoch]:
            await earlier.end()  # the other side gave it up: whatever is answered, it writes no more
        if (hello.version, hello.backend) != (self._hello.version, self._hello.backend):
            raise TransferFailed(
                f"it has version {hello.version} and transfer backend {hello.backend}, here it is "
                f"{self._hello.version} and {self._hello.backend}"
            )
        differences = hello.facts.find_differences(self._hello.facts)
        if differences:
            raise TransferFailed(differences)
        destination = await run_in_thread(call_backend, self._backend.connect, hello.handle)
        line.send(self._hello)
        return hello.epoch, destination

    async def find(self, delivery: _Delivery) -> _Room:
        """The room that is wanted, now or within `OFFER_S`; raises `TransferFailed`."""
        want = delivery.want
        room = self._rooms.get(want.room) or await self._await_offer(want.room)
        if room.is_taken:
            raise TransferFailed("the room was fetched already")
        if want.prompt != room.offer.prompt or want.num_bytes not in (0, room.offer.num_bytes):
            raise TransferFailed("the two requests of the room have different prompts")
        room.is_taken, delivery.room = True, room
        return room

    async def _await_offer(self, name: str) -> _Room:
        for known in rooms_like(name):
            if known in self._failed:
                raise TransferFailed(self._failed[known])
        if len(self._asked) >= MOST_WAITING or name in self._asked:
            raise TransferFailed("the room is wanted twice, or too many are")
        asked = self._asked[name] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asked, OFFER_S)
        except TimeoutError:
            raise TransferFailed(f"the prefill engine got no such request within {OFFER_S:g} s") from None
        finally:
            del self._asked[name]

    def divide(self, spans: list[Span]) -> list[list[Span]]:
        """The same bytes by the writes that they take, each in pieces."""
        pieces = split_spans(spans)
        size = WRITE_BYTES // PIECE_BYTES if self._region.data.size else len(pieces)
        return [pieces[begin : begin + size] for begin in range(0, len(pieces), size)]

    def write(self, room: _Room, destination: Destination, want: Want, spans: list[Span]) -> list[int]:
        """Write spans of a room into a peer's lease; returns their checksums. Called in a thread; raises
        `TransferFailed`."""
        begin = room.offer.begin
        sums = self._checksums.compute(self._region, begin, spans)
        copies = [Copy(begin + start, want.begin + start, size) for start, size in spans]
        call_backend(destination.write, copies)
        return sums

    def end(self, room: _Room, reason: str = "") -> None:
        """Nobody reads the pages of a room any more: the engine may reuse them. ``reason``: why it failed, or empty."""
        if self._tickets.pop(room.offer.ticket, None) is not None:
            del self._rooms[room.offer.room]
            self._report(Released(room.offer.ticket, reason))

    def check_writes(self) -> None:
        """Raise `TransferFailed` if a write takes so long that it may never end."""
        longest_s = max((link.writing_s for link in self._links), default=0.0)
        if longest_s > WRITE_S:
            raise TransferFailed(f"a write has not ended within {longest_s:.0f} s; memory of its peer is given up")

    @property
    def engine_silent_s(self) -> float:
        """For how long the engine has done nothing, although a room is not complete."""
        return self._silence() if any(room.is_open for room in self._tickets.values()) else 0.0

    def _add(self, offer: Offer) -> None:
        if offer.room in self._rooms:
            self._report(Released(offer.ticket, f"room {offer.room} is in use by another request"))
            return
        for known in rooms_like(offer.room):  # earlier requests of the same name
            self._failed.pop(known, None)
        room = self._rooms[offer.room] = self._tickets[offer.ticket] = _Room(offer)
        asked = self._asked.get(offer.room)
        if asked is not None and not asked.done():
            asked.set_result(room)

    def _reclaim(self) -> None:
        until = time.monotonic() - UNWANTED_S
        for room in [room for room in self._rooms.values() if room.first is not None and not room.is_taken]:
            if room.completed_at <= until:
                self.end(room, f"nobody fetched the pages within {UNWANTED_S:g} s, and others need their memory")

    def _decline(self, declined: str, reason: str) -> None:
        self._note_failed(declined, reason)
        for name, asked in self._asked.items():
            if declined in rooms_like(name) and not asked.done():
                asked.set_exception(TransferFailed(reason))

    def _note_failed(self, room: str, reason: str) -> None:
        self._failed[room] = reason
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _expire(self, room: _Room) -> None:
        if not room.is_taken and room.offer.ticket in self._tickets:
            self.end(room, f"nobody fetched the pages within {self._lease_s:g} s")


class _Link:
    """A decode agent that has proved to fit."""

    def __init__(self, offers: Offers, line: PeerLine, destination: Destination):
        self._offers, self._line, self._destination = offers, line, destination
        self._deliveries: dict[int, _Delivery] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # a destination takes one write at a time
        self._listening: asyncio.Task[None] | None = None
        self._is_given_up = False
        self._has_ended = asyncio.Event()
        self._writing_since: float | None = None

    @property
    def writing_s(self) -> float:
        """For how long a write has been under way."""
        return 0.0 if self._writing_since is None else time.monotonic() - self._writing_since

    async def run(self) -> None:
        """Until the peer is gone, or `end`. Leaves no write behind."""
        beat = asyncio.create_task(self._beat())
        self._listening = asyncio.create_task(self._listen())
        try:
            await asyncio.wait([self._listening])
            if not self._is_given_up:
                self._listening.result()
        finally:
            self._listening.cancel()
            beat.cancel()
            for delivery in self._deliveries.values():
                delivery.stop()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._close_destination()
            self._has_ended.set()

    def _close_destination(self) -> None:
        try:
            call_backend(self._destination.close)
        except TransferFailed as error:  # the next link has a destination of its own
            logger.warning("%s: %s", self._line.name, error)

    async def end(self) -> None:
        """Return when nothing is written any more. The line is not closed before: its peer takes the end of it to mean
        just that."""
        self._is_given_up = True
        if self._listening is not None:
            self._listening.cancel()
        await self._has_ended.wait()

    async def _listen(self) -> None:
        while not self._is_given_up:
            message = await self._line.receive(decode_from_decode)
            if isinstance(message, Want):
                self._begin(message)
            elif isinstance(message, Stop):
                self._stop(message.ticket)
            else:
                raise TransferFailed(f"{self._line.name} greeted twice")

    async def _beat(self) -> None:
        while True:
            self._line.send(Alive(self._offers.engine_silent_s, self.writing_s))
            await asyncio.sleep(BEAT_S)

    def _begin(self, want: Want) -> None:
        if want.ticket in self._deliveries or len(self._deliveries) >= MOST_WAITING:
            raise TransferFailed(f"{self._line.name} uses a ticket twice, or too many")
        delivery = self._deliveries[want.ticket] = _Delivery(want, is_stopped=want.num_bytes == 0)
        task = asyncio.create_task(self._deliver(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop(self, ticket: int) -> None:
        delivery = self._deliveries.get(ticket)
        if delivery is None:  # it has ended, or never began
            self._line.send(Stopped(ticket))
        else:
            delivery.stop()

    async def _deliver(self, delivery: _Delivery) -> None:
        ticket, room = delivery.want.ticket, None
        try:
            room = await self._offers.find(delivery)
            await self._write_all(delivery, room)
            if delivery.is_stopped:
                self._offers.end(room, "the decode engine gave it up")
            elif room.failure or room.first is None:
                raise TransferFailed(room.failure)
            else:
                self._line.send(Done(ticket, room.first))
                self._offers.end(room)
        except TransferFailed as error:
            if room is not None:
                self._offers.end(room, error.message)
            if not delivery.is_stopped:
                self._line.send(Failed(ticket, error.message))
        finally:
            del self._deliveries[ticket]
            if delivery.is_stopped:
                self._line.send(Stopped(ticket))

    async def _write_all(self, delivery: _Delivery, room: _Room) -> None:
        """Write what is filled, as it is filled, to the end or until the delivery is stopped."""
        num_done = 0
        while not delivery.is_stopped:
            room.changed.clear()
            filled = room.spans[num_done:]
            if filled:
                for spans in self._offers.divide(filled):
                    if not delivery.is_stopped:
                        await self._write(delivery, room, spans)
                num_done += len(filled)
            elif not room.is_open:
                return
            else:
                await room.changed.wait()

    async def _write(self, delivery: _Delivery, room: _Room, spans: list[Span]) -> None:
        async with self._turn:
            self._writing_since = time.monotonic()
            try:
                sums = await run_in_thread(self._offers.write, room, self._destination, delivery.want, spans)
            finally:
                self._writing_since = None
        self._line.send(Written(delivery.want.ticket, spans, sums))


