"""`serve`: the HTTP process. Owns the listening socket, signals, start-up beside the engine, the ready message, and the
orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.base.config import AccessConfig, ServeConfig
from headrace.base.errors import ConfigError, EngineGivenUp
from headrace.base.messages import MemoryLine, ModelFacts
from headrace.service.client.client import EngineClient
from headrace.service.client.replica import Supervision
from headrace.service.parsing.choice import check_names
from headrace.service.spawn import SpawnedEngine
from headrace.serving.http.app import create_app
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.transport.connection import BoundedHttp
from headrace.serving.http_client import loop_factory

if TYPE_CHECKING:
    from headrace.service.tokenization import Tokenizer

logger = logging.getLogger(__name__)


def format_bytes(num_bytes: int) -> str:
    """``1.50 GiB``."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.2f} {units[0]}"


def memory_table(lines: list[MemoryLine], device: str) -> Table:
    """The memory plan as a table."""
    table = Table(title=f"Memory on {device}", title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("note")
    for line in lines:
        table.add_row(line.name, format_bytes(line.num_bytes), line.note)
    return table


EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
    ),
    "complete": ("completions", {"prompt": "The capital of France is", "max_tokens": 32}),
    "complete ids": ("completions", {"prompt": [1, 2, 3], "max_tokens": 32}),
    "embed": ("embeddings", {"input": ["What is the capital of France?"]}),
    "classify": ("classify", {"input": ["The mill wheel turns."]}),
}


def curl_line(address: str, model: str, *, has_key: bool, task: str = "generate") -> str:
    """An example request to copy."""
    route, fields = EXAMPLES[task]
    body = json.dumps({"model": model, **fields})
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    return f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _example_task(facts: ModelFacts, tokenizer: Tokenizer | None) -> str:
    """The example that the model supports."""
    if facts.pooling is not None:
        return facts.pooling.kind
    return "complete ids" if tokenizer is None else "generate" if tokenizer.has_chat_template else "complete"


def announce_ready(
    console: Console, *, address: str, name: str, facts: ModelFacts, memory: list[MemoryLine], has_key: bool,
    tokenizer: Tokenizer | None,
) -> None:
    """Print the memory plan, the address and an example request. A closed standard output does not stop the server."""
    summary = f"{facts.num_parameters / 1e6:,.0f}M parameters, {facts.dtype}, context {facts.max_model_len:,}"
    if facts.num_kv_tokens:
        summary += f", room for {facts.num_kv_tokens:,} tokens"
    task = _example_task(facts, tokenizer)
    try:
        # Captured first: characters that the output's encoding lacks are then replaced; printing them would raise.
        with console.capture() as captured:
            console.print(memory_table(memory, facts.device))
            console.print(f"[bold]{escape(name)}[/] is ready: {summary}", highlight=False, soft_wrap=True)
            console.print(
                f"[bold]{address}[/]  chat page, OpenAI API under {address}/v1, all routes in {address}/docs",
                highlight=False, soft_wrap=True
            )
            console.print(
                curl_line(address, name, has_key=has_key, task=task), highlight=False, markup=False, soft_wrap=True
            )
        console.file.write(captured.get().encode(console.encoding, "replace").decode(console.encoding))
        console.file.flush()
    except OSError as error:  # a pipe without a reader, or a full disk
        logger.warning("ready on %s; the standard output cannot be written to: %s", address, error)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), console.file.fileno())  # buffered output must not fail again at exit


SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_S = 75  # longer than that of usual load balancers, which must not reuse a connection while it closes
LAST_WORDS_S = 5  # for the last events of streams after the drain
POLL_S = 0.05


def serve(config: ServeConfig, *, engines: Sequence[SpawnedEngine] = ()) -> None:
    """Serve until SIGTERM or SIGINT; returns after an orderly shutdown. Raises `HeadraceError` when the server cannot
    start or all engines have crashed too often, `SystemExit` after a second signal. ``engines``: processes that the
    caller has already spawned."""
    check_names(config.server.tool_parser, config.server.reasoning_parser)
    client = EngineClient(
        config.engine, chat_template=read_template(config.server.chat_template),
        supervision=Supervision(config.server.max_restarts, config.server.stall_timeout_s), engines=engines,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(HttpServer(config, client).run())


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


def read_template(path: str | None) -> str | None:
    """The Jinja text that replaces the model's chat template."""
    try:
        return Path(path).read_text(encoding="utf-8") if path is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path}: {error}", param="chat_template") from error


