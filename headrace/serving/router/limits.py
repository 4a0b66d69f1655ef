"""`RateLimit`: how many requests a client may send a second, and have running at once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.base.errors import HeadraceError

MAX_CLIENTS = 1 << 16
"""Clients that are remembered; the one that was away for the longest is forgotten first."""


class RateLimited(HeadraceError):
    """The client sends too many requests, or has too many running; try again after ``retry_after`` seconds."""

    status = 429
    kind = "rate_limit_exceeded"


@dataclass(slots=True)
class _Client:
    """A token bucket: ``tokens`` at time ``at``; and the number of running requests."""

    tokens: float
    at: float
    num_running: int = 0


class RateLimit:
    """``rate`` requests a second, ``burst`` at once (0: those of a second, at least one), ``most_running`` at a time;
    0 is no limit. ``clock`` gives seconds."""

    def __init__(self, rate: float, burst: int, most_running: int, clock: Callable[[], float] = time.monotonic):
        self._rate, self._burst = rate, float(burst or max(1.0, rate))
        self._most_running, self._clock = most_running, clock
        self._clients: OrderedDict[tuple[str, ...], _Client] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether anything is limited."""
        return self._rate > 0 or self._most_running > 0

    @contextmanager
    def admit(self, client: tuple[str, ...]) -> Iterator[None]:
        """Count a request while it runs; raises `RateLimited`, which counts nothing."""
        found = self._find(client)
        if self._most_running and found.num_running >= self._most_running:
            raise RateLimited(f"{found.num_running} requests of this client are running already", retry_after=1.0)
        if self._rate:
            if found.tokens < 1:
                wait_s = (1 - found.tokens) / self._rate
                raise RateLimited(f"this client may send {self._rate:g} requests a second", retry_after=wait_s)
            found.tokens -= 1
        found.num_running += 1
        try:
            yield
        finally:
            found.num_running -= 1

    def _find(self, client: tuple[str, ...]) -> _Client:
        now = self._clock()
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = _Client(self._burst, now)
            if len(self._clients) > MAX_CLIENTS:
                self._forget_one()
        else:
            found.tokens = min(self._burst, found.tokens + (now - found.at) * self._rate)
            found.at = now
            self._clients.move_to_end(client)
        return found

    def _forget_one(self) -> None:
        for client, found in self._clients.items():
            if not found.num_running:
                del self._clients[client]
                return
