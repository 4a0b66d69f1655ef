"""`RemoteHost`: the workers of another machine, through the agent there. `Listener`: where agents connect.

Refuses: choosing hosts, see `headrace.service.ranks.nodes`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, EngineUnavailable, HeadraceError
from headrace.base.messages import Place
from headrace.service.framing import READ_BYTES, Frames, frame
from headrace.service.ranks.heartbeats import BEAT_S, START_SILENCE_S, Silence
from headrace.service.ranks.ring import WRITE_TIMEOUT_S
from headrace.service.ranks.wire import (
    Beat,
    Beats,
    Begin,
    End,
    Ended,
    Forward,
    FromAgent,
    Hello,
    Kill,
    Prepared,
    Started,
    ToAgent,
    Unable,
    admit,
    decode_from_agent,
)
from headrace.service.transport import prepare_line

logger = logging.getLogger(__name__)

MOST_GREETINGS = 64
"""Connections that are being checked; further ones wait."""
POLL_MS = 50
DISMISS_S = 0.5


@dataclass(frozen=True)
class Arrival:
    """A connection that was accepted. ``address``: that under which the agent knows this machine."""

    hello: Hello
    line: socket.socket
    peer: str
    address: str


class Listener:
    """Accepts connections of agents, each checked on a thread of its own by ``check``, which raises `ConfigError`.
    Raises `ConfigError` when it cannot listen."""

    def __init__(self, address: str, port: int, token: bytes, check: Callable[[Hello], None]):
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._token, self._check = token, check
        self._slots = threading.Semaphore(MOST_GREETINGS)
        self._is_closed = threading.Event()
        self._socket = _listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more; lines that nobody took are closed."""
        self._is_closed.set()
        self._thread.join()
        self._socket.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self.arrivals.get_nowait().line.close()

    def _accept(self) -> None:
        self._socket.settimeout(POLL_MS / 1e3)
        while not self._is_closed.is_set():
            if not self._slots.acquire(timeout=POLL_MS / 1e3):
                continue
            try:
                line, peer = self._socket.accept()
            except OSError:  # nobody came, or went away again
                self._slots.release()
                continue
            threading.Thread(target=self._greet, args=(line, peer[0]), name="agent-greeting", daemon=True).start()

    def _greet(self, line: socket.socket, peer: str) -> None:
        try:
            prepare_line(line)
            hello = admit(line, self._token, self._check)
            self.arrivals.put(Arrival(hello, line, peer, line.getsockname()[0]))
        except (HeadraceError, OSError) as error:
            logger.warning("a connection from %s is refused: %s", peer, error)
            line.close()
        finally:
            self._slots.release()


def _listen(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        for host in (address, ""):  # the address may be that of a proxy or of address translation before this host
            listening = socket.socket(family, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((host, port))
                listening.listen(MOST_GREETINGS)
                return listening
            except OSError:
                listening.close()
                if not host:
                    raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address} port {port}: {error.strerror or error}; give host 0's own address as "
            "--master-addr, and a free --master-port", param="master_port"
        ) from error
    raise AssertionError("the second address raises")


class RemoteWorker:
    """A `WorkerHandle` of a worker on another machine."""

    def __init__(self, rank: int, place: Place, host: RemoteHost):
        self.rank, self.place = rank, place
        self.line = socket.socket()  # until its own comes
        self.beats, self.pid = 0, 0
        self.code: int | None = None
        self.has_line = False
        self._host = host

    @property
    def name(self) -> str:
        """See `WorkerHandle`."""
        return f"rank {self.rank} (pid {self.pid} on {self._host.name})"

    def is_alive(self) -> bool:
        """See `WorkerHandle`."""
        return self.code is None and not self._host.is_lost

    def kill(self) -> None:
        """See `WorkerHandle`."""
        if self.is_alive():
            self._host.tell(Kill(self.rank))

    def wait(self, wait_s: float) -> int | None:
        """See `WorkerHandle`; None as well when the host is lost."""
        deadline = time.monotonic() + wait_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_MS / 1e3)
        return self.code


