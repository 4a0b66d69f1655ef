"""`CacheLedger`: which request holds which pages, and how many more are promised to it.

A request's page tables begin with pages of the prefix tree, pinned, and go on with pages of its own. Refuses: knowing
requests (a `Holding` stands for one) and deciding who gets pages (admission, planner, retraction).
"""

from __future__ import annotations

from headrace.base.cache import NULL_PAGE, CacheLayout
from headrace.base.step import PageAppend
from headrace.scheduling.cache.groups import GROUP_POLICIES, GroupPolicy
from headrace.scheduling.cache.node import Node
from headrace.scheduling.cache.pages import PageAccounts
from headrace.scheduling.cache.prefix_tree import PrefixMatch, PrefixTree

NO_LIMIT = 2**31


class Holding:
    """The pages of one running request. Per group g, entry i of ``tables[g]`` is positions ``[i * page_size, ...)``:

    * entries before ``firsts[g]`` were freed or never needed and are the null page;
    * entries before ``stored`` belong to the prefix tree, on the path to ``node``, and are pinned by this holding;
    * the others are its own.

    ``capacity`` is how many tokens the tables have room for. Entries from ``unsent[g]`` on are not on the device yet.
    ``peaks[g]`` is the most pages the request is expected to hold at once; the difference to what it holds now is
    promised to it, so that admission does not give it to others. A promise is a count, not particular pages.
    ``arriving``: by ticket of a page move, the group and the entries ``(begin, end)`` of own pages that it writes.
    """

    __slots__ = ("arriving", "capacity", "firsts", "node", "peaks", "stored", "tables", "unsent")

    def __init__(self, node: Node, tables: list[list[int]], firsts: list[int], peaks: list[int]):
        self.node = node
        self.stored = node.end
        self.tables = tables
        self.firsts = firsts
        self.peaks = peaks
        self.unsent = list(firsts)  # entries before ``firsts`` need no sending: the device clears a row at its start
        self.capacity = 0
        self.arriving: dict[int, tuple[int, int, int]] = {}

    def num_promised(self, group: int) -> int:
        """Pages of the peak that are not held yet; 0 for a request that has outgrown its forecast."""
        return max(0, self.peaks[group] - (len(self.tables[group]) - self.firsts[group]))