class SignalFreeServer(uvicorn.Server):
    """Installs no signal handlers: uvicorn's would stop serving at the first signal, before requests are drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One server from start to shutdown. Owns the uvicorn server, the signal handlers and ``client``, which it
    starts and closes."""

    def __init__(self, config: ServeConfig, client: EngineClient, *, console: Console | None = None):
        self._config = config.server
        self._client = client
        self._console = console or Console()
        app = create_app(self._client, self._config, config.operations)
        self._context: AppContext = app.state.context
        self._context.is_open = False
        self._uvicorn = SignalFreeServer(uvicorn.Config(
            # `lifespan` off: the client is started and closed here. Own log configuration and access log
            # (`RequestLedger`), own choice of proxies to believe (`create_app`).
            app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        ))
        self._drain: asyncio.Task[None] | None = None
        self._is_forced = False

    async def run(self) -> None:
        """Serve until `stop`. /health responds at once, all other routes when the engine is ready."""
        loop = asyncio.get_running_loop()
        with open_listener(self._config) as listener:
            address = address_of(listener)
            for number in SIGNALS:
                loop.add_signal_handler(number, self.stop)
            # Both at once: health checks get an answer while the model loads.
            serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
            starting = asyncio.create_task(self._start_client(address))
            try:
                await self._watch(serving, starting)
            finally:
                # Closing the client fails the running requests, so their streams end; uvicorn's shutdown waits for open
                # responses, `LAST_WORDS_S` at most.
                starting.cancel()
                self._uvicorn.should_exit = True
                await self._client.close()
                await asyncio.gather(serving, starting, return_exceptions=True)  # their errors were raised by _watch
                await asyncio.to_thread(self._context.close)  # flushes to disk and network
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
        if self._is_forced:
            raise SystemExit(1)

    def stop(self) -> None:
        """The first call drains; the second stops at once."""
        if self._drain is None:
            self._context.is_draining = True
            self._drain = asyncio.create_task(self._drain_requests())
            return
        self._is_forced = True
        self._drain.cancel()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _drain_requests(self) -> None:
        running, drain_s = self._context.running, self._config.drain_s
        logger.info(
            "shutting down: %d requests running, with %g s to finish; signal again to stop at once",
            len(running), drain_s
        )
        with contextlib.suppress(TimeoutError):  # after the deadline, closing the client fails what still runs
            async with asyncio.timeout(drain_s):
                while running:
                    await asyncio.sleep(POLL_S)
        await self._client.close()
        self._uvicorn.should_exit = True

    async def _start_client(self, address: str) -> None:
        logger.info("listening on %s; loading the model", address)
        await self._client.start()
        await self._client.wait_ready()
        gc.freeze()  # what was imported stays: a collection that looked at it would stop all streams for longer
        self._context.is_open = True
        facts = self._context.facts()
        announce_ready(
            self._console, address=address + self._config.root_path, name=self._context.model_name, facts=facts,
            memory=self._client.memory,
            has_key=self._config.api_key is not None, tokenizer=self._client.tokenizer,
        )

    async def _watch(self, serving: asyncio.Task[None], starting: asyncio.Task[None]) -> None:
        """Return when ``serving`` has ended. Raises the error of a failed start, and `EngineGivenUp` when the
        engine has stopped for good; after `stop` neither is checked."""
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        # The client's state has no event to wait for, so it is polled.
        while not serving.done():
            if self._drain is None:
                if starting.done():
                    starting.result()  # raises if the model could not be loaded
                if self._context.is_open and self._client.state == "stopped":
                    raise EngineGivenUp("the engine crashed too often and is not restarted; see its log")
            await asyncio.wait({serving}, timeout=POLL_S * 5)
        serving.result()