class RemoteHost:
    """See `headrace.service.ranks.launch.Host`."""

    def __init__(self, name: str, arrival: Arrival, config: EngineConfig, places: dict[int, Place]):
        self.name, self.config, self.address = name, config, arrival.address
        self.session = secrets.token_hex(16)
        self.workers = [RemoteWorker(rank, place, self) for rank, place in places.items()]
        self.is_lost = self._was_used = False
        self.failure: HeadraceError | None = None
        self._line, self._lock = arrival.line, threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"agent-{name}", daemon=True)

    def begin(self, builder: str, fingerprint: str) -> None:
        """Have it start its workers."""
        places = {worker.rank: worker.place for worker in self.workers}
        self.tell(Begin(self.session, places, builder, self.config, fingerprint))
        self._thread.start()

    def attach(self, rank: int, line: socket.socket) -> None:
        """Take the line of a worker."""
        worker = next((worker for worker in self.workers if worker.rank == rank and not worker.has_line), None)
        if worker is None:
            line.close()
            return
        worker.line.close()
        worker.line, worker.has_line = line, True

    @property
    def has_started(self) -> bool:
        """Whether all its workers run."""
        return all(worker.has_line and worker.pid for worker in self.workers)

    def send(self, message: bytes, check: Callable[[], None], timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """See `Host`."""
        self._was_used = True
        with self._lock:
            self._write(frame(Forward(message)), check, timeout_s)

    def tell(self, message: ToAgent) -> None:
        """Send a message; a lost host does not get it."""
        with self._lock, contextlib.suppress(EngineUnavailable):
            self._write(frame(message), lambda: None, WRITE_TIMEOUT_S)

    def dismiss(self) -> None:
        """Tell it that no engine will follow. From a signal handler too: gives up soon if it cannot write."""
        if self._lock.acquire(timeout=DISMISS_S):
            try:
                self._write(frame(End(is_final=True)), lambda: None, DISMISS_S)
            except EngineUnavailable as error:
                logger.warning("%s", error)
            finally:
                self._lock.release()

    def close(self) -> None:
        """See `Host`. An engine that was in use has ended for good."""
        self.tell(End(is_final=self._was_used))
        self.is_lost = True
        if self._thread.is_alive():
            self._thread.join()
        self._line.close()
        for worker in self.workers:
            worker.line.close()

    def _write(self, data: bytes, check: Callable[[], None], timeout_s: float) -> None:
        rest, deadline, poll = memoryview(data), 0.0, select.poll()
        poll.register(self._line, select.POLLOUT)
        while rest and not self.is_lost:
            try:
                rest = rest[self._line.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                check()
                deadline = deadline or time.monotonic() + timeout_s
                if time.monotonic() > deadline:
                    raise EngineUnavailable(f"{self.name} has read no command for {timeout_s:.0f} seconds") from None
                poll.poll(POLL_MS)
            except OSError:
                self.is_lost = True

    def _listen(self) -> None:
        """Read what the agent sends and send it a sign of life, until the line is closed or nothing comes for long."""
        frames, poll = Frames(decode_from_agent), select.poll()
        poll.register(self._line, select.POLLIN)
        silence, num_bytes, beat_at = Silence(BEAT_S, START_SILENCE_S), 0, 0.0
        while not self.is_lost:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self.tell(Beat())
                if silence.note(num_bytes):
                    logger.warning("%s gives no sign of life", self.name)
                    self.is_lost = True
                    return
            if not poll.poll(POLL_MS):
                continue
            try:
                data = self._line.recv(READ_BYTES)
            except OSError:
                data = b""
            num_bytes += len(data)
            for message in frames.feed(data):
                self._take(message)
            if not data:
                self.is_lost = True

    def _take(self, message: FromAgent) -> None:
        workers = {worker.rank: worker for worker in self.workers}
        match message:
            case Prepared(model, threads):
                own = replace(self.config.device, threads=threads or self.config.device.threads)
                self.config = replace(self.config, model=replace(self.config.model, model=model), device=own)
            case Started(rank, pid):
                workers[rank].pid = pid
            case Beats(counts):
                for rank, count in counts.items():
                    workers[rank].beats = count
            case Ended(rank, code):
                workers[rank].code = code
            case Unable(error):
                self.failure = error.to_error()
