"""`serve`: the HTTP process of a model. Owns start-up beside the engine, the ready message, and the end of both."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.base.config import ServeConfig
from headrace.base.errors import ConfigError, EngineGivenUp
from headrace.base.messages import MemoryLine, ModelFacts
from headrace.service.client.client import EngineClient
from headrace.service.client.replica import Supervision
from headrace.service.parsing.choice import check_names
from headrace.service.spawn import SpawnedEngine
from headrace.serving.http.app import create_app
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.listening import POLL_S, ListeningServer, address_of, open_listener
from headrace.serving.http_client import loop_factory

if TYPE_CHECKING:
    from headrace.service.tokenization import Tokenizer

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long the event loop waits for the GIL while a thread decodes a large body or renders a long chat. Python's own
5 ms, which each turn of the loop would take then, are many times a decode step."""


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
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    if task == "transcribe":
        return f"curl {address}/v1/audio/transcriptions{key} -F file=@clip.mp3"
    route, fields = EXAMPLES[task]
    body = json.dumps({"model": model, **fields})
    return f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _example_task(facts: ModelFacts, tokenizer: Tokenizer | None) -> str:
    """The example that the model supports."""
    if facts.pooling is not None:
        return facts.pooling.kind
    if facts.media is not None and facts.media.speech is not None:
        return "transcribe"
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


def serve(config: ServeConfig, *, engines: Sequence[SpawnedEngine] = ()) -> None:
    """Serve until SIGTERM or SIGINT; returns after an orderly shutdown. Raises `HeadraceError` when the server cannot
    start or all engines have crashed too often, `SystemExit` after a second signal. ``engines``: processes that the
    caller has already spawned."""
    check_names(config.server.tool_parser, config.server.reasoning_parser)
    sys.setswitchinterval(SWITCH_S)
    client = EngineClient(
        config.engine, chat_template=read_template(config.server.chat_template),
        supervision=Supervision(config.server.max_restarts, config.server.stall_timeout_s), engines=engines,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(HttpServer(config, client).run())


def read_template(path: str | None) -> str | None:
    """The Jinja text that replaces the model's chat template."""
    try:
        return Path(path).read_text(encoding="utf-8") if path is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path}: {error}", param="chat_template") from error


class HttpServer:
    """One server from start to shutdown. Owns the listening server and ``client``, which it starts and closes."""

    def __init__(self, config: ServeConfig, client: EngineClient, *, console: Console | None = None):
        self._config = config.server
        self._client = client
        self._console = console or Console()
        app = create_app(self._client, self._config, config.operations)
        self._context: AppContext = app.state.context
        self._context.is_open = False
        self._server = ListeningServer(app, self, self._config.drain_s)

    async def run(self) -> None:
        """Serve until `stop`. /health responds at once, all other routes when the engine is ready."""
        with open_listener(self._config) as listener, self._server.handling_signals():
            # Both at once: health checks get an answer while the model loads.
            serving = asyncio.create_task(self._server.run(listener))
            starting = asyncio.create_task(self._start_client(address_of(listener)))
            try:
                await self._watch(serving, starting)
            finally:
                # Closing the client fails the running requests, so their streams end; the server waits for open
                # responses, `LAST_WORDS_S` at most.
                starting.cancel()
                self._server.end()
                self._context.media.close()
                await self._client.close()
                await asyncio.gather(serving, starting, return_exceptions=True)  # their errors were raised by _watch
                await asyncio.to_thread(self._context.close)  # flushes to disk and network
        if self._server.is_forced:
            raise SystemExit(1)

    def stop(self) -> None:
        """The first call drains; the second stops at once."""
        self._server.stop()

    @property
    def num_running(self) -> int:
        """See `headrace.serving.http.listening.Drained`."""
        return len(self._context.running)

    def begin_drain(self) -> None:
        """See `headrace.serving.http.listening.Drained`."""
        self._context.is_draining = True

    async def end_running(self) -> None:
        """See `headrace.serving.http.listening.Drained`."""
        await self._client.close()

    async def _start_client(self, address: str) -> None:
        logger.info("listening on %s; loading the model", address)
        await self._client.start()
        await self._client.wait_ready()
        gc.freeze()  # what was imported stays: a collection that looked at it would stop all streams for longer
        self._context.is_open = True
        facts = self._context.facts()
        await self._context.media.start(facts)
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
            if not self._server.is_stopping:
                if starting.done():
                    starting.result()  # raises if the model could not be loaded
                if self._context.is_open and self._client.state == "stopped":
                    raise EngineGivenUp("the engine crashed too often and is not restarted; see its log")
            await asyncio.wait({serving}, timeout=POLL_S * 5)
        serving.result()
