"""The two ends of the line between client and engine process: ipc sockets that carry messages of base/messages.

The client binds in a private folder, the engine connects. Refuses: deciding anything about the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zmq

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.messages import FromEngine, ToEngine, decode_from_engine, decode_to_engine, encode

IPC = "ipc://"
LENGTH = struct.Struct("<I")
MAX_LAUNCH_BYTES = 1 << 20
MAX_ADDRESS = 100
"""A unix socket's path has room for about 107 bytes."""

MAX_BATCH = 16
"""Messages that a client takes in one turn of its loop at most, so that everybody else has theirs."""

LAST_WORDS_MS = 1000
"""How long a closing engine waits for its last messages to leave."""


class Launch(msgspec.Struct, frozen=True):
    """What an engine process reads from its standard input. The pipe then stays open: its end is the parent's death."""

    config: EngineConfig
    requests_address: str
    outputs_address: str

    @property
    def folder(self) -> Path:
        """The private folder of the sockets."""
        return Path(self.requests_address.removeprefix(IPC)).parent

    def write(self, pipe: BinaryIO) -> None:
        """Send to the new process: four bytes of length, then msgpack."""
        payload = msgspec.msgpack.encode(self)
        pipe.write(LENGTH.pack(len(payload)) + payload)
        pipe.flush()

    @classmethod
    def read(cls, pipe: BinaryIO) -> Launch:
        """Read what `write` sent; raises `ConfigError` when it is something else."""
        header = pipe.read(LENGTH.size)
        length = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else 0
        if not 0 < length <= MAX_LAUNCH_BYTES:
            raise ConfigError("the engine process is started by the supervisor; its configuration comes through stdin")
        return msgspec.msgpack.decode(pipe.read(length), type=cls)


class EngineChannel:
    """The engine's end; blocking, no event loop."""

    def __init__(self, launch: Launch):
        self._context = zmq.Context()
        self._requests = self._connect(zmq.PULL, launch.requests_address)
        self._outputs = self._connect(zmq.PUSH, launch.outputs_address)

    def _connect(self, kind: int, address: str) -> zmq.Socket:
        connected = self._context.socket(kind)
        connected.set_hwm(0)
        connected.connect(address)
        return connected

    def receive(self, wait_ms: int, *, at_most: int) -> list[ToEngine]:
        """Messages that are there, up to ``at_most``; waits ``wait_ms`` for the first one (0: not at all)."""
        messages: list[ToEngine] = []
        if wait_ms and not self._requests.poll(wait_ms):
            return messages
        while len(messages) < at_most:
            try:
                messages.append(decode_to_engine(self._requests.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def send(self, message: FromEngine) -> None:
        """Hand a message to the line; never waits for the reader."""
        self._outputs.send(encode(message))

    def close(self) -> None:
        """Let the last messages leave, then close."""
        self._requests.close(linger=0)
        self._outputs.close(linger=LAST_WORDS_MS)
        self._context.term()


class ClientChannel:
    """The client's end, one per life of the engine process, so that no message outlives it. Belongs to the event loop it is
    made in. (pyzmq's own asyncio sockets cost several times as much a message.)"""

    def __init__(self, folder: Path, life: int):
        self.requests_address = f"{IPC}{folder}/{life}-requests"
        self.outputs_address = f"{IPC}{folder}/{life}-outputs"
        if len(self.requests_address) > MAX_ADDRESS:
            raise ConfigError(f"the temporary folder's path is too long for a socket: {folder}; set TMPDIR to a shorter one")
        self._context = zmq.Context()
        self._requests = self._bind(zmq.PUSH, self.requests_address)
        self._outputs = self._bind(zmq.PULL, self.outputs_address)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._news_fd = self._outputs.fileno()
        self._loop.add_reader(self._news_fd, self._news.set)

    def _bind(self, kind: int, address: str) -> zmq.Socket:
        bound = self._context.socket(kind)
        bound.set_hwm(0)
        bound.bind(address)
        return bound

    def send(self, message: ToEngine) -> None:
        """Hand a message to the line without waiting; raises `EngineUnavailable` when no engine is connected."""
        try:
            self._requests.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineUnavailable(f"the engine is not connected: {error}", retry_after=1.0) from error

    async def receive(self) -> list[FromEngine]:
        """The next messages, at least one."""
        messages: list[FromEngine] = []
        while not messages:
            await self._news.wait()
            self._news.clear()  # before looking: the descriptor tells of each change once
            with contextlib.suppress(zmq.Again):
                while len(messages) < MAX_BATCH:
                    messages.append(decode_from_engine(self._outputs.recv(zmq.NOBLOCK)))
                self._news.set()  # there may be more
        return messages

    async def drain(self, wait_s: float = 0.05) -> AsyncIterator[FromEngine]:
        """What a dead engine had still sent: messages until none comes for ``wait_s``."""
        with contextlib.suppress(TimeoutError):
            while True:
                for message in await asyncio.wait_for(self.receive(), wait_s):
                    yield message

    def close(self) -> None:
        """Drop the line and whatever is in it."""
        self._loop.remove_reader(self._news_fd)
        self._requests.close(linger=0)
        self._outputs.close(linger=0)
        self._context.term()
