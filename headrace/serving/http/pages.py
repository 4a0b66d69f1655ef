"""The chat page at ``/`` and the page of the API at ``/docs``: files that are read once and sent under a strict
policy."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

FOLDER = "page"
DOCUMENTS = {"/": "index.html", "/docs": "docs.html"}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    # Nothing inline and nothing from elsewhere; no string becomes markup or code, whatever a model writes.
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)


def add_pages(app: Starlette) -> frozenset[str]:
    """Add a route for each document and each file below ``/page/``; returns their paths, all of which are open."""
    folder = files("headrace.serving.http") / FOLDER
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES}
    names = DOCUMENTS | {f"/{FOLDER}/{name}": name for name in contents if not name.endswith(".html")}
    for path, name in names.items():
        app.add_route(path, _file_handler(contents[name], TYPES[name.rpartition(".")[2]]), methods=["GET"])
    return frozenset(names)


def _file_handler(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """The handler of one file. Browsers ask each time whether it has changed, as addresses carry no version."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "ETag": tag, "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
    }

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return show
