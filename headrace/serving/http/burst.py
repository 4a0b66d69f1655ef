"""`BurstWriter`: writes of one turn of an event loop, as one.

A system call for every few bytes wakes their reader each time, and code of the system and our own throw one another out
of the caches when they take turns.
"""

from __future__ import annotations

import asyncio
from typing import Any


class BurstWriter:
    """Stands before a transport. What is written is held until the loop's next turn: then this transport's pieces go
    out together, and those of others right before and behind. Everything but writing is the transport's."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Take bytes; never waits."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        """Send what is held, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._held.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._held and not self.is_closing():
            self._transport.write(b"".join(self._held))
        self._held.clear()
