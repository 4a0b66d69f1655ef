"""Step hooks: plug-ins that are notified of requests and planned steps, and may delay requests. Installed packages add
theirs through the entry-point group ``headrace.hooks``; every hook that supports the configuration is used.

A hook that raises is switched off for the life of the engine, with a warning; the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec

from headrace.base.config import EngineConfig
from headrace.base.errors import PluginError
from headrace.base.messages import EngineRequest
from headrace.base.registry import Registry
from headrace.base.step import StepPlan

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headrace.hooks"


class RequestUpdate(msgspec.Struct, frozen=True):
    """A request at the moment of an event; lengths in tokens. ``row`` is -1 where it never ran."""

    request_id: str
    row: int
    prompt_len: int
    computed_len: int
    output_len: int


class StepHook(Protocol):
    """Built once per engine and called from its thread. All methods but the first are optional; none may block, as the
    step loop waits for it."""

    def __init__(self, config: EngineConfig): ...

    def holds_request(self, request: EngineRequest) -> bool:
        """Whether a new request must not run yet. May be called twice for one request. A held request counts, expires
        and is aborted like any other in the queue."""

    def ready_requests(self) -> list[str]:
        """Ids of held requests that may run now. Called in every step while any is held."""

    def request_admitted(self, update: RequestUpdate) -> None:
        """The prompt is computed, and the first token sampled."""

    def request_retracted(self, update: RequestUpdate) -> None:
        """The request gave its pages and row back, and will resume later."""

    def request_finished(self, update: RequestUpdate, reason: str) -> None:
        """The request has ended, in whatever state; called once for each request."""

    def step_planned(self, plan: StepPlan) -> None:
        """A step is planned (pages, rows, positions) and is launched next."""


HOOKS: Registry[type[StepHook]] = Registry("step hook")
"""Queried with an `EngineConfig`; all that support it are used, highest priority first."""


class Hooks:
    """The hooks of one engine, called in the order given. A hook that lacks a method is passed over."""

    def __init__(self, hooks: Iterable[tuple[str, Any]] = ()):
        self._hooks: dict[str, Any] = dict(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    @property
    def names(self) -> list[str]:
        """Names of the hooks that are still called, in order."""
        return list(self._hooks)

    def dispatch(self, event: str, *args: Any) -> None:
        """Notify every hook."""
        for _ in self._answers(event, args):
            pass

    def any(self, event: str, *args: Any) -> bool:
        """Whether a hook answers true; the hooks behind it are not called then."""
        return any(self._answers(event, args))

    def collect(self, event: str, *args: Any) -> list[Any]:
        """The lists that hooks return, concatenated."""
        return [item for answer in self._answers(event, args) if answer for item in answer]

    def _answers(self, event: str, args: tuple[Any, ...]) -> Iterator[Any]:
        # Over a copy: a hook that raises is removed while iterating.
        for name, hook in list(self._hooks.items()):
            method = getattr(hook, event, None)
            if method is None:
                continue
            try:
                answer = method(*args)
            except Exception as error:  # a plug-in's own failure, whatever it is
                del self._hooks[name]
                logger.warning(
                    "step hook %r is switched off: %s raised %s: %s", name, event, type(error).__name__, error,
                    exc_info=error
                )
                continue
            yield answer


def add_installed_hooks() -> None:
    """Register the hooks of installed packages, without importing them."""
    HOOKS.add_installed(ENTRY_POINT_GROUP)


def load_hooks(config: EngineConfig) -> Hooks:
    """Build every hook that supports the configuration; one that cannot be loaded or built is left out with a
    warning."""
    add_installed_hooks()
    hooks = []
    for name in HOOKS.names():
        if HOOKS.entry(name).supports(config) is None:
            try:
                hooks.append((name, HOOKS.make(name, config)))
            except PluginError as error:
                logger.warning("served without it: %s", error)
    return Hooks(hooks)
