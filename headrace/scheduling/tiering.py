"""`Tiers`: pages of prefixes in host memory: written there as they are computed, and brought back when a request hits
them.

Refuses: bytes, and which pages are free (`HostTier` and the ledger). Nothing is copied when a page is evicted: it has
been written through, or is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.base.cache import CacheLayout
from headrace.base.messages import StatsByTier, TierStats
from headrace.base.step import PageMove
from headrace.scheduling.cache.host_tier import HostTier, extend_keys
from headrace.scheduling.cache.ledger import CacheLedger, Holding
from headrace.scheduling.cache.node import Node
from headrace.scheduling.cache.prefix_tree import TOKEN_BYTES, PrefixMatch, forget_unsound
from headrace.scheduling.changes import PrefixChanges
from headrace.scheduling.request import Request
from headrace.scheduling.storage import StorageTier
from headrace.scheduling.transfers import NO_TICKET, Transfers

LATE_S = 5.0
"""Seconds after which a request computes what has not arrived."""


class Tiers:
    """Without host pages in the layout every call does nothing.

    ``arrived``: requests all of whose pages have come, or have failed to; `headrace.scheduling.arrivals` takes them.
    """

    def __init__(
        self, ledger: CacheLedger, transfers: Transfers, layout: CacheLayout, clock: Callable[[], float]
    ):
        self.ledger, self.transfers, self._clock = ledger, transfers, clock
        self._page_size = layout.page_size
        self._limits = [group.store_pages for group in layout.groups]
        self.host = HostTier(ledger.policies, layout.page_size, [group.host_pages for group in layout.groups])
        self.is_on = ledger.use_prefixes and self.host.num_pages > 0
        self.storage = StorageTier(ledger, self.host, transfers, clock, is_on=self.is_on and layout.has_storage)
        # Pages of the tree that are not in the host yet: keys by page, in the order in which they were stored.
        self._unwritten: list[dict[int, bytes]] = [{} for _ in layout.groups]
        self._writing: list[set[bytes]] = [set() for _ in layout.groups]
        self._refused: set[bytes] = set()  # keys of pages that are on their way to the host and must not be held there
        self._generation = 0  # of what host memory holds: what is still on its way when it is cleared is void
        self.arrived: list[Request] = []
        self.num_written = self.num_read = self.num_failed = 0  # pages
        self.num_hit_tokens = self.num_late = 0  # the latter of requests
        self.changes = PrefixChanges(ledger.policies, layout.page_size)
        ledger.tree.on_evicted = self._note_evicted

    @property
    def has_unwritten(self) -> bool:
        """Whether a page waits to be written to the host."""
        return any(self._unwritten) or self.storage.has_unwritten

    # -- device to host -----------------------------------------------------------------------------------------

    def note_stored(self, request: Request, begin: int, end: int) -> None:
        """The tree has pages ``[begin, end)`` of a request: write those to the host that it has not."""
        if not (self.is_on or self.changes.is_on):
            return
        keys, holding = self._keys_of(request, end), request.holding
        if self.changes.is_on:
            self.changes.note_stored(request, begin, end, keys)
        for group, table in enumerate(holding.tables):
            unwritten, writing = self._unwritten[group], self._writing[group]
            if not self._limits[group]:
                continue
            for entry in range(max(begin, holding.firsts[group]), end):
                if keys[entry] not in writing and not self.host.has(group, keys[entry]):
                    unwritten[table[entry]] = keys[entry]

    def note_used(self, request: Request) -> None:
        """A request gives up its pages: its prefix was used until now."""
        if self.is_on:
            self.host.touch(request.page_keys)

    def find_suspects(self, request: Request) -> tuple[Node, list[bytes]]:
        """What `forget` needs of a running request: where its stored prefix ends, and the keys of its pages."""
        stored = request.holding.stored
        return request.holding.node, self._keys_of(request, stored)[:stored] if self.is_on else []

    def forget(self, node: Node, keys: list[bytes]) -> None:
        """Drop what gave numbers that are not finite: the pages of a prefix that are not known to be sound. A later
        position makes those before it wrong, too, as a weight of 0 times NaN is NaN. What running requests read stays
        until they fail."""
        keys = keys[forget_unsound(self.ledger.tree, node) :]
        self.host.forget(keys)
        self.storage.distrust(keys)
        self._refused |= {key for key in keys for writing in self._writing if key in writing}

    def start_writing(self) -> None:
        """Open tickets for as many pages as may be on their way at a time. They go with the next plan, which starts
        moves before it computes: even a page that this plan hands out again is read before it is written."""
        for group, unwritten in enumerate(self._unwritten):
            writing, pages, targets, keys = self._writing[group], [], [], []
            while unwritten and len(writing) < self._limits[group]:
                target = self.host.take(group)
                if target is None:
                    break
                page = next(iter(unwritten))
                keys.append(unwritten.pop(page))
                pages.append(page)
                targets.append(target)
                writing.add(keys[-1])
            if pages:
                move = PageMove(NO_TICKET, group, "device", "host", pages, targets)
                self.transfers.open(move, partial(self._end_writing, keys, self._generation))
        self.storage.start_writing()

    def _end_writing(self, keys: list[bytes], generation: int, move: PageMove, failed: list[int]) -> None:
        lost = set(failed) if generation == self._generation else set(range(len(keys)))
        # In reverse, so that the beginning of a prefix is evicted after the rest, which needs it.
        for index in reversed(range(len(keys))):
            self._writing[move.group].discard(keys[index])
            if index in lost or keys[index] in self._refused:
                self.host.give_back(move.group, move.target_pages[index])
            else:
                self.host.put(move.group, keys[index], move.target_pages[index])
                self.storage.note_held(move.group, keys[index])
        self._refused -= {key for key in keys if not any(key in writing for writing in self._writing)}
        self.num_written += len(keys) - len(lost)
        self.num_failed += len(failed)

    def _note_evicted(self, group: int, pages: list[int]) -> None:
        self.changes.note_evicted(group, pages)
        unwritten = self._unwritten[group]
        if unwritten:
            for page in pages:
                unwritten.pop(page, None)

    # -- host to device -----------------------------------------------------------------------------------------

    def find_hit(self, request: Request, match: PrefixMatch) -> int:
        """The pages of the prefix that the device has or can get from the host."""
        most = (request.known_len - 1) // self._page_size
        if not self.is_on or request.skips_tiers or request.needs_all_tokens or most <= match.num_pages:
            return match.num_pages
        hit = self.host.find_hit(self._keys_of(request, most), match.num_pages, most)
        firsts = [policy.first_needed(hit * self._page_size) for policy in self.ledger.policies]
        return hit if min(firsts) < hit else match.num_pages  # a window of one token needs no pages at all

    def start_fetching(self, request: Request, match: PrefixMatch) -> bool:
        """Ask storage for what neither the device nor the host has of a prompt; whether the request has to wait."""
        if not self.storage.is_on:
            return False
        most = (request.known_len - 1) // self._page_size
        keys = self._keys_of(request, most)[:most]
        return self.storage.start_reading(request, keys, self.find_hit(request, match))

    def start_reading(self, request: Request, num_pages: int) -> bool:
        """Bring what a request's holding lacks of a prefix of so many pages; False, with nothing done, when there are
        no pages for it. Its tickets are those of the request."""
        holding = request.holding
        entries = self.ledger.extend(holding, num_pages)
        if entries is None:
            return False
        for group, (begin, end) in enumerate(entries):
            if begin < end:
                keys = request.page_keys[begin:end]
                pages, targets = self.host.open_read(group, keys), holding.tables[group][begin:end]
                move = PageMove(NO_TICKET, group, "host", "device", pages, targets)
                ticket = self.transfers.open(move, partial(self._end_reading, request, request.epoch, holding, keys))
                holding.arriving[ticket] = group, begin, end
                request.tickets.add(ticket)
        request.arriving_len, request.awaits_until = holding.capacity, self._clock() + LATE_S
        return True

    def _end_reading(
        self, request: Request, epoch: int, holding: Holding, keys: list[bytes], move: PageMove, failed: list[int]
    ) -> None:
        self.host.close_read(move.group, keys, move.source_pages)
        self.ledger.end_ticket(holding, move.ticket)
        self.num_read += len(keys) - len(failed)
        self.num_failed += len(failed)
        if request.epoch == epoch:
            request.tickets.discard(move.ticket)
            request.skips_tiers = request.skips_tiers or bool(failed)
            if not request.tickets:
                self.arrived.append(request)

    # -- state --------------------------------------------------------------------------------------------------

    def stats(self) -> StatsByTier:
        """Counters and gauges."""
        host = self.host
        own = TierStats(
            host.num_pages, host.num_used, self.num_written, self.num_read, host.num_evicted, self.num_failed,
            self.num_hit_tokens, self.num_late
        )
        return StatsByTier(own, self.storage.stats())

    def clear(self) -> None:
        """Forget everything in the host, and what is on its way there."""
        self._generation += 1
        self.host.clear()
        self.storage.clear()
        for unwritten in self._unwritten:
            unwritten.clear()

    def check(self) -> None:
        """Raise AssertionError unless host pages are accounted for, and pages to be written are in the tree."""
        self.host.check()
        for group, unwritten in enumerate(self._unwritten):
            if unwritten:
                in_tree = {page for node in self.ledger.tree.walk() for page in node.pages[group]}
                assert unwritten.keys() <= in_tree, f"group {group}: pages to be written have left the tree"

    def _keys_of(self, request: Request, num_pages: int) -> list[bytes]:
        """At least so many page keys of a request."""
        keys = request.page_keys
        if len(keys) < num_pages:
            size = self._page_size
            tokens = request.key_bytes(len(keys) * size, num_pages * size)
            extend_keys(keys, request.namespace, tokens, size * TOKEN_BYTES)
        return keys