class CacheLedger:
    """Hands out pages and takes them back. In each group every page but the null page has exactly one owner at any
    time: the free list, one holding, the tree, or a ticket: ``limbo`` has the pages that a page move still writes for a
    holding that was closed. ``promised[g]`` is the sum of `Holding.num_promised` over all
    holdings; every change of a table must update it."""

    def __init__(self, layout: CacheLayout, *, use_prefixes: bool):
        self.page_size = layout.page_size
        self.use_prefixes = use_prefixes and bool(layout.groups)
        self.policies: list[GroupPolicy] = [
            GROUP_POLICIES.load(group.spec.kind)(group.spec, layout.page_size) for group in layout.groups
        ]
        self.has_windows = any(not policy.is_chained for policy in self.policies)
        self.accounts = [PageAccounts(group.num_pages, group.soft_pages) for group in layout.groups]
        self.tree = PrefixTree(self.policies, layout.page_size, self.accounts)
        self.promised = [0] * len(self.policies)
        self.limbo: dict[int, tuple[int, list[int]]] = {}  # by ticket: group and pages

    @property
    def keeps_nothing(self) -> bool:
        """Whether no step leaves anything for the next: there are no cache groups."""
        return not self.accounts

    @property
    def num_loose(self) -> int:
        """Pages of all groups that are free or evictable."""
        return sum(account.num_free for account in self.accounts) + sum(self.tree.num_evictable)

    # -- asking -------------------------------------------------------------------------------------------------

    def find_lack(self, length: int, at_once: int = 1) -> tuple[int, int] | None:
        """``(needed, capacity)`` of a group that cannot hold a request of ``length`` tokens even alone, or None;
        ``at_once``: see `GroupPolicy.peak_pages`."""
        for policy, account in zip(self.policies, self.accounts, strict=True):
            needed = policy.peak_pages(length, at_once)
            if needed > account.capacity:
                return needed, account.capacity
        return None

    def match(self, namespace: str, tokens: bytes) -> PrefixMatch:
        """The longest usable stored prefix of ``tokens``, which are whole pages."""
        return self.tree.match(namespace, tokens)

    def count_room(self, holding: Holding) -> int:
        """Pages that ``holding`` can take in every group without touching what is promised to others."""
        rooms = []
        for group, account in enumerate(self.accounts):
            others = self.promised[group] - holding.num_promised(group)
            rooms.append(account.num_free + self.tree.num_evictable[group] - others)
        return max(0, min(rooms, default=NO_LIMIT))

    def reserve(self, count: int) -> bool:
        """Make ``count`` pages free in every group, evicting from the tree; False, with nothing evicted, if that cannot
        be enough. Evicts more than it must where that spares memory that was never in use."""
        return self._reserve_each([count] * len(self.accounts))

    def _reserve_each(self, counts: list[int]) -> bool:
        """`reserve` with a count for every group."""
        tree = self.tree
        # All groups are checked before any evicts. Evicting for one may free pages of others too, never take any.
        for count, account, evictable in zip(counts, self.accounts, tree.num_evictable, strict=True):
            if count - account.num_free > evictable:
                return False
        for group, (count, account) in enumerate(zip(counts, self.accounts, strict=True)):
            excess = account.count_excess(count)
            if excess:
                tree.evict(group, excess)
        return True

    # -- a holding's life ---------------------------------------------------------------------------------------

    def open(self, match: PrefixMatch, expected_len: int, at_once: int = 1, *, force: bool) -> Holding | None:
        """Pin a hit for a request that is expected to grow to ``expected_len`` tokens, and promise it the rest of its
        peak (see `GroupPolicy.peak_pages`). None when some group has not that many unpromised pages, free or evictable,
        unless ``force``. The match must be fresh: the tree has not changed since."""
        tree, hit = self.tree, match.num_pages
        firsts = [policy.first_needed(hit * self.page_size) for policy in self.policies]
        peaks = [policy.peak_pages(expected_len, at_once) for policy in self.policies]
        found = [
            tree.collect(match.node, g, first, hit) if match.node and hit else [] for g, first in enumerate(firsts)
        ]
        for g, pages in enumerate(found):
            # Pages of the hit that nobody pins yet count as evictable now, and will not once they are pinned.
            room = self.accounts[g].num_free + tree.num_evictable[g] - tree.count_unpinned(g, pages) - self.promised[g]
            if room < peaks[g] - len(pages) and not force:
                return None
        for g, pages in enumerate(found):
            tree.pin(g, pages)
        tables = [[NULL_PAGE] * first + pages for first, pages in zip(firsts, found, strict=True)]
        holding = Holding(tree.hold(match), tables, firsts, peaks)
        holding.capacity = hit * self.page_size  # a hit is whole pages
        for g in range(len(tables)):
            self.promised[g] += holding.num_promised(g)
        return holding

    def grow(self, holding: Holding, length: int) -> None:
        """Add pages for positions up to ``length`` to every group's table. The caller has reserved them (`reserve`)."""
        count = -(-length // self.page_size) - holding.capacity // self.page_size
        if count <= 0:
            return
        for group, table in enumerate(holding.tables):
            before = holding.num_promised(group)
            table += self.accounts[group].take(count)
            self.promised[group] += holding.num_promised(group) - before
        holding.capacity += count * self.page_size

    def extend(
        self, holding: Holding, num_pages: int, computed_len: int | None = None
    ) -> list[tuple[int, int]] | None:
        """Add own pages for a prefix of ``num_pages`` pages that is about to arrive from elsewhere: in each group those
        that a hit of that length needs. ``computed_len``: tokens of it, where the last page is not full. Returns by
        group the entries ``(begin, end)`` to be filled, or None, with nothing done, when there are no pages. Entries of
        shorter hits that a longer one does not need are freed."""
        length = num_pages * self.page_size if computed_len is None else computed_len
        firsts = [policy.first_needed(length - length % self.page_size) for policy in self.policies]
        begins = [max(first, len(table)) for first, table in zip(firsts, holding.tables, strict=True)]
        if not self._reserve_each([max(0, num_pages - begin) for begin in begins]):
            return None
        self.trim(holding, length)
        for group, (table, begin) in enumerate(zip(holding.tables, begins, strict=True)):
            before = holding.num_promised(group)
            table += [NULL_PAGE] * (begin - len(table))
            if firsts[group] > holding.firsts[group]:
                holding.firsts[group] = firsts[group]
                holding.unsent[group] = max(holding.unsent[group], firsts[group])
            table += self.accounts[group].take(num_pages - begin)
            self.promised[group] += holding.num_promised(group) - before
        holding.capacity = num_pages * self.page_size
        return [(begin, num_pages) for begin in begins]

    def end_ticket(self, holding: Holding, ticket: int) -> None:
        """Nothing writes the ticket's pages any more: those of a closed holding become free."""
        holding.arriving.pop(ticket, None)
        if ticket in self.limbo:
            group, pages = self.limbo.pop(ticket)
            self.accounts[group].give(pages)

    def trim(self, holding: Holding, begin: int) -> None:
        """Free the pages that no position from ``begin`` on reads. Pages that a prefix hit at the latest page border
        would need are kept too, or the prefix could never be reused where it ends."""
        # Steps in flight may still read the freed pages; see `PageAccounts.give` for why that is safe.
        border = begin - begin % self.page_size
        for group, policy in enumerate(self.policies):
            old, new = holding.firsts[group], min(policy.first_needed(border), len(holding.tables[group]))
            if new <= old:
                continue
            before = holding.num_promised(group)
            # The device keeps the old entries: no window reaches back to them, so they need no update.
            self._free(holding, group, old, new)
            holding.tables[group][old:new] = [NULL_PAGE] * (new - old)
            holding.firsts[group] = new
            holding.unsent[group] = max(holding.unsent[group], new)
            self.promised[group] += holding.num_promised(group) - before

    def store(self, holding: Holding, run: bytes) -> bool:
        """Move the pages of ``run``, the tokens (int32 bytes) of whole pages after ``stored``, into the tree. Where the
        tree has the same tokens already, the table takes over its pages and the holding's own are freed; returns
        whether that happened, as the device must then get the changed entries."""
        end = holding.stored + len(run) // (4 * self.page_size)
        starts = [max(first, holding.stored) for first in holding.firsts]
        offers = [table[start:end] for table, start in zip(holding.tables, starts, strict=True)]
        node, spare = self.tree.insert(holding.node, run, offers)
        node.holders += 1
        self.tree.release(holding.node)
        holding.node, holding.stored = node, end
        for group, pages in enumerate(spare):
            if pages:
                self.accounts[group].give(pages)
                table, start = holding.tables[group], starts[group]
                table[start:end] = offers[group]
                holding.unsent[group] = min(holding.unsent[group], start)
        return any(spare)

    def close(self, holding: Holding) -> None:
        """Free the holding's own pages and unpin its stored ones, which become evictable once no other pins them. Pages
        under a ticket stay in ``limbo`` until it ends. The holding must not be used afterwards."""
        for group, table in enumerate(holding.tables):
            self.promised[group] -= holding.num_promised(group)
            last = len(table)
            for ticket, (own_group, begin, end) in holding.arriving.items():
                if own_group == group:  # what arrives is always the table's end
                    self.limbo[ticket] = group, table[begin:end]
                    last = min(last, begin)
            self._free(holding, group, holding.firsts[group], last)
        holding.arriving.clear()
        self.tree.release(holding.node)

    def take_appends(self, holding: Holding, row: int, appends: list[PageAppend]) -> None:
        """Add to ``appends`` what the device does not know yet of the page tables."""
        for group, table in enumerate(holding.tables):
            start = holding.unsent[group]
            if start < len(table):
                appends.append(PageAppend(group, row, start, table[start:]))
                holding.unsent[group] = len(table)

    def _free(self, holding: Holding, group: int, begin: int, end: int) -> None:
        """Unpin the stored entries and free the own entries of ``[begin, end)``."""
        table, stored = holding.tables[group], min(holding.stored, end)
        if begin < stored:
            self.tree.unpin(group, table[begin:stored], holding.node, begin)
        if max(begin, stored) < end:
            self.accounts[group].give(table[max(begin, stored) : end])
