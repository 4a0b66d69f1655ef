"""`serve_pairs`: prefill and decode servers on this host, and the router before them: ``headrace serve --disaggregate
1:1``. Owns the servers' processes, which end with this one; one that ends or hangs is started again.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.base import env
from headrace.base.config import ServeConfig, all_options, flatten
from headrace.base.errors import ConfigError
from headrace.base.kv_events import shift_endpoint
from headrace.base.option import options_of
from headrace.base.server_config import AccessConfig, OperationsConfig, ServerConfig
from headrace.base.spawn import PR_SET_PDEATHSIG, module_environment
from headrace.service.supervisor import LEAST_STALL_S
from headrace.serving.http_client import loop_factory
from headrace.serving.router.options import RouterOptions, WorkerOptions
from headrace.serving.router.server import RouterServer

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RESTART_PAUSE_S = 1.0
WINDOW_S = 600.0
WATCH_S = 0.5
END_S = 10.0
"""How long a server has to end in order."""
USER_ERROR = 2
"""The exit status of a command whose options are wrong."""
KEYS = frozenset({"api_key", "admin_api_key"})
NOT_PASSED = frozenset(info.name for info in options_of(AccessConfig, "")) - KEYS | {
    "disaggregate", "config", "drain_s", "kv_events_config"
}
"""Options of the router, which alone is reached from outside, and what each server has of its own. Keys are those of
all, as other users of this host reach the servers too."""


@dataclass
class _Role:
    """One server: its role, its command, its options, which it reads from its standard input, and its process."""

    name: str
    url: str
    command: list[str]
    options: dict[str, Any]
    index: int
    count: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        stated = {name: value for name, value in module_environment().items() if name not in env.OPTIONS}
        environment, parent = stated | env.one_device(self.index), os.getpid()
        with tempfile.TemporaryFile() as file:  # has no name, so that nothing stays if this process is killed
            file.write(json.dumps(self.options).encode())
            file.seek(0)
            self.process = subprocess.Popen(
                self.command, env=environment, stdin=file, start_new_session=True,
                preexec_fn=lambda: _settle(self.index, self.count, parent),
            )


class Routing(Protocol):
    """What the router knows of the servers."""

    @property
    def is_stopping(self) -> bool:
        """Whether the command is about to end."""

    def silent_s(self, url: str) -> float:
        """Seconds for which a server that can be reached has said nothing."""


def _settle(index: int, count: int, parent: int) -> None:
    """Called in the new process: have it end with the parent, and pin it to one of ``count`` parts of the cores."""
    if sys.platform == "linux":
        # SIGKILL, as a stopped process would take no other. Its engine ends with it as whenever a server is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it had died before
            os._exit(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= count:
            os.sched_setaffinity(0, cores[index * len(cores) // count : (index + 1) * len(cores) // count])


class PairServers:
    """The servers of a configuration."""

    def __init__(self, config: ServeConfig):
        self._max_restarts = config.server.max_restarts
        stall_s = config.server.stall_timeout_s
        self._most_silent_s = min(stall_s, LEAST_STALL_S) if stall_s else math.inf
        counts = config.engine.disaggregation.count_servers()
        total = sum(counts)
        _check_devices(config, total)
        self.roles: list[_Role] = []
        self._starts: dict[str, deque[float]] = {}
        ports = free_ports(total + counts[0])
        for index in range(total):
            mode = "prefill" if index < counts[0] else "decode"
            options = _shared_options(config, total) | _own_storage(config, mode, index, total) | {
                "host": LOOPBACK, "port": ports[index], "trusted_proxies": LOOPBACK, "disaggregation_mode": mode,
            }
            if mode == "prefill":
                options["disaggregation_bootstrap_port"] = ports[total + index]
            command = [sys.executable, "-P", "-m", "headrace", "serve", "--config", "/dev/stdin"]
            self.roles.append(_Role(mode, f"http://{LOOPBACK}:{ports[index]}", command, options, index, total))

    def urls(self, mode: str) -> list[str]:
        """URLs of the servers of a mode."""
        return [role.url for role in self.roles if role.name == mode]

    def start(self) -> None:
        """Start all."""
        for role in self.roles:
            self._start(role)

    async def watch(self, routing: Routing) -> None:
        """Start servers again that have ended, and end those that hang; raises `ConfigError` for one that ends too
        often, or never began."""
        while True:
            for role in self.roles:
                # a signal that ends this command may have come to the servers, too
                if role.process is not None and not routing.is_stopping:
                    await self._look_after(role, role.process, routing.silent_s(role.url))
            await asyncio.sleep(WATCH_S)

    async def _look_after(self, role: _Role, process: subprocess.Popen[bytes], silent_s: float) -> None:
        if process.poll() is None and silent_s >= self._most_silent_s:
            logger.error(
                "the %s server %s gave no sign of life for %g s and is killed", role.name, role.url, silent_s
            )
            process.kill()
            await asyncio.to_thread(process.wait)
        if process.poll() is not None:
            self._check_end(role, process.returncode)
            await asyncio.sleep(RESTART_PAUSE_S)
            try:
                self._start(role)
            except OSError as error:  # no descriptors, memory or processes now; tried again
                logger.warning("the %s server %s cannot be started: %s", role.name, role.url, error)

    def _check_end(self, role: _Role, status: int) -> None:
        starts = self._starts[role.url]
        recent = [start for start in starts if time.monotonic() - start < WINDOW_S]
        # Later than at first, a wrong option is one of the moment: another program has the port.
        if (status == USER_ERROR and len(starts) == 1) or len(recent) > self._max_restarts:
            raise ConfigError(
                f"the {role.name} server {role.url} ended with status {status}; its last lines say why",
                param="disaggregate"
            )
        logger.warning("the %s server %s has ended (status %d) and is started again", role.name, role.url, status)

    def close(self) -> None:
        """End all. Nothing runs there any more: the router's connections are closed."""
        running = [role.process for role in self.roles if role.process is not None and role.process.poll() is None]
        for process in running:
            process.terminate()
        limit = time.monotonic() + END_S
        for process in running:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, role: _Role) -> None:
        role.start()
        self._starts.setdefault(role.url, deque(maxlen=64)).append(time.monotonic())
        logger.info("%s server %s: process %d", role.name, role.url, role.process.pid if role.process else 0)


