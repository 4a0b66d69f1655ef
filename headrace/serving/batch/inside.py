"""`InsideClient`: asks an ASGI application without a socket, so that a batch is answered by the routes of the
server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)


@dataclass
class Answer:
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes


class InsideClient:
    """Each `post` stays connected until it is answered."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def post(self, path: str, body: bytes) -> Answer:
        """Send JSON and wait for the whole answer."""
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answer = Answer(500, {}, b"")
        chunks: list[bytes] = []

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await asyncio.get_running_loop().create_future()  # nobody leaves; whoever waits for that is cancelled
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {
                    k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message.get("headers", ())
                }
            else:
                chunks.append(message.get("body", b""))

        try:
            await self._app(self._scope(path, len(body)), receive, send)
        # the request's edge: the application has answered 500 and tells the server, which is us
        except Exception as error:
            if not chunks:
                raise
            logger.error("%s failed", path, exc_info=error)
        answer.body = b"".join(chunks)
        return answer

    def _scope(self, path: str, size: int) -> dict[str, Any]:
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(size).encode())],
        }
