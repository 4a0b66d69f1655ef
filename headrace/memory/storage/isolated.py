"""`IsolatedStore`: a remote store in a process of its own. A store that crashes, hangs or leaks costs misses, never the
engine. Bytes pass through memory that both processes map; the process is `headrace.memory.storage.child`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.spawn import start_process
from headrace.memory.storage import PAGE_STORES, StoreOptions
from headrace.memory.transfer.contract import Region

logger = logging.getLogger(__name__)

CHILD_MODULE = "headrace.memory.storage.child"
NUM_SLOTS = 6
"""Calls at a time: one for each thread of the storage lane."""
SLOT_BYTES = 64 << 20
"""Of a call's pages; memory is committed where it was written. A page that is larger is not stored."""
START_TIMEOUT_S, CALL_TIMEOUT_S, END_TIMEOUT_S = 30.0, 40.0, 2.0
RESTART_S = 10.0
"""Between two starts of a store that keeps failing."""


class Call(msgspec.Struct, array_like=True, frozen=True):
    """One call of a store. ``verb``: exists, get or put; ``sizes``: bytes of each page, which are one behind the other
    in the slot's memory, or nothing for ``exists``."""

    verb: str
    names: list[str]
    sizes: list[int] = []


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What it returned, or the error it raised. ``is_config``: a `ConfigError`."""

    has: list[bool] = []
    error: str = ""
    is_config: bool = False


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """What the process makes its store with: see `headrace.base.registry.Entry` for the first three. ``memory``,
    ``lines``: descriptors that it inherits."""

    name: str
    target: str
    is_out_of_tree: bool
    place: int
    num_places: int
    config: dict[str, Any]
    memory: int
    slot_bytes: int
    lines: list[int]


class StoreDied(RuntimeError):
    """The store's process ended or hung; pages are computed until another one has started."""


class _Life:
    """One run of the process: its memory, its line that says when it is ready, and a line for each slot. Raises
    `OSError` and `ConfigError`."""

    def __init__(self, name: str, options: StoreOptions, slot_bytes: int):
        self.is_ready = self.is_over = False
        self._ending = threading.Lock()  # taken for ever by who ends it
        entry = PAGE_STORES.entry(name)
        with contextlib.ExitStack() as undo:
            self.region = Region.create(NUM_SLOTS * slot_bytes)
            undo.callback(self.region.close)
            pairs = [socket.socketpair() for _ in range(NUM_SLOTS + 1)]
            for ours, _ in pairs:  # names of a long prompt are more than the buffer of a process that is stopped
                for limited in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    ours.setsockopt(socket.SOL_SOCKET, limited, _as_timeval(CALL_TIMEOUT_S))
            self._lines = [Connection(ours.detach()) for ours, _ in pairs]
            with contextlib.ExitStack() as closing:
                first, *others = [closing.enter_context(its) for _, its in pairs]
                descriptors = [end.fileno() for end in others]
                self.process: subprocess.Popen[bytes] = start_process(
                    CHILD_MODULE, [], first, [*descriptors, self.region.descriptor]
                )
            undo.pop_all()
        setup = Setup(
            name, entry.target, entry.is_out_of_tree, options.place, options.num_places, options.config,
            self.region.descriptor, slot_bytes, descriptors
        )
        try:
            self._lines[0].send_bytes(msgspec.msgpack.encode(setup))
        except OSError:  # it has ended already
            self.end(0.0)
            raise

    def await_ready(self, timeout_s: float) -> Answer:
        """What the process says when its store is made; raises `StoreDied`."""
        try:
            line = self._find_line(0)
            if not line.poll(timeout_s):
                raise StoreDied(f"it did not start within {timeout_s:g} s")
            answer = msgspec.msgpack.decode(line.recv_bytes(), type=Answer)
        except (EOFError, OSError) as error:
            raise StoreDied("its process ended while it started") from error
        self.is_ready = not answer.error
        return answer

    def call(self, slot: int, call: Call) -> list[bool]:
        """Raises `StoreDied`, after which this life is over, or `RuntimeError` with what the store raised."""
        try:
            line = self._find_line(1 + slot)
            line.send_bytes(msgspec.msgpack.encode(call))
            if not line.poll(CALL_TIMEOUT_S):
                raise StoreDied(f"it did not answer within {CALL_TIMEOUT_S:g} s")
            answer = msgspec.msgpack.decode(line.recv_bytes(), type=Answer)
        except BlockingIOError as error:
            raise StoreDied(f"it took no call, or no whole answer came, within {CALL_TIMEOUT_S:g} s") from error
        except (EOFError, OSError) as error:
            raise StoreDied("its process ended") from error
        if answer.error:
            raise RuntimeError(answer.error)
        if len(answer.has) != len(call.names):
            raise RuntimeError(f"it answered for {len(answer.has)} of {len(call.names)} pages")
        return answer.has

    def _find_line(self, number: int) -> Connection:
        lines = self._lines
        if not lines:
            raise StoreDied("its process was ended")
        return lines[number]

    def end(self, timeout_s: float) -> None:
        """Tell the process to end, and kill it when it has not in time; once. A call that is under way fails."""
        self.is_over = True
        if not self._ending.acquire(blocking=False):
            return
        # Shut down and not closed: a thread that is in a call would go on with whatever file gets the same number. Each
        # is closed when nobody refers to it any more.
        lines, self._lines = self._lines, []
        for line in lines:
            _shut_down(line)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.process.kill()
        self.process.wait()
        self.region.close()


