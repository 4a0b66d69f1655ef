"""`HostTier`: which pages of which prefixes host memory holds. Each page is known by its key, a hash chained over the
tokens from the beginning of the prompt; the tree knows nothing of them, so they outlive its nodes.

Refuses: bytes (``memory/``), tickets, and deciding what is written.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from headrace.scheduling.cache.groups import GroupPolicy

KEY_BYTES = 16
"""Bytes of a page's key: at 2**64 pages, collisions would begin to be likely."""


def extend_keys(keys: list[bytes], namespace: str, tokens: bytes, page_bytes: int) -> None:
    """Append the keys of the whole pages of ``tokens``, which follow those that have keys."""
    key = keys[-1] if keys else hashlib.blake2b(namespace.encode(), digest_size=KEY_BYTES).digest()
    for at in range(0, len(tokens) - page_bytes + 1, page_bytes):
        key = hashlib.blake2b(key + tokens[at : at + page_bytes], digest_size=KEY_BYTES).digest()
        keys.append(key)


class _Slots:
    """Host pages of one cache group. ``held``: by key, least recently used first. ``read``: by key the page and how
    many moves read it; these are not evicted. ``doomed``: the same by page, of pages whose key was forgotten.
    ``num_written`` are handed out to moves that write them."""

    __slots__ = ("capacity", "doomed", "free", "held", "num_written", "read")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.free = list(range(capacity - 1, -1, -1))
        self.held: OrderedDict[bytes, int] = OrderedDict()
        self.read: dict[bytes, tuple[int, int]] = {}
        self.doomed: dict[int, int] = {}
        self.num_written = 0


class HostTier:
    """``capacities[g]`` pages of group g. A page of host memory is free, being written by a move, or held under a key;
    one that moves read stays until they are through."""

    def __init__(self, policies: list[GroupPolicy], page_size: int, capacities: list[int]):
        self._policies, self._page_size = policies, page_size
        self._groups = [_Slots(capacity) for capacity in capacities]
        self._chained = [g for g, policy in enumerate(policies) if policy.is_chained]
        self._others = [g for g, policy in enumerate(policies) if not policy.is_chained]
        self.num_evicted = 0

    @property
    def num_pages(self) -> int:
        """Capacity, summed over groups."""
        return sum(group.capacity for group in self._groups)

    @property
    def num_used(self) -> int:
        """Pages that are held or being written, summed over groups."""
        return sum(group.capacity - len(group.free) for group in self._groups)

    def has(self, group: int, key: bytes) -> bool:
        """Whether the page can be read."""
        slots = self._groups[group]
        return key in slots.held or key in slots.read

    # -- looking up ---------------------------------------------------------------------------------------------

    def find_hit(
        self, keys: list[bytes], known: int, most: int, has: Callable[[int, bytes], bool] | None = None
    ) -> int:
        """The longest prefix of at most ``most`` pages that all groups accept, if the first ``known`` pages are
        elsewhere already; ``known`` when there is none longer. ``has(group, key)`` tells which pages exist: by default
        those here."""
        has = has or self.has
        high = most
        for group in self._chained:
            page = known
            while page < high and has(group, keys[page]):
                page += 1
            high = page
        agreed = turn = 0
        while high > known and agreed < len(self._others):
            intact = self._intact(self._others[turn], keys, known, high, has)
            agreed = agreed + 1 if intact == high else 1
            high, turn = intact, (turn + 1) % len(self._others)
        return max(high, known)

    def _intact(
        self, group: int, keys: list[bytes], known: int, end: int, has: Callable[[int, bytes], bool]
    ) -> int:
        """The longest prefix of at most ``end`` pages that a group accepts which does not need all of them."""
        first_needed, page = self._policies[group].first_needed, end - 1
        while end > known and page >= max(known, first_needed(end * self._page_size)):
            if not has(group, keys[page]):
                end = page  # without this page a prefix can only end before it
            page -= 1
        return end

    def touch(self, keys: list[bytes]) -> None:
        """A prefix was used: its first page is now the most recently used of all, as the others need it."""
        for slots in self._groups:
            held = slots.held
            for key in reversed(keys):
                if key in held:
                    held.move_to_end(key)

    # -- pages --------------------------------------------------------------------------------------------------

    def take(self, group: int) -> int | None:
        """A page to write, evicting the least recently used if none is free; None when moves use all of them."""
        slots = self._groups[group]
        if slots.free:
            page = slots.free.pop()
        elif slots.held:
            _, page = slots.held.popitem(last=False)
            self.num_evicted += 1
        else:
            return None
        slots.num_written += 1
        return page

    def put(self, group: int, key: bytes, page: int) -> None:
        """A page from `take` has been written: hold it under its key, or free it if another one has that key."""
        slots = self._groups[group]
        slots.num_written -= 1
        if self.has(group, key):
            slots.free.append(page)
        else:
            slots.held[key] = page

    def give_back(self, group: int, page: int) -> None:
        """A page from `take` was not written."""
        slots = self._groups[group]
        slots.num_written -= 1
        slots.free.append(page)

    def open_read(self, group: int, keys: list[bytes]) -> list[int]:
        """The pages of keys that are here; none of them is evicted until `close_read`."""
        slots, pages = self._groups[group], []
        for key in keys:
            page, count = slots.read[key] if key in slots.read else (slots.held.pop(key), 0)
            slots.read[key] = page, count + 1
            pages.append(page)
        return pages

    def close_read(self, group: int, keys: list[bytes], pages: list[int]) -> None:
        """Undo `open_read`, which returned ``pages``; the first of ``keys`` is now the most recently used."""
        slots = self._groups[group]
        for key, page in zip(reversed(keys), reversed(pages), strict=True):
            known, count = slots.read.get(key, (-1, 0))
            if known != page:  # forgotten since
                slots.doomed[page] -= 1
                if not slots.doomed[page]:
                    del slots.doomed[page]
                    slots.free.append(page)
            elif count > 1:
                slots.read[key] = page, count - 1
            else:
                del slots.read[key]
                slots.held[key] = page

    def forget(self, keys: list[bytes]) -> None:
        """Forget these keys, as `clear` does all."""
        for slots in self._groups:
            for key in keys:
                if key in slots.held:
                    slots.free.append(slots.held.pop(key))
                elif key in slots.read:
                    page, count = slots.read.pop(key)
                    slots.doomed[page] = count

    def clear(self) -> None:
        """Forget all keys. Pages that moves read become free when they are through."""
        for slots in self._groups:
            slots.free += slots.held.values()
            slots.held.clear()
            for page, count in slots.read.values():
                slots.doomed[page] = count
            slots.read.clear()

    def check(self) -> None:
        """Raise AssertionError unless each page is free, held, read or being written, and only once."""
        for group, slots in enumerate(self._groups):
            known = [*slots.free, *slots.held.values(), *(page for page, _ in slots.read.values()), *slots.doomed]
            assert len(set(known)) == len(known), f"group {group}: a host page is doubled"
            assert len(known) + slots.num_written == slots.capacity, f"group {group}: host pages are lost"
            assert not (slots.held.keys() & slots.read.keys()), f"group {group}: a key is held twice"