def _check_devices(config: ServeConfig, count: int) -> None:
    """Raise `ConfigError` where the user lets this process see too few GPUs for as many servers."""
    visible = env.visible_devices()
    if visible and len(visible) < count and flatten(config)["device"] != "cpu":
        raise ConfigError(
            f"{count} servers take a GPU each, and CUDA_VISIBLE_DEVICES names {len(visible)}; name more, or add "
            "--device cpu", param="disaggregate"
        )


def _shared_options(config: ServeConfig, count: int) -> dict[str, Any]:
    """The options of this command that its servers get: all but the router's, with an equal part of the memory."""
    values: Mapping[str, Any] = flatten(config)
    options = {
        info.name: values[info.name] for info in all_options()
        if info.name not in NOT_PASSED and values[info.name] != info.default
    }
    device = str(values["device"])
    if not device.startswith("cuda"):
        options["memory_fraction"] = max(0.01, values["memory_fraction"] / count)
    options["drain_s"] = values["drain_s"]
    return options


def _own_storage(config: ServeConfig, mode: str, index: int, count: int) -> dict[str, Any]:
    """What two servers cannot have in common: the folder of prefixes, a part of the whole each, and the addresses of KV
    events, which tell routers of prompts what prefill servers have."""
    cache, own = config.engine.cache, dict[str, Any]()
    if cache.disk_cache:
        own = {
            "disk_cache": str(Path(cache.disk_cache).absolute() / f"{mode}-{index}"),
            "disk_cache_gb": max(0.001, cache.disk_cache_gb / count),
        }
    if cache.kv_events is not None and mode == "prefill":
        stated = msgspec.to_builtins(cache.kv_events)
        stated |= {
            name: shift_endpoint(stated[name], index) for name in ("endpoint", "replay_endpoint") if stated[name]
        }
        own["kv_events_config"] = json.dumps(stated)
    return own


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    holders = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def router_options(server: ServerConfig, operations: OperationsConfig) -> RouterOptions:
    """The router's part of the options of ``headrace serve``."""
    access = {info.name: getattr(server, info.name) for info in options_of(AccessConfig, "")}
    return RouterOptions(
        **access, max_body_bytes=server.max_body_bytes, drain_s=server.drain_s,
        log_requests=operations.log_requests != "none"
    )


def serve_pairs(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises as `headrace.serving.router.server.serve_router` does, and when a server
    cannot start."""
    servers = PairServers(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            servers.start()
            runner.run(_route(config, servers))
        finally:
            servers.close()


async def _route(config: ServeConfig, servers: PairServers) -> None:
    workers = WorkerOptions(
        prefill=servers.urls("prefill"), decode=servers.urls("decode"), health_interval_s=1.0,
        worker_api_key=config.server.api_key
    )
    options = router_options(config.server, config.operations)
    # its servers are on their way: without them decode servers would compute the first prompts
    router = RouterServer([], options, workers, awaits_prefill=True)
    routing, watching = asyncio.ensure_future(router.run()), asyncio.ensure_future(servers.watch(router))
    done, _ = await asyncio.wait((routing, watching), return_when=asyncio.FIRST_COMPLETED)
    for task in {routing, watching} - done:
        task.cancel()
    await asyncio.gather(routing, watching, return_exceptions=True)
    for task in done:
        task.result()
