"""The channel between client and engine process: a Unix socket pair that carries the messages of base/messages, in the
frames of `framing`. The first message to the engine is its configuration.

Refuses: deciding anything about the messages. Sockets are read and written by the engine's own thread and the client's
event loop: a thread or task between would have to be woken for every step, on cores that the engine computes on.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.messages import EngineRequest, FromEngine, ToEngine, WithData, decode_from_engine, encode
from headrace.service.framing import LENGTH, READ_BYTES, Frames, RequestFrames, frame
from headrace.service.joining import join_messages

MAX_CONFIG_BYTES = 1 << 20
MAX_READS = 2
"""The most reads of media in a call, whose pages are touched for the first time."""
PIECE_BYTES = 1 << 17
"""Most bytes of media written at a time. Less than the socket's buffer: the event loop copies what does not fit."""

LAST_WORDS_S = 1.0
"""How long a closing engine waits until its last messages are written."""

decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
"""Made here, before there are threads: msgspec keeps what it knows of a type in the type, also while it is still
finding that out, and a second thread that decodes the same type then crashes the process."""

USER_TIMEOUT_MS = 10_000
"""How long sent bytes may stay unacknowledged: a host that lost its power is then given up."""


class EngineChannel:
    """The engine's end; blocking, no event loop. ``line`` is connected to a `ClientChannel`."""

    def __init__(self, line: socket.socket):
        self.is_open = True
        """Whether the other end may still be open."""
        self._line = line
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)
        self._frames = RequestFrames()
        # The lock guards the choice between a direct write and the queue, and whether a writer thread exists.
        self._lock = threading.Lock()
        self._overflow: deque[bytes] = deque()  # frames (the first may be the rest of one) that wait for the writer
        self._writer: threading.Thread | None = None

    def wake_on(self, descriptor: int) -> None:
        """End `receive`'s wait also when this descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)

    def read_config(self) -> EngineConfig | None:
        """Wait for the first message. None when the other end closes without sending anything, because the parent
        failed meanwhile. Raises `ConfigError` when what comes is no frame of a configuration."""
        # The length is bounded here, unlike in `Frames`: a process started by hand may have any socket as its input.
        header = self._line.recv(LENGTH.size, socket.MSG_WAITALL)
        if not header:
            return None
        length = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else 0
        payload = self._line.recv(length, socket.MSG_WAITALL) if length <= MAX_CONFIG_BYTES else b""
        if not length or len(payload) < length:
            raise ConfigError("the engine process is started by the supervisor, which sends it its configuration")
        return decode_config(payload)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """Messages that have arrived; waits at most ``wait_ms`` milliseconds for the first one (0: not at all)."""
        messages: list[ToEngine] = []
        if wait_ms and not self._poll.poll(wait_ms):
            return messages
        for _ in range(MAX_READS):
            if (room := self._frames.room) is not None:
                count = self._read_into(room[:READ_BYTES])
                messages += self._frames.advance(count)
                if not count:
                    break
                continue
            messages += self._frames.feed(self._take_bytes())
            if self._frames.room is None:
                break
        return messages

    def send(self, message: FromEngine) -> None:
        """Send without waiting for the reader. What does not fit the socket buffer is written by a thread, which ends
        when it is done: the step loop must never block on a slow client."""
        rest = frame(message)
        with self._lock:
            if not self._overflow:
                rest = self._write(rest)
            if rest:
                self._overflow.append(rest)
            if self._overflow and self._writer is None:
                self._writer = threading.Thread(target=self._write_overflow, name="engine-overflow", daemon=True)
                self._writer.start()

    def await_end(self, poll_s: float) -> bool:
        """Wait at most ``poll_s`` seconds for the other end to close; returns whether it has."""
        ended = select.poll()
        ended.register(self._line, 0)  # poll reports POLLHUP whatever the mask
        return bool(ended.poll(poll_s * 1e3))

    def flush(self) -> None:
        """Give the last messages time to leave. The socket closes with the process."""
        writer = self._writer
        if writer is not None:
            writer.join(LAST_WORDS_S)

    def _take_bytes(self) -> bytes:
        """Received bytes; empty when there are none, or the other end is closed (then ``is_open`` is False)."""
        try:
            data = self._line.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except ConnectionResetError:
            data = b""
        self.is_open = bool(data)
        return data

    def _read_into(self, room: memoryview) -> int:
        """As `_take_bytes`, but reads into ``room``; returns the number of bytes."""
        try:
            count = self._line.recv_into(room, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except ConnectionResetError:
            count = 0
        self.is_open = count > 0
        return count

    def _write(self, data: bytes) -> bytes:
        """Write what the socket buffer takes; returns the rest."""
        try:
            return data[self._line.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except (BrokenPipeError, ConnectionResetError):  # the client is gone; `receive` notices
            return b""

    def _write_overflow(self) -> None:
        while True:
            with self._lock:
                if not self._overflow:
                    self._writer = None
                    return
            # Only this thread removes, and only after writing: while a frame is being written the queue is not empty,
            # so `send` appends behind it and cannot overtake it. The lock is not held meanwhile: `sendall` may block.
            try:
                self._line.sendall(self._overflow[0])
            except OSError:  # the client is gone, or the line was closed
                self.is_open = False
            self._overflow.popleft()


def prepare_line(line: socket.socket) -> None:
    """Send small messages at once, and give up a peer that does not acknowledge them."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def engine_line() -> socket.socket:
    """The socket that this process was started with, as its standard input; raises `ConfigError` when there is none."""
    # The duplicate is not inheritable and /dev/null takes its place: a child process (a kernel compiler) that kept the
    # socket open would keep the client from seeing its end.
    try:
        line = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    except OSError as error:
        raise ConfigError(
            "the engine process is started by the supervisor, with a socket as its standard input"
        ) from error
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return line


