"""Both sides of transfer agents over a network that delays, drops, doubles, damages and refuses writes, and breaks
connections: what arrives is right, every lease comes back once, and nothing is written to one that is another's."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.base.errors import TransferFailed
from headrace.base.sampling import TransferSpec
from headrace.base.transfer import (
    Arrived,
    Cancel,
    Completed,
    Fetch,
    Filled,
    FirstTokens,
    FromAgent,
    Hello,
    Lost,
    Offer,
    PeerFacts,
    Released,
)
from headrace.memory.transfer.contract import Copy, Region
from headrace.service.transfer import fetching, offering, wire
from headrace.service.transfer.fetching import Fetches
from headrace.service.transfer.leases import Leases
from headrace.service.transfer.offering import Offers

HELLO = Hello(PeerFacts("m", 16, []), 1, "other", b"")
REGION_BYTES, MOST_BYTES, NUM_ROOMS = 16_000, 5_000, 40
RESET = struct.pack("ii", 1, 0)


@dataclass
class Room:
    """A prompt's pages: ``begin`` in the region that they leave, ``place`` in that to which they come."""

    begin: int
    place: int
    data: np.ndarray
    leaves: bool = True  # its agent may read it
    comes: bool = True  # its agent may have it written
    may_be_released: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    """Two engines, their agents and the network. Tickets number rooms, on both sides."""

    def __init__(self, seed: int):
        self.draw, self.rooms = random.Random(seed), dict[int, Room]()
        self.source, self.target = Region.create(REGION_BYTES), Region.create(REGION_BYTES)
        self.leaving, self.coming = Leases(REGION_BYTES), Leases(REGION_BYTES)
        self.wrong, self.outcomes = list[str](), Counter[str]()
        self.writers: list[asyncio.StreamWriter] = []
        backend = SimpleNamespace(connect=lambda handle: self, close=lambda: None)
        self.offers = Offers(HELLO, self.source, cast(Any, backend), self.on_prefill, lambda: 0.0, lease_s=0.3)
        self.fetches = Fetches(HELLO, self.target, self.on_decode)

    # -- the network, on threads ----------------------------------------------------------------------------------

    def write(self, copies: list[Copy]) -> None:
        for copy in copies:
            time.sleep(0.004 * self.draw.random() ** 3)
            self.check(copy)
            fault = self.draw.choice(["refuse", "drop", "damage", "double", *[""] * 40])
            if fault == "refuse":
                raise TransferFailed("refused")
            if fault == "drop":
                continue
            here = self.source.data[copy.begin : copy.begin + copy.num_bytes]
            self.target.data[copy.target : copy.target + copy.num_bytes] = here
            if fault == "damage":
                self.target.data[copy.target] ^= 4
            if fault == "double":
                time.sleep(0.002)
                self.check(copy)
                self.target.data[copy.target : copy.target + copy.num_bytes] = here

    def check(self, copy: Copy) -> None:
        """That a write is from a lease to the one that waits for it."""
        for room in list(self.rooms.values()):
            if room.leaves and room.comes and 0 <= copy.begin - room.begin <= len(room.data) - copy.num_bytes:
                if copy.target - room.place != copy.begin - room.begin:
                    self.wrong.append(f"{copy} goes elsewhere")
                return
        self.wrong.append(f"{copy} is written after its end")

    def close(self) -> None:
        pass

    # -- the engines ----------------------------------------------------------------------------------------------

    def on_prefill(self, message: FromAgent) -> None:
        assert isinstance(message, Released)
        room = self.rooms[message.ticket]
        if not room.leaves:
            self.wrong.append(f"{message} comes twice")
        room.leaves = False
        self.leaving.release(message.ticket)
        self.end(message.ticket)

    def on_decode(self, message: FromAgent) -> None:
        assert isinstance(message, (Arrived, Lost, Released))
        self.outcomes[type(message).__name__] += 1
        room = self.rooms[message.ticket]
        if not room.comes:
            self.wrong.append(f"{message} comes after its end")
        if isinstance(message, Lost):
            room.may_be_released = True
            return
        if room.may_be_released != isinstance(message, Released):
            self.wrong.append(f"{message} is not the end of this room")
        if isinstance(message, Arrived):
            found = self.target.data[room.place : room.place + len(room.data)]
            if message.first.token_ids != [message.ticket] or not (found == room.data).all():
                self.wrong.append(f"room {message.ticket} arrived, and is another")
        room.comes = False
        self.coming.release(message.ticket)
        self.end(message.ticket)

    def end(self, ticket: int) -> None:
        room = self.rooms[ticket]
        if not room.leaves and not room.comes:
            del self.rooms[ticket]
            room.ended.set()

    async def pause(self) -> None:
        await asyncio.sleep(0.02 * self.draw.random() ** 2)

    async def acquire(self, leases: Leases, ticket: int, num_bytes: int) -> int:
        while (begin := leases.acquire(ticket, num_bytes)) is None:
            await asyncio.sleep(0.001)
        return begin

    async def live(self, ticket: int, port: int) -> None:
        """One request, on both sides."""
        draw, size = self.draw, self.draw.randint(1, MOST_BYTES)
        data = np.frombuffer(draw.randbytes(size), dtype=np.uint8)
        begin = await self.acquire(self.leaving, ticket, size)
        room = Room(begin, await self.acquire(self.coming, ticket, size), data)
        self.rooms[ticket], name = room, str(ticket)
        self.source.data[begin : begin + size] = data

        async def prefill() -> None:
            await self.pause()
            self.offers.take(Offer(ticket, name, b"p", begin, size))
            cuts = [0, *sorted(draw.randrange(size + 1) for _ in range(draw.randint(0, 3))), size]
            for start, stop in pairwise(cuts):
                await self.pause()
                self.offers.take(Filled(ticket, [(start, stop - start)]))
            fails = draw.random() < 0.1
            self.offers.take(Cancel(ticket, "it failed") if fails else Completed(ticket, FirstTokens([ticket])))

        async def decode() -> None:
            await self.pause()
            self.fetches.fetch(Fetch(ticket, TransferSpec(name, "127.0.0.1", port), b"p", room.place, size))
            if draw.random() < 0.2:
                await self.pause()
                if room.comes:
                    room.may_be_released = True
                    self.fetches.cancel(ticket)

        await asyncio.gather(prefill(), decode(), room.ended.wait())

    # -- connections ----------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await self.offers.serve(reader, writer)

    async def break_lines(self) -> None:
        while True:
            await asyncio.sleep(0.15 * self.draw.random())
            writer = self.writers[-1] if self.writers else None
            if writer is not None and not writer.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()


@pytest.mark.parametrize("seed", range(3))
async def test_leases_come_back_once_and_nothing_is_written_to_others(seed: int, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("FENCE_S", 0.01), ("BREAK_S", 0.0), ("DRAIN_S", 0.0)):
        monkeypatch.setattr(fetching, name, value)
    for module in (wire, offering):
        monkeypatch.setattr(module, "PIECE_BYTES", 600)
    monkeypatch.setattr(offering, "WRITE_BYTES", 1200)
    world = World(seed)
    server = await asyncio.start_server(world.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    breaking = asyncio.create_task(world.break_lines())
    async with asyncio.timeout(40):
        await asyncio.gather(*(world.live(ticket, port) for ticket in range(NUM_ROOMS)))
    breaking.cancel()
    assert not world.wrong
    assert world.leaving.num_taken_bytes == world.coming.num_taken_bytes == 0
    assert world.outcomes["Arrived"] and world.outcomes["Lost"], "both happened"
    assert world.outcomes["Arrived"] + world.outcomes["Released"] == NUM_ROOMS
    server.close()
    world.source.close()
    world.target.close()
