"""What processes that serve HTTP share: the listening socket, uvicorn with our limits, signals, orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn

from headrace.base.errors import ConfigError
from headrace.base.server_config import AccessConfig
from headrace.serving.http.transport.asgi import AppConnection

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS_S = 5  # for the last events of streams after the drain
POLL_S = 0.05


def open_listener(server: AccessConfig) -> socket.socket:
    """The listening socket; raises `ConfigError` when the address is not available. ``::`` also accepts IPv4 where the
    system supports it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=is_dual)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno and not isinstance(error, socket.gaierror):
            reason = os.strerror(error.errno).lower()
        raise ConfigError(
            f"cannot listen on {server.host} port {server.port}: {reason}; choose another with --host and --port",
            param="port"
        ) from error


def address_of(listener: socket.socket) -> str:
    """The URL for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Installs no signal handlers: uvicorn's would stop serving at the first signal, before requests are drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Drained(Protocol):
    """The application behind a `ListeningServer`, whose requests are drained at shutdown."""

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""

    async def end_running(self) -> None:
        """Fail the requests that still run, so that their streams end."""


class ListeningServer:
    """uvicorn over an application. `stop`, which signals call, lets running requests end, for ``drain_s`` seconds at
    most; called again it ends the server at once. ``protocol`` is that of its connections, in uvicorn's terms."""

    def __init__(
        self, app: Any, behind: Drained, drain_s: float, *, protocol: type[asyncio.Protocol] = AppConnection
    ):
        self._behind, self._drain_s = behind, drain_s
        self._uvicorn = _Uvicorn(uvicorn.Config(
            # No lifespan events: what is behind is started and closed by its owner. Own log configuration and access
            # log (`RequestLedger`), own choice of proxies to believe.
            app, http=protocol, interface="asgi3", ws="none", lifespan="off", log_config=None, log_level="warning",
            access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=LAST_WORDS_S,
        ))
        self._drain: asyncio.Task[None] | None = None
        self.is_forced = False

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._drain is not None

    @property
    def is_started(self) -> bool:
        """Whether connections are accepted."""
        return self._uvicorn.started

    async def run(self, listener: socket.socket) -> None:
        """Serve until `end` is called, or what `stop` waits for is over."""
        await self._uvicorn.serve(sockets=[listener])

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """While the body runs, signals call `stop`."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """The first call drains; the second stops at once."""
        if self._drain is None:
            self._behind.begin_drain()
            self._drain = asyncio.create_task(self._drain_requests())
            return
        self.is_forced = True
        self._drain.cancel()
        self.end(at_once=True)

    def end(self, *, at_once: bool = False) -> None:
        """Accept no more connections and return from `run` when responses are complete, after `LAST_WORDS_S` at most;
        or ``at_once``."""
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit |= at_once

    async def _drain_requests(self) -> None:
        logger.info(
            "shutting down: %d requests running, with %g s to finish; signal again to stop at once",
            self._behind.num_running, self._drain_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._behind.num_running:
                    await asyncio.sleep(POLL_S)
        await self._behind.end_running()
        self.end()
