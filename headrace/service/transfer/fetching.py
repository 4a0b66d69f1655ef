"""`Fetches`: the decode side of an agent: links to prefill agents, and what is fetched over each.

A lease whose pages will not come is `Lost` at once, so that its request can go on, and `Released` only when its peer
has said that it writes no more, or is gone: a late write must not reach the pages of another request. A connection that
breaks says neither, as a network may split for a while: then the peer is greeted again until it answers, which ends
what the epoch of this agent had asked for before, or nobody listens there any more.

A peer that is never heard of again, as its host is off, or never says that it stopped, would keep its leases for ever.
After `HELD_S` the agent must end (`check_held`): the engine starts another one with a new region, and late writes to
the old one reach nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from headrace.base.errors import TransferFailed
from headrace.base.transfer import (
    Alive,
    Arrived,
    Done,
    Failed,
    Fetch,
    FromAgent,
    Hello,
    Lost,
    Refusal,
    Released,
    Stop,
    Stopped,
    Want,
    Written,
    decode_from_prefill,
)
from headrace.memory.transfer.contract import AnyRegion
from headrace.service.transfer.wire import (
    HELLO_S,
    MAX_HELLO_BYTES,
    SILENCE_S,
    Checksums,
    LineBroken,
    PeerLine,
    run_in_thread,
)
from headrace.service.transport import prepare_line

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
BREAK_S = 2.0
"""How long a prefill agent that could not be used is not asked again."""
FENCE_S, LONGEST_FENCE_S = 1.0, 10.0
"""Pauses between greetings of a peer whose connection broke."""
HELD_S, LONGEST_HELD_S = 60.0, 300.0
"""How long a peer may keep leases whose pages are lost: where nothing else is being fetched, and in any case."""
DRAIN_S = 1.0
"""For so long the network may still bring what a peer has written that is gone."""


@dataclass(eq=False)
class _Fetching:
    fetch: Fetch
    num_bytes: int = 0  # written, with the right checksums
    lost_at: float | None = None
    """When its pages were given up, by `time.monotonic`."""


class Fetches:
    """``report`` tells the engine."""

    def __init__(self, hello: Hello, region: AnyRegion, report: Callable[[FromAgent], None]):
        self.hello, self.region, self.report = hello, region, report
        self.checksums = Checksums()
        self._links: dict[tuple[str, int], _Link] = {}
        self._by_ticket: dict[int, _Link] = {}
        self._greetings: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._broken: dict[tuple[str, int], tuple[float, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def fetch(self, fetch: Fetch) -> None:
        """Begin to fetch."""
        address = (fetch.spec.host, fetch.spec.port)
        until, reason = self._broken.get(address, (0.0, ""))
        if time.monotonic() < until:
            self.report(Lost(fetch.ticket, reason))
            self.report(Released(fetch.ticket))
            return
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self, address)
            task = asyncio.create_task(link.run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._by_ticket[fetch.ticket] = link
        link.add(fetch)

    def cancel(self, ticket: int) -> None:
        """The engine no longer wants it."""
        link = self._by_ticket.get(ticket)
        if link is not None:
            link.give_up(ticket, "", is_silent=True)

    def check_held(self) -> None:
        """Raise `TransferFailed` if a peer has kept leases of lost pages for too long."""
        now, links = time.monotonic(), set(self._by_ticket.values())
        held = {link.name: now - link.held_since for link in links if link.held_since is not None}
        longest_s = max(held.values(), default=0.0)
        if longest_s > (LONGEST_HELD_S if any(link.is_fetching for link in links) else HELD_S):
            raise TransferFailed(
                f"for {longest_s:.0f} s {', '.join(sorted(held))} did not say that nothing is written any more; memory "
                "that it may write to is given up"
            )

    def forget(self, ticket: int) -> None:
        """A fetch is over."""
        self._by_ticket.pop(ticket, None)

    def latest_link(self, address: tuple[str, int]) -> _Link | None:
        """The one that is used for new fetches."""
        return self._links.get(address)

    def greeting_lock(self, address: tuple[str, int]) -> asyncio.Lock:
        """To be held while a peer is greeted, which ends what was asked for over earlier links."""
        return self._greetings.setdefault(address, asyncio.Lock())

    def note_broken(self, link: _Link, reason: str) -> None:
        """Use a link for nothing new, and its peer for nothing for a while."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
            if len(self._broken) > 256:
                self._broken.clear()
            self._broken[link.address] = time.monotonic() + BREAK_S, reason
            logger.warning("%s: %s; its requests are computed here", link.name, reason)


