"""What a request is called in metrics, spans, logs and dumps: its path as routes see it, its route, its method."""

from __future__ import annotations

from starlette.types import Scope

from headrace.serving.http.error_forms import path_of

__all__ = ["method_of", "path_of", "route_of"]


def route_of(path: str, routes: frozenset[str]) -> str:
    """The route that a path belongs to, or ``unmatched``."""
    if path in routes:
        return path
    return next((r for r in routes if "{" in r and path.startswith(r.partition("{")[0])), "unmatched")


def method_of(scope: Scope) -> str:
    """The method, or ``other``: clients may invent any number of them, a metric's labels must stay few."""
    known = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
    return scope["method"] if scope["method"] in known else "other"
