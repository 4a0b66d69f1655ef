"""`NodeAgent`: on a host that is not that of rank 0, starts workers when an engine wants them, passes its commands on,
and tells it of heartbeats and ends. Torch-free.

Refuses: carrying out commands, which it does not read. When it loses rank 0 its workers end.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, EngineUnavailable, HeadraceError, ModelError
from headrace.base.messages import ErrorInfo
from headrace.base.spawn import start_process
from headrace.service.framing import READ_BYTES, Frames, frame
from headrace.service.ranks.heartbeats import BEAT_S, Silence
from headrace.service.ranks.launch import Children
from headrace.service.ranks.nodes import shared_options
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
    Unable,
    decode_to_agent,
    find_fingerprint,
    greet,
    read_token,
)
from headrace.service.ranks.worker import WORKER_MODULE
from headrace.service.transport import prepare_line

logger = logging.getLogger(__name__)

JOIN_S = 600.0
"""How long an engine is waited for, at the start and after the last one was lost."""
CONNECT_S = 5.0
PAUSE_S = 0.5
ALIVE_S = 1.0
REPORT_S = 30.0


def find_model(own: EngineConfig | None, begin: Begin) -> str:
    """The name under which this host has the model: that of its own command line, or rank 0's. Raises `ConfigError`
    where its files are others, and what keeps the model from being found."""
    names = [begin.config.model.model] if own is None else [own.model.model, begin.config.model.model]
    problem: HeadraceError | None = None
    for name in dict.fromkeys(names):
        try:
            named = replace(begin.config, model=replace(begin.config.model, model=name))
            if find_fingerprint(named) == begin.fingerprint:
                return name
        except ModelError as error:
            problem = problem or error
    raise problem or ConfigError(
        f"the model {names[0]} on this host is another than {begin.config.model.model} on host 0: its config.json or "
        "its weight files differ; copy them again", param="model"
    )


class Session:
    """One life of an engine, over an accepted connection. ``own``: the configuration of this host, if it has one."""

    def __init__(self, line: socket.socket, token: bytes, node: int, own: EngineConfig | None):
        self.was_used = False
        self._line, self._token, self._node, self._own = line, token, node, own
        self._address = line.getpeername()[:2]
        self._frames = Frames(decode_to_agent)
        self._silence, self._num_bytes = Silence(BEAT_S), 0
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self._resources = ExitStack()
        self._children: Children | None = None
        self._ranks: list[int] = []
        self._ended: set[int] = set()

    def run(self) -> End | None:
        """Until the engine ends or is lost (None). Raises the typed error of what keeps this host from taking
        part."""
        poll, looked_at = select.poll(), 0.0
        poll.register(self._line, select.POLLIN)
        threading.Thread(target=self._beat, name="agent-beat", daemon=True).start()
        with self._resources:
            self._resources.callback(self._has_ended.set)
            while True:
                if poll.poll(BEAT_S * 1e3):
                    data = self._line.recv(READ_BYTES)
                    self._num_bytes += len(data)
                    for message in self._frames.feed(data):
                        if isinstance(message, End):
                            return message
                        self._take(message)
                    if not data:
                        return None
                if time.monotonic() - looked_at >= BEAT_S:
                    looked_at = time.monotonic()
                    self._look()

    def _look(self) -> None:
        """Tell how the workers are; raises `ConnectionError` when rank 0 gives no sign of life."""
        if self._silence.note(self._num_bytes):
            raise ConnectionError("rank 0 gives no sign of life")
        if self._children is None:
            return
        children = self._children
        self._send(Beats({rank: children.beats(index) for index, rank in enumerate(self._ranks)}))
        for rank, process in zip(self._ranks, children.processes, strict=True):
            code = process.poll()
            if code is not None and rank not in self._ended:
                self._ended.add(rank)
                self._send(Ended(rank, code))

    def _take(self, message: Begin | Forward | Beat | Kill) -> None:
        match message:
            case Begin():
                try:
                    self._begin(message)
                except HeadraceError as error:
                    self._send(Unable(ErrorInfo.of(error)))
                    raise
            case Forward(command):
                self.was_used = True
                assert self._children is not None
                self._children.ring.write(command, self._check)
            case Kill(rank):
                assert self._children is not None
                self._children.processes[self._ranks.index(rank)].kill()

    def _check(self) -> None:
        """While a worker does not read commands."""
        assert self._children is not None
        if any(process.poll() is not None for process in self._children.processes):
            self._look()
            raise ConnectionError("a worker has ended")
        if select.select([self._line], [], [], 0)[0] and not self._line.recv(1, socket.MSG_PEEK):
            raise ConnectionError("rank 0 is gone")

    def _begin(self, begin: Begin) -> None:
        model = find_model(self._own, begin)
        self._send(Prepared(model, self._own.device.threads if self._own else None))
        self._ranks = list(begin.places)
        self._children = children = Children(len(self._ranks), restarts=False)
        self._resources.callback(children.close)
        for rank in self._ranks:

            def start(
                arguments: Sequence[str], descriptors: Sequence[int], rank: int = rank
            ) -> tuple[subprocess.Popen[bytes], int]:
                # its standard input is its connection to rank 0, which thereby sees its end at once
                with connect(self._address, self._token, self._node, session=begin.session, rank=rank) as line:
                    process = start_process(WORKER_MODULE, arguments, line, descriptors)
                return process, process.pid

            pid = children.start(start, begin.builder)
            self._send(Started(rank, pid))
            logger.info("rank %d runs in process %d", rank, pid)

    def _beat(self) -> None:
        """Give signs of life, also while the model is looked for."""
        with contextlib.suppress(OSError):  # `run` notices
            while not self._has_ended.wait(ALIVE_S):
                self._send(Beats({}))

    def _send(self, message: FromAgent) -> None:
        with self._lock:
            self._line.sendall(frame(message))


def connect(address: tuple[str, int], token: bytes, node: int, **hello: Any) -> socket.socket:
    """A connection that rank 0 has accepted; ``hello``: further fields of `Hello`. Raises `OSError`, and the typed
    error of a refusal."""
    with ExitStack() as undo:
        line = undo.enter_context(socket.create_connection(address, timeout=CONNECT_S))
        prepare_line(line)
        greet(line, token, lambda nonce, proof: Hello(nonce, proof, node, **hello))
        undo.pop_all()
        return line


class NodeAgent:
    """Takes part in one engine after the other, as it is restarted, until one ends of its own accord."""

    def __init__(self, config: EngineConfig, *, join_s: float = JOIN_S):
        nodes = config.nodes
        self._config, self._join_s = config, join_s
        self._token = read_token(nodes.node_token_file or "")
        self._address = nodes.master_addr, nodes.master_port + config.replica
        self._has_served = False

    def run(self) -> None:
        """Raises the typed error of what keeps this host from taking part, and `EngineUnavailable` when the engine
        could not start or does not come."""
        while True:
            line = self._join()
            with line:
                session = Session(line, self._token, self._config.nodes.node_rank, self._config)
                end = None
                try:
                    end = session.run()
                except OSError as error:
                    logger.warning("the connection to rank 0 is lost: %s", error)
            if end is not None and end.is_final:
                logger.info("the engine has ended")
                return
            if end is not None and not self._has_served:
                raise EngineUnavailable("the engine could not start; the log of host 0 says why")
            self._has_served |= session.was_used
            logger.info("rank 0 is lost; its engine is waited for")

    def _join(self) -> socket.socket:
        """Wait for an engine, and connect to it."""
        name = f"{self._address[0]} port {self._address[1]}"
        began, report_at = time.monotonic(), 0.0
        while True:
            try:
                line = connect(
                    self._address, self._token, self._config.nodes.node_rank, options=shared_options(self._config)
                )
                logger.info("connected to rank 0 at %s", name)
                return line
            except (OSError, EngineUnavailable) as error:
                waited = time.monotonic() - began
                if waited >= self._join_s:
                    raise EngineUnavailable(
                        f"no engine at {name} for {waited:.0f} s ({error}); start host 0, and check --master-addr and "
                        "--master-port"
                    ) from error
                if waited >= report_at:
                    report_at = waited + REPORT_S
                    logger.info("waiting for rank 0 at %s: %s", name, error)
            time.sleep(PAUSE_S)


def run_agents(config: EngineConfig) -> None:
    """An agent for each replica, until all engines have ended; raises what one raises."""
    count = config.parallel.data_parallel_size
    if count == 1:
        NodeAgent(config).run()
        return
    ends: queue.SimpleQueue[HeadraceError | None] = queue.SimpleQueue()

    def run(replica: int) -> None:
        try:
            NodeAgent(replace(config, replica=replica)).run()
            ends.put(None)
        except HeadraceError as error:
            ends.put(error)

    for replica in range(count):
        threading.Thread(target=run, args=(replica,), name=f"agent-{replica}", daemon=True).start()
    for _ in range(count):
        if (error := ends.get()) is not None:
            raise error
