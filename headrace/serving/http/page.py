"""The chat page at ``/``: one static file with a policy that lets it talk to this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_policy(html: str) -> str:
    """Content-Security-Policy: the page's own script and style by their hashes, connections to this server, no more."""
    scripts = " ".join(map(_digest, re.findall(r"<script>(.*?)</script>", html, re.DOTALL)))
    styles = " ".join(map(_digest, re.findall(r"<style>(.*?)</style>", html, re.DOTALL)))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _show(_request: Request, *, html: str, headers: dict[str, str]) -> HTMLResponse:
    return HTMLResponse(html, headers=headers)


def page_handler() -> partial:
    """The handler of ``/``; the file is read once."""
    html = (files("headrace.serving.http") / "page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": page_policy(html), "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer"
    }
    return partial(_show, html=html, headers=headers)
