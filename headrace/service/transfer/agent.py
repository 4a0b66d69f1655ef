"""The transfer agent: ``python -m headrace.service.transfer.agent``, started by an engine with a socket as its standard
input. It exchanges pages with agents of other engines, and may die without harm to its engine; it ends with it.

Refuses: torch, and deciding which pages go where.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base import env
from headrace.base.errors import HeadraceError, TransferFailed
from headrace.base.spawn import continue_when_orphaned
from headrace.base.transfer import (
    AgentOptions,
    Alive,
    Cancel,
    Fetch,
    FromAgent,
    Hello,
    Listening,
    ToAgent,
    decode_to_agent,
)
from headrace.memory.transfer.contract import AnyRegion, Region, create_backend
from headrace.memory.transfer.device_region import DeviceRegion
from headrace.service.ending import ProcessWatch, leave
from headrace.service.framing import Frames, frame
from headrace.service.transfer.fetching import Fetches
from headrace.service.transfer.offering import Offers
from headrace.service.transfer.wire import BEAT_S
from headrace.service.transport import engine_line

logger = logging.getLogger(__name__)

BIND_S = 5.0
"""How long the port of an agent that has just ended may stay in use."""


class EngineLine(asyncio.Protocol):
    """The line to the engine; when it ends, this process does."""

    def __init__(self, take: Callable[[ToAgent], None]):
        self._take = take
        self._frames: Frames[ToAgent] = Frames(decode_to_agent)
        self._transport: Any = None

    def send(self, message: FromAgent) -> None:
        """Send without waiting."""
        self._transport.write(frame(message))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        leave(0)


class Agent:
    """Joins the engine's line with both sides of transfers."""

    def __init__(self, options: AgentOptions, region: AnyRegion):
        self._options = options
        backend = create_backend(options.backend, region)
        name = options.backend.partition("?")[0]
        self._hello = Hello(options.facts, options.epoch, name, backend.handle())
        self._watch = ProcessWatch(os.getppid())
        self._line = EngineLine(self._take)
        self._offers = Offers(
            self._hello, region, backend, self._line.send, self._watch.silent_s, lease_s=options.lease_s
        )
        self._fetches = Fetches(self._hello, region, self._line.send)

    async def run(self, line: socket.socket) -> None:
        """Serve until the engine is gone. Ends the process when its region must be given up, or that of a peer."""
        loop = asyncio.get_running_loop()
        line.setblocking(False)
        await loop.create_unix_connection(lambda: self._line, sock=line)
        port = await self._listen() if self._options.host else 0
        self._line.send(Listening(port))
        while True:
            self._line.send(Alive())
            self._watch.silent_s()
            try:
                self._offers.check_writes()
                self._fetches.check_held()
            except TransferFailed as error:
                logger.error("%s", error)
                leave(1)  # at once: threads may never return
            await asyncio.sleep(BEAT_S)

    async def _listen(self) -> int:
        limit = time.monotonic() + BIND_S
        while True:
            try:
                server = await asyncio.start_server(
                    self._offers.serve, self._options.host, self._options.port, reuse_address=True
                )
                return int(server.sockets[0].getsockname()[1])
            except OSError:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(0.1)

    def _take(self, message: ToAgent) -> None:
        self._watch.note()
        if isinstance(message, Fetch):
            self._fetches.fetch(message)
            return
        if isinstance(message, Cancel):
            self._fetches.cancel(message.ticket)
        self._offers.take(message)


def open_region(options: AgentOptions) -> AnyRegion:
    """The engine's region, by its descriptor; raises `OSError` or `TransferFailed`."""
    if options.device < 0:
        return Region(options.descriptor, options.num_bytes)
    return DeviceRegion.open(options.descriptor, options.num_bytes, options.device)


def main(argv: list[str] | None = None) -> int:
    """Serve until the engine ends; returns the exit code."""
    parser = argparse.ArgumentParser(prog="headrace.service.transfer.agent", description=__doc__)
    parser.add_argument("options", help="AgentOptions as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=env.log_level().upper(), format="%(asctime)s %(levelname)s transfer agent: %(message)s"
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when this ends
        signal.signal(number, signal.SIG_IGN)
    continue_when_orphaned()
    try:
        options = msgspec.json.decode(arguments.options, type=AgentOptions)
        agent = Agent(options, open_region(options))
        asyncio.run(agent.run(engine_line()))
    except (HeadraceError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