class _Link:
    """The connection to one prefill agent."""

    def __init__(self, fetches: Fetches, address: tuple[str, int]):
        self.address, self.name = address, f"prefill agent {address[0]}:{address[1]}"
        self._fetches, self._greeting = fetches, fetches.greeting_lock(address)
        self._line: PeerLine | None = None
        self._open: dict[int, _Fetching] = {}
        self._is_broken = False  # and used for nothing new

    @property
    def held_since(self) -> float | None:
        """Since when its peer keeps a lease of lost pages, by `time.monotonic`; None where it keeps none."""
        return min((each.lost_at for each in self._open.values() if each.lost_at is not None), default=None)

    @property
    def is_fetching(self) -> bool:
        """Whether pages are still to come."""
        return any(each.lost_at is None for each in self._open.values())

    def add(self, fetch: Fetch) -> None:
        """Fetch over this link, now or when it is connected."""
        self._open[fetch.ticket] = _Fetching(fetch)
        if self._line is not None:
            self._ask(fetch)

    def give_up(self, ticket: int, reason: str, *, is_silent: bool = False) -> None:
        """The pages of a ticket are of no use; its lease is released when the peer has stopped."""
        fetching = self._open.get(ticket)
        if fetching is None or fetching.lost_at is not None:
            return
        fetching.lost_at = time.monotonic()
        if not is_silent:
            self._fetches.report(Lost(ticket, reason))
        if self._line is None:  # never asked for
            self._release(ticket)
        else:
            self._line.send(Stop(ticket))

    async def run(self) -> None:
        """From the connection to its end."""
        reason, is_broken = "the connection ended", False
        try:
            async with self._greeting:
                line = self._line = await self._connect()
            for fetching in list(self._open.values()):
                self._ask(fetching.fetch)
            await self._listen(line)
        except (TransferFailed, OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {CONNECT_S:g} s"
            is_broken = isinstance(error, LineBroken) and self._line is not None
        finally:
            self._break(reason)
            if self._line is not None:
                self._line.close()
        if is_broken and self._open:
            await self._fence()
        # Nobody at the other end writes any more: a process that ended has no mapping, a closed session no writes.
        if self._open:
            await asyncio.sleep(DRAIN_S)
        for ticket in list(self._open):
            self._release(ticket)

    async def _fence(self) -> None:
        """Return when the peer writes nothing more of what was asked over this link."""
        pause_s = FENCE_S
        while not await self._is_fenced():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_FENCE_S)

    @property
    def is_greeted(self) -> bool:
        """Whether the peer has answered."""
        return self._line is not None

    async def _is_fenced(self) -> bool:
        try:
            async with self._greeting:
                latest = self._fetches.latest_link(self.address)
                if latest is not None and latest.is_greeted:  # later than this one, which another greeting would end
                    return True
                (await self._connect()).close()
        except LineBroken:  # the network again
            return False
        except (TransferFailed, ConnectionRefusedError):  # it has answered, if only to refuse; nobody listens
            return True
        except OSError:
            return False
        return True

    async def _connect(self) -> PeerLine:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*self.address), CONNECT_S)
        prepare_line(writer.get_extra_info("socket"))
        line = PeerLine(reader, writer, self.name)
        try:
            line.send(self._fetches.hello)
            answer = await line.receive(decode_from_prefill, HELLO_S, MAX_HELLO_BYTES)
            if isinstance(answer, Refusal):
                raise TransferFailed(f"it refuses transfers: {answer.reason}")
            if not isinstance(answer, Hello):
                raise TransferFailed("it did not greet")
            differences = self._fetches.hello.facts.find_differences(answer.facts)
            if differences:
                raise TransferFailed(differences)
        except (TransferFailed, TimeoutError):
            line.close()
            raise
        return line

    async def _listen(self, line: PeerLine) -> None:
        timeout_s: float | None = SILENCE_S
        while self._open or not self._is_broken:
            try:
                message = await line.receive(decode_from_prefill, timeout_s)
            except TimeoutError:
                # It may be stopped in the middle of a write, and go on later: its leases are kept until it is gone.
                self._break(f"no sign of life for {SILENCE_S:g} s")
                timeout_s = None
                continue
            if isinstance(message, Alive):
                if message.engine_silent_s > SILENCE_S:
                    self._break(f"its engine hangs, for {message.engine_silent_s:.0f} s now")
                elif message.writing_s > SILENCE_S:
                    self._break(f"its write of pages hangs, for {message.writing_s:.0f} s now")
            elif isinstance(message, (Hello, Refusal)):
                raise TransferFailed("it greeted twice")
            else:
                await self._take(message)

    async def _take(self, message: Written | Done | Failed | Stopped) -> None:
        fetching = self._open.get(message.ticket)
        if fetching is None:
            return
        match message:
            case Written() if fetching.lost_at is None:
                try:
                    wrong = await run_in_thread(self._compare, fetching, message)
                except TransferFailed as error:
                    wrong = error.message
                if wrong:
                    self.give_up(message.ticket, wrong)
            case Done() if fetching.lost_at is None:
                if fetching.num_bytes == fetching.fetch.num_bytes:
                    self._forget(message.ticket)
                    self._fetches.report(Arrived(message.ticket, message.first))
                else:
                    self.give_up(message.ticket, "the pages came incomplete")
            case Failed():
                if fetching.lost_at is None:
                    self._fetches.report(Lost(message.ticket, message.reason))
                self._release(message.ticket)
            case Stopped():
                self._release(message.ticket)

    def _compare(self, fetching: _Fetching, written: Written) -> str:
        """What is wrong with spans that were written; empty for nothing."""
        begin, size = fetching.fetch.begin, fetching.fetch.num_bytes
        if any(start < 0 or length < 0 or start + length > size for start, length in written.spans):
            return "the peer wrote outside of the lease"
        if self._fetches.checksums.compute(self._fetches.region, begin, written.spans) != written.checksums:
            return "the pages came damaged: a checksum is wrong"
        fetching.num_bytes += sum(length for _, length in written.spans)
        return ""

    def _ask(self, fetch: Fetch) -> None:
        assert self._line is not None
        self._line.send(Want(fetch.ticket, fetch.spec.room, fetch.prompt, fetch.begin, fetch.num_bytes))

    def _break(self, reason: str) -> None:
        self._is_broken = True
        self._fetches.note_broken(self, reason)
        for ticket in list(self._open):
            self.give_up(ticket, f"{self.name}: {reason}")

    def _forget(self, ticket: int) -> None:
        del self._open[ticket]
        self._fetches.forget(ticket)

    def _release(self, ticket: int) -> None:
        self._forget(ticket)
        self._fetches.report(Released(ticket))
