"""`Endpoint`: one route as data: where, what it reads, what it answers. Routing and the OpenAPI document are made from
it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.serving.http.body import JsonBody

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """``answer`` is the msgspec type of the 200 answer (None: plain text). ``event`` is the type of an event
    when the route can stream, as ``event_media``. ``errors`` are statuses beside 200 (500 is always possible).
    ``is_admin``: concerns the server and not its caller alone; see `AdminGate`."""

    path: str
    handler: Handler
    doc: str
    tag: str
    methods: tuple[str, ...] = ("GET",)
    body: JsonBody[Any] | None = None
    answer: Any = None
    event: Any = None
    event_media: str = "text/event-stream"
    query: dict[str, dict[str, Any]] | None = None
    errors: tuple[int, ...] = ()
    is_admin: bool = False
