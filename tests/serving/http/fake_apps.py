"""Applications over the fake client, in process and live on a port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fake_client import FakeClient

from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.serving.http.app import create_app
from headrace.serving.http.transport.asgi import AppConnection

try:  # whichever the installed openai package brings; the two have one interface
    import httpx2 as httpx
except ImportError:
    import httpx


@asynccontextmanager
async def http_for(
    client: FakeClient, *, operations: OperationsConfig | None = None, **options
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client on an application of its own, without a socket."""
    app = create_app(client, ServerConfig(**options), operations)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        http.app = app
        yield http


@asynccontextmanager
async def live_server(app) -> AsyncIterator[str]:
    """The address of ``app`` served by uvicorn in this event loop."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(
            app, http=AppConnection, log_level="warning", lifespan="off", proxy_headers=False
        ))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


def events_of(text: str) -> list[str]:
    """The data of server-sent events."""
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert all(f.startswith("data: ") for f in frames)
    return [f.removeprefix("data: ") for f in frames]
