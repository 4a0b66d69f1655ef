"""`serve_router`: the router's process, with its workers and what discovers them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.serving.http.listening import ListeningServer, address_of, open_listener
from headrace.serving.http.transport.connection import ClientConnection
from headrace.serving.http_client import loop_factory
from headrace.serving.router.app import Router
from headrace.serving.router.discovery import split_name, watch_file, watch_name
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.front import RouterFront
from headrace.serving.router.options import RouterOptions, WorkerOptions


def serve_router(urls: Sequence[str], options: RouterOptions, workers: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT; returns after an orderly shutdown. Raises `ConfigError` when the router cannot
    start, `SystemExit` after a second signal."""
    if bool(workers.prefill) != bool(workers.decode):
        given, lacking = ("prefill", "decode") if workers.prefill else ("decode", "prefill")
        raise ConfigError(f"--{given} needs --{lacking}: a server of each mode at least", param=lacking)
    if not (urls or workers.decode or workers.workers_file or workers.workers_dns):
        raise ConfigError(
            "the router needs workers: headrace router http://HOST:PORT ..., --prefill URL --decode URL, "
            "--workers-file, or --workers-dns",
            param="workers_file"
        )
    if workers.workers_file is not None and not Path(workers.workers_file).is_file():
        raise ConfigError(f"workers_file {workers.workers_file} is no file", param="workers_file")
    if workers.workers_dns is not None:
        split_name(workers.workers_dns)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(RouterServer(urls, options, workers).run())


def create_server(router: Router, options: RouterOptions) -> ListeningServer:
    """The server of a router, with the gates before it."""
    return ListeningServer(RouterFront(router, options), router, options.drain_s, protocol=ClientConnection)


class RouterServer:
    """One router from start to shutdown. ``awaits_prefill``: see `Router`."""

    def __init__(
        self, urls: Sequence[str], options: RouterOptions, workers: WorkerOptions, *, awaits_prefill: bool = False
    ):
        self._urls, self._options, self._workers = urls, options, workers
        # Prefixes are in the caches of prefill workers; decode workers get the pages whatever they have.
        self._prefill = Fleet(workers, options.policy, is_prefill=True) if workers.prefill else None
        self._fleet = Fleet(workers, options.policy if self._prefill is None else "least-loaded")
        self._router = Router(self._fleet, options, self._prefill, awaits_prefill=awaits_prefill)
        self._server = create_server(self._router, options)

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has come."""
        return self._server.is_stopping

    def silent_s(self, url: str) -> float:
        """Seconds for which a worker has left health checks without an answer."""
        return next((worker.silent_s for worker in self._router.all_workers() if worker.url == url), 0.0)

    async def run(self) -> None:
        """Serve until a signal."""
        loop = asyncio.get_running_loop()
        for url in (*self._urls, *(self._workers.decode or ())):
            self._fleet.add(url)
        if self._prefill is not None:
            for url in self._workers.prefill or ():
                self._prefill.add(url)
        with open_listener(self._options) as listener, self._server.handling_signals():
            watches = self._watch_workers(loop)
            address = address_of(listener)
            Console().print(
                f"[bold]{address}[/]  routes to {self._count_workers()} ({self._options.policy}); "
                f"state: {address}/ready, metrics: {address}/metrics",
                highlight=False, soft_wrap=True
            )
            gc.freeze()  # what was imported stays: collections that looked at it would take a sixth of the time
            try:
                await self._server.run(listener)
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
                await self._fleet.close()
                if self._prefill is not None:
                    await self._prefill.close()
        if self._server.is_forced:
            raise SystemExit(1)

    def _count_workers(self) -> str:
        if self._prefill is not None:
            return f"{len(self._prefill)} prefill and {len(self._fleet)} decode workers"
        return f"{len(self._fleet) or 'no'} workers"

    def _watch_workers(self, loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[None]]:
        watches = []
        if self._workers.workers_file is not None:
            watches.append(loop.create_task(watch_file(Path(self._workers.workers_file), self._fleet)))
        if self._workers.workers_dns is not None:
            watches.append(loop.create_task(watch_name(self._workers.workers_dns, self._fleet)))
        return watches
