"""``Registry[T]``: lazy, capability-tagged plug-ins. Nothing is imported until an entry is loaded.

Refuses: knowing what T is, and swallowing errors: a failed load keeps its original cause and reports it on request.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.base import env
from headrace.base.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

logger = logging.getLogger(__name__)

T = TypeVar("T")

PLUGIN_API = 1
"""Version of the plug-in contracts, increased with every incompatible change. An out-of-tree plug-in declares the
version it was made for as ``plugin_api``; any other version is refused."""


def load_target(target: str) -> Any:
    """Import ``"package.module:attribute"`` and return the attribute."""
    module, _, attribute = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def installed_points(group: str) -> EntryPoints:
    """The entry points that installed packages have in a group."""
    return _selector_on(tuple(sys.path))(group=group)


@functools.lru_cache(maxsize=1)
def _selector_on(path: tuple[str, ...]) -> Callable[..., EntryPoints]:
    """Scan all groups at once and cache the result per ``sys.path``: a scan of a hundred packages takes some 12 ms, and
    a start needs five groups."""
    from importlib.metadata import entry_points  # slow to import, and most processes never need it

    return entry_points().select


def _always(_: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Entry:
    """One plug-in. ``supports(query)`` returns None when it can serve the query, else the reason why not; it must be
    cheap and must not import the plug-in. Of all that can, the one with the highest ``priority`` is chosen (ties: by
    name). ``is_out_of_tree``: it comes from another package and must declare our `PLUGIN_API`."""

    name: str
    target: str
    supports: Callable[[Any], str | None] = field(default=_always)
    priority: int = 0
    doc: str = ""
    is_out_of_tree: bool = False


class Registry(Generic[T]):
    """Named lazy factories of one kind of plug-in, e.g. ``Registry[AttentionBackend]("attention backend")``."""

    def __init__(self, noun: str):
        self.noun = noun
        self._entries: dict[str, Entry] = {}
        self._loaded: dict[str, T] = {}
        # Failed loads and starts: the automatic choice passes over these for the life of the process.
        self._failures: dict[str, Exception] = {}

    def add(
        self, name: str, target: str, *, supports: Callable[[Any], str | None] = _always, priority: int = 0,
        doc: str = "", is_out_of_tree: bool = False,
    ) -> None:
        """Register lazily. Adding the same name and target twice is a no-op; another target is an error."""
        known = self._entries.get(name)
        if known is not None and known.target != target:
            raise PluginError(
                f"{self.noun} {name!r} is already registered as {known.target}; {target} must take another name"
            )
        self._entries[name] = Entry(name, target, supports, priority, doc, is_out_of_tree)

    def add_installed(
        self, group: str, *, supports: Callable[[str], Callable[[Any], str | None]] = lambda name: _always,
        priority: int = 0
    ) -> list[str]:
        """Register what installed packages offer in an entry-point group, without importing it; returns the names.
        ``supports(name)`` makes an entry's predicate. One that takes the name of another entry is left out with a
        warning."""
        names = []
        for point in installed_points(group):
            try:
                self.add(point.name, point.value, supports=supports(point.name), priority=priority, is_out_of_tree=True)
            except PluginError as error:
                logger.warning("left out: %s", error)
                continue
            names.append(point.name)
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries.values(), key=lambda e: (-e.priority, e.name)))

    def entry(self, name: str) -> Entry:
        """The entry of a registered plug-in, without loading it; raises KeyError for an unknown name."""
        return self._entries[name]

    def has_failed(self, name: str) -> bool:
        """Whether loading or starting the plug-in failed."""
        return name in self._failures

    def names(self) -> list[str]:
        """All registered names, best priority first."""
        return [e.name for e in self]

    def load(self, name: str) -> T:
        """Import and return the plug-in; raises `PluginError` from the original error when it cannot be loaded."""
        if name in self._loaded:
            return self._loaded[name]
        entry = self._entries.get(name)
        if entry is None:
            raise PluginError(self._explain_unknown(name))
        if name in env.disabled_plugins():
            raise PluginError(f"{self.noun} {name!r} is disabled by HEADRACE_DISABLE_PLUGINS")
        try:
            self._loaded[name] = load_target(entry.target)
        except Exception as error:  # a plug-in load: any failure belongs to the plug-in
            self._failures[name] = error
            raise PluginError(f"{self.noun} {name!r} failed to load: {type(error).__name__}: {error}") from error
        if entry.is_out_of_tree:
            self._check_api(name)
        return self._loaded[name]

    def require(self, name: str, param: str) -> None:
        """Raise `ConfigError` for a name that is not registered, as the value of the option ``param``."""
        if name not in self._entries:
            raise ConfigError(f"{param}: {self._explain_unknown(name)}", param=param)

    def _explain_unknown(self, name: str) -> str:
        near = get_close_matches(name, self._entries, n=3)
        hint = f"nearest: {', '.join(near)}; all" if near else "known"
        return f"unknown {self.noun} {name!r}; {hint}: {', '.join(self.names())}"

    def _check_api(self, name: str) -> None:
        # Only after loading: the version is an attribute of the plug-in itself.
        made_for = getattr(self._loaded[name], "plugin_api", None)
        if made_for != PLUGIN_API:
            del self._loaded[name]
            known = (
                f"was made for plug-in API {made_for}" if made_for is not None
                else "does not say for which plug-in API it was made"
            )
            raise PluginError(f"{self.noun} {name!r} {known}; this is {PLUGIN_API}")

    def make(self, name: str, *args: Any) -> Any:
        """Load a plug-in that is a class or function and call it; `PluginError` from the original error if either
        fails."""
        plugin: Any = self.load(name)
        try:
            return plugin(*args)
        except Exception as error:  # as when it is loaded
            self._failures[name] = error
            raise PluginError(f"{self.noun} {name!r} failed to start: {type(error).__name__}: {error}") from error

    def reason_against(self, name: str, query: Any) -> str | None:
        """Why the named entry cannot serve the query, without importing it; None when it can."""
        if name in env.disabled_plugins():
            return "disabled by HEADRACE_DISABLE_PLUGINS"
        if name in self._failures:
            return f"failed to load: {self._failures[name]}"
        return self._entries[name].supports(query)

    def choose(self, query: Any, name: str | None = None) -> T:
        """The named entry if ``name`` is given (error with the reason when it cannot serve), else the best that can.

        An entry that fails to load while being chosen automatically is skipped in favour of the next one.
        """
        if name is not None:
            plugin = self.load(name)
            reason = self.reason_against(name, query)
            if reason:
                raise PluginError(f"{self.noun} {name!r} cannot be used here: {reason}")
            return plugin
        reasons = {}
        for entry in self:
            reasons[entry.name] = self.reason_against(entry.name, query)
            if reasons[entry.name] is None:
                try:
                    return self.load(entry.name)
                except PluginError as error:
                    reasons[entry.name] = str(error)
        listing = "; ".join(f"{n}: {r}" for n, r in reasons.items()) or "none registered"
        raise PluginError(f"no {self.noun} can serve {query}: {listing}")


PLUGIN_GROUP = "headrace.plugins"

PLUGINS: Registry[Callable[[], None]] = Registry("plug-in package")
"""Functions without arguments, with an attribute ``plugin_api``, that register what their package offers. Called in
every process that needs plug-ins, perhaps more than once: they must be idempotent (`Registry.add` is)."""


def start_plugins() -> None:
    """Call the functions of all installed packages. Must run before anything is chosen from a registry. One that fails
    is left out with a warning."""
    for name in PLUGINS.add_installed(PLUGIN_GROUP):
        try:
            PLUGINS.make(name)
        except PluginError as error:
            logger.warning("served without it: %s", error)