def _as_timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _shut_down(line: Connection) -> None:
    """Both sides see its end; the descriptor stays open."""
    end = socket.socket(fileno=line.fileno())
    with contextlib.suppress(OSError):  # the process has closed its side
        end.shutdown(socket.SHUT_RDWR)
    end.detach()


class IsolatedStore:
    """See `PageStore`: the store ``name``, which is in the registry. Raises `ConfigError` when it cannot be made. When
    its process has ended, another one is started beside the calls, which fail until then."""

    def __init__(self, name: str, options: StoreOptions, slot_bytes: int = SLOT_BYTES):
        self._name, self._options, self._slot_bytes = name, options, slot_bytes
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(NUM_SLOTS):
            self._slots.put(slot)
        self._mutex = threading.Lock()
        self._is_closed = False
        self._began_at = time.monotonic()
        try:
            self._life = _Life(name, options, slot_bytes)
        except OSError as error:
            raise ConfigError(f"remote_cache {name!r} cannot start: {error}", param="remote_cache") from error
        try:
            answer = self._life.await_ready(START_TIMEOUT_S)
        except StoreDied as error:
            self._life.end(0.0)
            raise ConfigError(
                f"remote_cache {name!r}: {error}: is what remote_cache_config names reachable? Its messages are above",
                param="remote_cache"
            ) from error
        if answer.error:
            self._life.end(END_TIMEOUT_S)
            raise ConfigError(
                answer.error if answer.is_config else f"remote_cache {name!r} cannot start: {answer.error}",
                param="remote_cache"
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._life.process.pid

    def exists(self, names: list[str]) -> list[bool]:
        """See `PageStore`."""
        return self._call(Call("exists", names), [])

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        return self._pass("get", names, buffers)

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        return self._pass("put", names, buffers)

    def close(self) -> None:
        """See `PageStore`."""
        with self._mutex:
            self._is_closed = True
        self._life.end(END_TIMEOUT_S)

    def _pass(self, verb: str, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """In calls whose pages fit into a slot."""
        has = [False] * len(names)
        batch: list[int] = []
        size = 0
        for index, buffer in enumerate(buffers):
            if len(buffer) > self._slot_bytes:
                continue
            if size + len(buffer) > self._slot_bytes:
                self._pass_batch(verb, names, buffers, batch, has)
                batch, size = [], 0
            batch.append(index)
            size += len(buffer)
        if batch:
            self._pass_batch(verb, names, buffers, batch, has)
        return has

    def _pass_batch(
        self, verb: str, names: list[str], buffers: list[memoryview], batch: list[int], has: list[bool]
    ) -> None:
        pages = [buffers[index] for index in batch]
        done = self._call(Call(verb, [names[index] for index in batch], [len(page) for page in pages]), pages)
        for index, is_done in zip(batch, done, strict=True):
            has[index] = is_done

    def _call(self, call: Call, pages: list[memoryview]) -> list[bool]:
        life = self._find_life()
        slot = self._slots.get(timeout=CALL_TIMEOUT_S)
        try:
            begin, parts = slot * self._slot_bytes, []
            for page in pages:
                parts.append(life.region.data[begin : begin + len(page)])
                begin += len(page)
            if call.verb == "put":
                for part, page in zip(parts, pages, strict=True):
                    part[:] = np.frombuffer(page, dtype=np.uint8)
            has = life.call(slot, call)
            if call.verb == "get":
                for part, page, is_there in zip(parts, pages, has, strict=True):
                    if is_there:
                        page[:] = part.data
            return has
        except StoreDied as error:
            self._give_up(life, error)
            raise
        finally:
            self._slots.put(slot)

    def _find_life(self) -> _Life:
        """The present one; starts the next when the last is over. Raises `StoreDied` while none is ready."""
        with self._mutex:
            life = self._life
            if life.is_over and not self._is_closed and time.monotonic() - self._began_at > RESTART_S:
                self._began_at = time.monotonic()
                life = self._life = _Life(self._name, self._options, self._slot_bytes)
                threading.Thread(target=self._await, args=(life,), name="store-start", daemon=True).start()
        if not life.is_ready or life.is_over:
            raise StoreDied(f"remote store {self._name!r} is down")
        return life

    def _await(self, life: _Life) -> None:
        try:
            answer = life.await_ready(START_TIMEOUT_S)
        except StoreDied as error:
            self._give_up(life, error)
            return
        if answer.error:
            self._give_up(life, StoreDied(answer.error))
        else:
            logger.info("remote store %r is up again", self._name)

    def _give_up(self, life: _Life, error: StoreDied) -> None:
        with self._mutex:
            if life.is_over or self._is_closed:
                return
            life.is_over = True
        logger.warning("remote store %r: %s; another process is started in %g s", self._name, error, RESTART_S)
        life.end(0.0)
