"""`serve_router`: the router's process: listening socket, discovery, signals, orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.serving.http.server import (
    KEEP_ALIVE_S,
    LAST_WORDS_S,
    POLL_S,
    SIGNALS,
    SignalFreeServer,
    address_of,
    open_listener,
)
from headrace.serving.http.transport.connection import BoundedHttp
from headrace.serving.http_client import loop_factory
from headrace.serving.router.app import Router, create_app
from headrace.serving.router.discovery import split_name, watch_file, watch_name
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.options import RouterOptions, WorkerOptions

logger = logging.getLogger(__name__)


def serve_router(urls: Sequence[str], options: RouterOptions, workers: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT; returns after an orderly shutdown. Raises `ConfigError` when the router cannot
    start, `SystemExit` after a second signal."""
    if not (urls or workers.workers_file or workers.workers_dns):
        raise ConfigError(
            "the router needs workers: headrace router http://HOST:PORT ..., --workers-file, or --workers-dns",
            param="workers_file"
        )
    if workers.workers_file is not None and not Path(workers.workers_file).is_file():
        raise ConfigError(f"workers_file {workers.workers_file} is no file", param="workers_file")
    if workers.workers_dns is not None:
        split_name(workers.workers_dns)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(RouterServer(urls, options, workers).run())


class RouterServer:
    """One router from start to shutdown."""

    def __init__(self, urls: Sequence[str], options: RouterOptions, workers: WorkerOptions):
        self._urls, self._options, self._workers = urls, options, workers
        self._fleet = Fleet(workers, options.policy)
        self._router = Router(self._fleet, options)
        self._router_app = create_app(self._router, options)
        self._uvicorn = SignalFreeServer(uvicorn.Config(
            self._router_app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, log_level="warning",
            access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        ))
        self._drain: asyncio.Task[None] | None = None
        self._is_forced = False

    async def run(self) -> None:
        """Serve until `stop`."""
        loop = asyncio.get_running_loop()
        for url in self._urls:
            self._fleet.add(url)
        with open_listener(self._options) as listener:
            for number in SIGNALS:
                loop.add_signal_handler(number, self.stop)
            watches = self._watch_workers(loop)
            serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
            address = address_of(listener)
            Console().print(
                f"[bold]{address}[/]  routes to {len(self._fleet) or 'no'} workers ({self._options.policy}); "
                f"state: {address}/ready, metrics: {address}/metrics",
                highlight=False, soft_wrap=True
            )
            try:
                await serving
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
                await self._fleet.close()
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
        if self._is_forced:
            raise SystemExit(1)

    def stop(self) -> None:
        """The first call drains; the second stops at once."""
        if self._drain is None:
            self._router.is_draining = True
            self._drain = asyncio.create_task(self._drain_requests())
            return
        self._is_forced = True
        self._drain.cancel()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _drain_requests(self) -> None:
        logger.info(
            "shutting down: %d requests running, with %g s to finish; signal again to stop at once",
            self._router.num_running, self._options.drain_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                while self._router.num_running:
                    await asyncio.sleep(POLL_S)
        for worker in self._fleet:
            worker.give_up()
        self._uvicorn.should_exit = True

    def _watch_workers(self, loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[None]]:
        watches = []
        if self._workers.workers_file is not None:
            watches.append(loop.create_task(watch_file(Path(self._workers.workers_file), self._fleet)))
        if self._workers.workers_dns is not None:
            watches.append(loop.create_task(watch_name(self._workers.workers_dns, self._fleet)))
        return watches
