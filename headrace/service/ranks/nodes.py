"""`NodeLauncher`: ranks on several hosts, in order; each other host runs an agent that connects here."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from headrace.base import VERSION
from headrace.base.config import EngineConfig, flatten
from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.messages import Place
from headrace.service.ending import EXIT
from headrace.service.executor import Progress
from headrace.service.ranks.launch import Host, LocalHost
from headrace.service.ranks.remote import Arrival, Listener, RemoteHost
from headrace.service.ranks.wire import Hello, find_fingerprint, read_token
from headrace.service.ranks.worker import RANK_BUILDER

logger = logging.getLogger(__name__)

POLL_S = 0.05
REPORT_S = 10.0
OWN = frozenset({"model", "tokenizer", "threads", "node_rank", "node_token_file", "master_addr"})
"""Options that may differ between hosts; a model is compared by its files."""
MOST_SHOWN = 5


def shared_options(config: EngineConfig) -> dict[str, Any]:
    """The options that have to be the same on all hosts."""
    values: dict[str, Any] = msgspec.to_builtins(flatten(config))
    return {name: value for name, value in values.items() if name not in OWN}


def ranks_per_node(size: int, nnodes: int) -> int:
    """How many of ``size`` ranks each host has; raises `ConfigError` where they do not go evenly."""
    if size % nnodes:
        raise ConfigError(
            f"{size} ranks cannot be divided evenly among {nnodes} hosts; choose tensor_parallel_size times "
            "pipeline_parallel_size as a multiple of nnodes", param="nnodes"
        )
    return size // nnodes


def check_hello(hello: Hello, config: EngineConfig) -> None:
    """Raise `ConfigError` for a host that cannot take part."""
    nnodes, node = config.nodes.nnodes, hello.node
    if hello.version != VERSION:
        raise ConfigError(f"host {node} has Headrace {hello.version}, and host 0 has {VERSION}; install the same")
    if hello.options is None:
        return
    expected = shared_options(config)
    others = [
        f"{name} is {hello.options.get(name)!r} there and {expected.get(name)!r} on host 0"
        for name in sorted(expected.keys() | hello.options.keys()) if expected.get(name) != hello.options.get(name)
    ]
    if others:
        more = f", and {len(others) - MOST_SHOWN} more" if len(others) > MOST_SHOWN else ""
        raise ConfigError(
            f"host {node} was started with other options: {', '.join(others[:MOST_SHOWN])}{more}; give all hosts the "
            "same"
        )
    if not 0 < node < nnodes:
        raise ConfigError(f"host {node} is none of 1 to {nnodes - 1}", param="node_rank")


class HostAssembly:
    """Makes hosts of the connections of ``count`` agents. ``make`` gets an arrival and returns its host, begun.
    ``check`` is called from time to time and may raise. ``drops``: a host that is lost while others are waited for is
    waited for again; else that is an error. Closes the hosts unless all have come."""

    def __init__(
        self, listener: Listener, count: int, make: Callable[[Arrival], RemoteHost], progress: Progress, *,
        drops: bool, check: Callable[[], None] = lambda: None
    ):
        self.hosts: dict[int, RemoteHost] = {}
        self._listener, self._count, self._make, self._progress = listener, count, make, progress
        self._drops, self._check = drops, check

    def wait(self) -> list[RemoteHost]:
        """Wait until the workers of all hosts run."""
        EXIT.on_stop = self.dismiss
        with ExitStack() as undo:
            undo.callback(self._close)
            report_at, waited = time.monotonic(), ""
            while not self._is_complete():
                self._check()
                try:
                    self._take(self._listener.arrivals.get(timeout=POLL_S))
                except queue.Empty:
                    self._sort_out()
                waits_for = self._describe()
                if waits_for != waited:
                    self._progress(waits_for, 0.0)
                if waits_for != waited or time.monotonic() >= report_at:
                    waited, report_at = waits_for, time.monotonic() + REPORT_S
                    logger.info("%s", waits_for)
            undo.pop_all()
        return [self.hosts[node] for node in sorted(self.hosts)]

    def _is_complete(self) -> bool:
        return len(self.hosts) == self._count and all(host.has_started for host in self.hosts.values())

    def _take(self, arrival: Arrival) -> None:
        hello = arrival.hello
        if not hello.session:
            former = self.hosts.get(hello.node)
            if former is not None:  # it lost its connection, and is back before that was noticed here
                former.close()
            self.hosts[hello.node] = self._make(arrival)
            return
        for host in self.hosts.values():
            if host.session == hello.session:
                host.attach(hello.rank, arrival.line)
                return
        arrival.line.close()

    def _sort_out(self) -> None:
        for node, host in list(self.hosts.items()):
            if host.failure is not None and not self._drops:
                raise host.failure
            if host.failure is not None or host.is_lost:
                reason = host.failure or EngineUnavailable("its agent has gone")
                if not self._drops:
                    raise EngineUnavailable(f"{host.name} was lost while it started: {reason}")
                logger.warning("%s cannot take part: %s", host.name, reason)
                host.close()
                del self.hosts[node]

    def _describe(self) -> str:
        starting = [host.name for host in self.hosts.values() if not host.has_started]
        missing = self._count - len(self.hosts)
        known = [str(node) for node in range(1, 1 + self._count) if node not in self.hosts]
        waits = [f"host {', '.join(known[:MOST_SHOWN])}{' and others' if missing > MOST_SHOWN else ''}"] * bool(missing)
        return f"waiting for {'; '.join([*waits, *starting])} to start workers" if waits or starting else "meeting"

    def dismiss(self) -> None:
        """Tell the hosts that no engine will follow."""
        for host in list(self.hosts.values()):
            host.dismiss()

    def _close(self) -> None:
        for host in self.hosts.values():
            host.close()


class NodeLauncher:
    """Ranks of host 0 are children of this process; replica d listens at the d-th port from ``master_port`` on."""

    def __init__(self, config: EngineConfig, size: int, progress: Progress, builder: str = RANK_BUILDER):
        nodes = config.nodes
        if nodes.node_rank:
            raise ConfigError(
                f"host {nodes.node_rank} only has ranks of host 0's engine; run on it: headrace serve MODEL, with the "
                f"same options and --node-rank {nodes.node_rank}", param="node_rank"
            )
        self._per_node = ranks_per_node(size, nodes.nnodes)
        self._first = config.replica * self._per_node
        self._count = config.parallel.data_parallel_size * self._per_node
        self._progress, self._builder = progress, builder
        self.place = Place(self._first, self._count)

    def launch(self, config: EngineConfig, size: int) -> list[Host]:
        """See `headrace.service.ranks.launch.Launcher`; waits for the other hosts."""
        nodes = config.nodes
        token, fingerprint = read_token(nodes.node_token_file or ""), find_fingerprint(config)

        def make(arrival: Arrival) -> RemoteHost:
            node = arrival.hello.node
            name = f"host {node}, {arrival.peer}"
            host = RemoteHost(name, arrival, config, self._places(node))
            logger.info("%s is here", name)
            host.begin(self._builder, fingerprint)
            return host

        with ExitStack() as undo:
            hosts: list[Host] = []
            if self._per_node > 1:
                hosts.append(LocalHost(config, self._places(0), self._builder))
                undo.callback(hosts[0].close)
            listener = Listener(
                nodes.master_addr, nodes.master_port + config.replica, token, lambda hello: check_hello(hello, config)
            )
            try:
                hosts += HostAssembly(listener, nodes.nnodes - 1, make, self._progress, drops=True).wait()
            finally:
                listener.close()
            undo.pop_all()
        return hosts

    def _places(self, node: int) -> dict[int, Place]:
        first = node * self._per_node
        return {
            first + index: Place(self._first + index, self._count) for index in range(self._per_node) if first + index
        }
