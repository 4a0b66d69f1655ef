"""Pages beyond host memory: `PageStore`, what a disk or a remote store does, and the registry of those."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.base.errors import ConfigError
from headrace.base.registry import Registry

STORE_GROUP = "headrace.page_stores"
"""Entry-point group of out-of-tree stores."""


@dataclass(frozen=True)
class StoreOptions:
    """What a store is made with. ``place``: this process among ``num_places`` that use the same store, all with pages
    of their own. ``capacity``: bytes that this place may take (0: the store's affair). ``config``: the user's own."""

    place: int = 0
    num_places: int = 1
    folder: Path | None = None
    capacity: int = 0
    config: dict[str, Any] = field(default_factory=dict)


class PageStore(Protocol):
    """Pages by name. Calls come from several threads at once and may take their time; what they raise counts as a
    failure of the whole batch. A name belongs to one content for ever: who puts it again may be ignored.

    Making one raises `ConfigError` when it cannot work.
    """

    def __init__(self, options: StoreOptions): ...

    def exists(self, names: list[str]) -> list[bool]:
        """Which of these pages are there."""

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """Fill each buffer, whose size is the page's; returns which were filled. Others may hold anything."""

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """Store the buffers; returns which were. They may be overwritten as soon as this returns."""

    def close(self) -> None:
        """Free resources."""


PAGE_STORES: Registry[type[PageStore]] = Registry("page store")
PAGE_STORES.add("disk", "headrace.memory.storage.disk:DiskStore", doc="files in a folder")
PAGE_STORES.add("mooncake", "headrace.memory.storage.mooncake:MooncakeStore", doc="the memory of a cluster")


def find_remote_store(name: str) -> str:
    """The name, if there is such a store; else raises `ConfigError`."""
    PAGE_STORES.add_installed(STORE_GROUP)
    if name not in PAGE_STORES or name == "disk":
        known = ", ".join(entry.name for entry in PAGE_STORES if entry.name != "disk") or "none is installed"
        raise ConfigError(f"there is no remote store {name!r}; known: {known}", param="remote_cache")
    return name