class ClientChannel(asyncio.Protocol):
    """The client's end, one per engine process, so that no message outlives it. ``take`` is called in the event loop,
    in the callback that read the bytes. Outputs of several steps that were read at once arrive as one message, which
    makes a client that falls behind do less work per token."""

    def __init__(self, take: Callable[[FromEngine], None]):
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the other end is closed."""
        self.failure: asyncio.Future[Exception] = loop.create_future()
        """The exception of a message that could not be decoded or handled."""
        self._take = take
        self._frames = Frames(decode_from_engine)
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: deque[memoryview] = deque()  # media, and what was sent behind them
        self._is_paused = False

    @classmethod
    async def open(cls, line: socket.socket, take: Callable[[FromEngine], None]) -> ClientChannel:
        """Connect our end of the socket pair to the event loop."""
        line.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: cls(take), sock=line)
        return channel

    def send(self, message: ToEngine | EngineConfig) -> None:
        """Hand a message to the line without waiting; raises `EngineUnavailable` when no engine is at its end."""
        if self._transport is None or self._transport.is_closing():
            raise EngineUnavailable("the engine is not connected", retry_after=1.0)
        data: list[bytes] = []
        whole: ToEngine | EngineConfig | WithData = message
        if isinstance(message, EngineRequest) and message.media:
            whole, data = WithData.of(message)
        payload = encode(whole)
        head = LENGTH.pack(len(payload)) + payload
        if not data and not self._waiting:
            self._transport.write(head)
        else:
            self._waiting += [memoryview(part) for part in (head, *data) if len(part)]
            self._write_waiting()

    def close(self) -> None:
        """Close at once; unsent messages are lost."""
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # paused whenever the socket is full

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting and not self._is_paused and self._transport is not None:
            part = self._waiting.popleft()
            if len(part) > PIECE_BYTES:
                self._waiting.appendleft(part[PIECE_BYTES:])
            self._transport.write(part[:PIECE_BYTES])

    def data_received(self, data: bytes) -> None:
        # An exception from here (a message that cannot be decoded or handled) closes the transport; the event loop
        # passes it to `connection_lost`, which tells it from an ordinary end of the socket.
        for message in join_messages(self._frames.feed(data)):
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._waiting.clear()
        if error is not None and not isinstance(error, OSError):
            self.failure.set_result(error)
        self.ended.set_result(None)
