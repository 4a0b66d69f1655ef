"""`PrefixChanges`: what enters and leaves the prefix tree, as KV events. One cache group tells for all: the first that
keeps all tokens.

Refuses: sending them (service/kv_events).
"""

from __future__ import annotations

from headrace.base.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from headrace.scheduling.cache.groups import GroupPolicy
from headrace.scheduling.request import Request

MOST_PENDING = 1 << 16
"""Events that nobody takes; beyond, the cache counts as cleared."""


class PrefixChanges:
    """Does nothing until `begin`: then somebody calls `take` in every step."""

    def __init__(self, policies: list[GroupPolicy], page_size: int):
        self._group = next((g for g, policy in enumerate(policies) if policy.is_chained), 0)
        self._page_size = page_size
        self._hashes: dict[int, int] = {}  # of the pages in the tree
        self._events: list[KvEvent] = []
        self.is_on = False

    def begin(self) -> None:
        """Record from now on, on an empty tree."""
        self.is_on = True
        self._events = [AllBlocksCleared()]

    @property
    def has_events(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._events)

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def note_stored(self, request: Request, begin: int, end: int, keys: list[bytes]) -> None:
        """The tree has pages ``[begin, end)`` of a request, with page keys ``keys``; some it may have had before."""
        table, known = request.holding.tables[self._group], self._hashes
        first = max(begin, request.holding.firsts[self._group])
        for entry in range(first, end + 1):
            is_new = entry < end and table[entry] not in known
            if is_new:
                continue
            if first < entry:
                self._add(request, first, entry, keys)
            first = entry + 1

    def note_evicted(self, group: int, pages: list[int]) -> None:
        """Pages leave the tree."""
        if group == self._group:
            hashes = [self._hashes.pop(page) for page in pages if page in self._hashes]
            if hashes:
                self._events.append(BlockRemoved(hashes))

    def note_cleared(self) -> None:
        """The tree is empty."""
        self._hashes.clear()
        self._events.append(AllBlocksCleared())

    def _add(self, request: Request, begin: int, end: int, keys: list[bytes]) -> None:
        size, table = self._page_size, request.holding.tables[self._group]
        hashes = [name_block(key) for key in keys[begin:end]]
        self._hashes.update(zip(table[begin:end], hashes, strict=True))
        if len(self._events) >= MOST_PENDING:
            self._events = [AllBlocksCleared()]
        self._events.append(BlockStored(
            hashes, name_block(keys[begin - 1]) if begin else None, request.tokens[begin * size : end * size].tolist(),
            size, lora_id=request.adapter or None, lora_name=request.adapter_name or None,
            extra_keys=[(request.namespace,)] * (end - begin) if request.namespace else None
        ))


def name_block(key: bytes) -> int:
    """A page's key as a number that fits signed and unsigned 64 bits."""
    return int.from_bytes(key[:8], "little") >> 1
