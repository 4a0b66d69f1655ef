"""`PrefixTree`: a radix tree over whole pages of token ids, as in SGLang's RadixAttention
(https://arxiv.org/abs/2312.07104); per node and cache group, the pages that hold their KV.

Refuses: knowing requests. Callers pin the pages they read and hold the node where their stored prefix ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace.scheduling.cache.groups import GroupPolicy
from headrace.scheduling.cache.node import EvictionQueue, Node, count_common_pages, walk_below
from headrace.scheduling.cache.pages import PageAccounts

TOKEN_BYTES = 4  # keys are int32 token ids as bytes: slices compare at the speed of memcmp


class PrefixMatch(NamedTuple):
    """A hit of ``num_pages`` whole pages; ``node`` contains the last of them (None: nothing known of the namespace).
    Valid until the tree changes: `PrefixTree.hold` it at once or drop it."""

    namespace: str
    node: Node | None
    num_pages: int


class PrefixTree:
    """Every page in the tree is pinned as often as running requests read it (``refs``); unpinned ones are evictable.

    A request pins, per group, the pages from the first it needs to the end of its stored prefix. So in a chained group
    an unpinned page has no pinned one below it, and in any other group the unpinned pages of a node are the head of
    its run: everything unpinned can be reached by cutting leaves' tails or dropping nodes' heads.
    """

    def __init__(self, policies: list[GroupPolicy], page_size: int, accounts: list[PageAccounts]):
        self._policies = policies
        self._accounts = accounts
        self._page_bytes = page_size * TOKEN_BYTES
        self._chained = [g for g, policy in enumerate(policies) if policy.is_chained]
        self._windowed = [g for g, policy in enumerate(policies) if not policy.is_chained]
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._queues = [EvictionQueue() for _ in policies]
        self._clock = 0
        self.refs = [[0] * account.num_pages for account in accounts]
        self.num_evictable = [0] * len(policies)
        self.num_evicted = 0
        self.version = 0  # changes when a match may have become longer
        self.on_evicted: Callable[[int, list[int]], None] | None = None  # told group and pages that leave the tree

    # -- looking up ---------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: bytes) -> PrefixMatch:
        """The longest stored prefix of ``tokens`` (bytes of whole pages) that every group accepts. Changes nothing."""
        root = node = self._roots.get(namespace)
        if root is None or node is None:
            return PrefixMatch(namespace, None, 0)
        page_bytes, at, size = self._page_bytes, 0, len(tokens)
        while at < size:
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                break
            node = child
            if tokens.startswith(child.key, at):
                at += len(child.key)
            else:
                at += count_common_pages(child.key, tokens, at, page_bytes) * page_bytes
                break
        # Chained groups have every page on the path; a window group may have lost some, which shortens the hit.
        num_pages = self._accepted_pages(node, at // page_bytes)
        while node.start >= num_pages and node.parent is not None:
            node = node.parent
        return PrefixMatch(namespace, node, num_pages)

    def collect(self, node: Node, group: int, first: int, end: int) -> list[int]:
        """The pages ``[first, end)`` of a group on the path to ``node``; they must be intact."""
        parts: list[list[int]] = []
        step: Node | None = node
        while step is not None and step.end > first:
            pages, intact = step.pages[group], step.first_intact(group)  # pages[0] is page number ``intact``
            parts.append(pages[max(first - intact, 0) : max(end - intact, 0)])
            step = step.parent
        return [page for part in reversed(parts) for page in part]

    def _accepted_pages(self, node: Node, num_pages: int) -> int:
        """The longest hit of at most ``num_pages`` for which every group still has what it needs. Each group can only
        shorten it, so asking them in turn until all agree ends at the longest."""
        agreed = turn = 0
        while num_pages and agreed < len(self._windowed):
            intact = self._intact_pages(node, self._windowed[turn], num_pages)
            agreed = agreed + 1 if intact == num_pages else 1
            num_pages = intact
            turn = (turn + 1) % len(self._windowed)
        return num_pages

    def _intact_pages(self, node: Node, group: int, num_pages: int) -> int:
        """The longest hit of at most ``num_pages`` that one group accepts. Walks up from the end; ``[low, end)`` is the
        unbroken run of pages that ends at the candidate ``end``. At a gap (a tombstone) the node's start becomes the
        next candidate: within the node, what precedes its intact tail is gone."""
        first_needed = self._policies[group].first_needed
        end = low = num_pages
        step: Node | None = node
        while step is not None and end > 0:
            if step.start < end:
                intact = step.first_intact(group)
                low = min(low, intact)
                if low <= first_needed(end * self._page_size):
                    return end
                if low > step.start:
                    end = low = step.start
            step = step.parent
        return 0

    # -- holding, pinning ---------------------------------------------------------------------------------------

    def hold(self, match: PrefixMatch) -> Node:
        """The node that ends exactly where the match does, made by a split if need be; it stays until `release`. Its
        pages are guarded by `pin` alone."""
        node = match.node
        if node is None:
            node = self._roots.setdefault(
                match.namespace, Node(None, b"", 0, 0, [[] for _ in self._policies], match.namespace)
            )
        if match.num_pages < node.end:
            node = self._split(node, match.num_pages)
        node.holders += 1
        return node

    def release(self, node: Node) -> None:
        """Undo `hold`."""
        node.holders -= 1
        self._prune(node)

    def pin(self, group: int, pages: list[int]) -> None:
        """Guard pages of the tree against eviction, once more each."""
        refs, newly = self.refs[group], 0
        for page in pages:
            if refs[page] == 0:
                newly += 1
            refs[page] += 1
        self.num_evictable[group] -= newly

    def unpin(self, group: int, pages: list[int], node: Node, first: int) -> None:
        """Undo `pin` for ``pages``, which are the group's pages from page number ``first`` on, on the path to
        ``node``."""
        refs, freed = self.refs[group], 0
        for page in pages:
            refs[page] -= 1
            if refs[page] == 0:
                freed += 1
        self.num_evictable[group] += freed
        self._clock += 1
        queue, is_chained, end = self._queues[group], self._policies[group].is_chained, first + len(pages)
        step: Node | None = node
        while step is not None and step.end > first:
            if step.start < end:
                step.last_use = self._clock
                # Chained pages are evicted from leaves; `_prune` queues a parent when its last child is gone.
                if freed and not (is_chained and step.children):
                    queue.push(step)
            step = step.parent

    def count_unpinned(self, group: int, pages: list[int]) -> int:
        """How many of these pages of the tree are unpinned."""
        refs = self.refs[group]
        return sum(1 for page in pages if refs[page] == 0)

    # -- storing ------------------------------------------------------------------------------------------------

    def insert(self, node: Node, run: bytes, offers: list[list[int]]) -> tuple[Node, list[list[int]]]:
        """Store ``run`` (whole pages of tokens) below ``node``, which the caller holds; returns the node where it ends
        and, per group, the caller's pages that were not taken because the tree has them already.

        ``offers[g]`` are the caller's pages for the last ``len(offers[g])`` pages of the run. Afterwards they are the
        tree's pages for the same tokens, each pinned once for the caller: what the tree lacked it took, a tombstone
        included.
        """
        spare: list[list[int]] = [[] for _ in offers]
        base, end = node.end, node.end + len(run) // self._page_bytes
        while node.end < end:
            at = (node.end - base) * self._page_bytes
            child = node.children.get(run[at : at + self._page_bytes])
            if child is None:
                node = self._add_leaf(node, run[at:], end, offers)
                break
            common = count_common_pages(child.key, run, at, self._page_bytes)
            # The first page matched, so ``common`` is at least 1: the run and the node diverge behind it.
            if child.start + common < child.end:
                child = self._split(child, child.start + common)
            for group, offer in enumerate(offers):
                self._merge(child, group, offer, end, spare[group])
            node = child
        self.version += 1
        return node, spare

    def _add_leaf(self, parent: Node, key: bytes, end: int, offers: list[list[int]]) -> Node:
        length = end - parent.end
        pages = [offer[max(0, len(offer) - length) :] for offer in offers]
        leaf = Node(parent, key, parent.end, end, pages)
        leaf.last_use = self._clock
        parent.children[key[: self._page_bytes]] = leaf
        for refs, taken in zip(self.refs, pages, strict=True):
            for page in taken:
                refs[page] = 1
        return leaf

    def _merge(self, node: Node, group: int, offer: list[int], offer_end: int, spare: list[int]) -> None:
        """Merge an offer into a node with the same tokens: fill the node's tombstone from it, and put the node's pages
        in place of the offer's others, which go to ``spare``."""
        shift = offer_end - len(offer)  # the page number of offer[0]
        low, have = max(node.start, shift), node.first_intact(group)
        if low >= node.end:
            return
        if low < have:  # the node lacks [low, have), the offer has it
            taken = offer[low - shift : have - shift]
            node.pages[group][:0] = taken
            node.is_sound = False  # nobody has read these
            for page in taken:
                self.refs[group][page] = 1
        # Both have [max(low, have), node.end): the request goes on with the tree's pages, pinned for it.
        known = slice(max(low, have) - shift, node.end - shift)
        ours = node.pages[group][len(node.pages[group]) - (known.stop - known.start) :]
        spare += offer[known]
        offer[known] = ours
        self.pin(group, ours)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node before page ``at``; returns the new head. The old object becomes the tail, so that holdings that
        refer to it still end where it does."""
        parent = node.parent
        assert parent is not None and node.start < at < node.end
        cut = (at - node.start) * self._page_bytes
        heads = [pages[: max(0, len(pages) - (node.end - at))] for pages in node.pages]
        head = Node(parent, node.key[:cut], node.start, at, heads)
        head.last_use, head.is_sound = node.last_use, node.is_sound
        parent.children[node.key[: self._page_bytes]] = head
        node.parent, node.key, node.start = head, node.key[cut:], at
        node.pages = [pages[len(kept) :] for pages, kept in zip(node.pages, heads, strict=True)]
        head.children[node.key[: self._page_bytes]] = node
        for group in self._windowed:  # chained groups evict from leaves alone, and the head is none
            self._queues[group].push(head)
        return head

    # -- evicting -----------------------------------------------------------------------------------------------

    def evict(self, group: int, count: int) -> int:
        """Give up to ``count`` unpinned pages of a group back to its account, least recently used nodes first (LRU);
        returns how many. Cutting a leaf's tail also frees what the other groups have for the same tokens."""
        freed = 0
        is_chained, queue = self._policies[group].is_chained, self._queues[group]
        while freed < count and (node := queue.pop()) is not None:
            freed += (
                self._cut_tail(node, group, count - freed) if is_chained
                else self._drop_head(node, group, count - freed)
            )
        return freed

    def clear(self) -> bool:
        """Drop everything unpinned; returns whether nothing is left."""
        for group in range(len(self._policies)):
            self.evict(group, self.num_evictable[group])
        return not any(node.key for node in self.walk())

    def walk(self) -> Iterator[Node]:
        """All nodes, parents first, roots included."""
        return walk_below(self._roots.values())

    def _cut_tail(self, leaf: Node, group: int, most: int) -> int:
        """Evict at most ``most`` unpinned pages from the end of a leaf, in all groups: no use of one group's alone."""
        if leaf.children:
            return 0  # queued as a leaf, has grown since; it comes back when it is one again
        pages, refs = leaf.pages[group], self.refs[group]
        count, most = 0, min(most, len(pages))
        while count < most and refs[pages[-1 - count]] == 0:
            count += 1
        if count == 0:
            return 0
        # What is unpinned here is unpinned in every group: a request pins all groups up to the same end.
        for each, run in enumerate(leaf.pages):
            keep = max(0, len(run) - count)
            self._give_back(each, run[keep:])
            del run[keep:]
        if leaf.end - leaf.start > count:
            leaf.end -= count
            leaf.key = leaf.key[: (leaf.end - leaf.start) * self._page_bytes]
        self._prune(leaf)
        return count

    def _drop_head(self, node: Node, group: int, most: int) -> int:
        """Evict at most ``most`` unpinned pages from the head of a node's run in one group, leaving a tombstone."""
        pages, refs = node.pages[group], self.refs[group]
        count, most = 0, min(most, len(pages))
        while count < most and refs[pages[count]] == 0:
            count += 1
        self._give_back(group, pages[:count])
        del pages[:count]
        if count and pages:
            self._queues[group].push(node)
        self._prune(node)
        return count

    def _give_back(self, group: int, pages: list[int]) -> None:
        self.num_evictable[group] -= len(pages)
        self.num_evicted += len(pages)
        if self.on_evicted is not None:
            self.on_evicted(group, pages)
        self._accounts[group].give(pages)

    def _prune(self, node: Node) -> None:
        """Remove a node without children, holders and pages, and such ancestors; the one that stays may be a leaf."""
        while not (node.children or node.holders or any(node.pages)):
            parent = node.parent
            for queue in self._queues:
                queue.discard(node)
            if parent is None:
                self._roots.pop(node.namespace, None)
                return
            del parent.children[node.key[: self._page_bytes]]
            node = parent
        if not node.children:
            for group in self._chained:
                self._queues[group].push(node)


def note_sound(node: Node) -> None:
    """A request that read the whole prefix that ends at ``node`` got finite logits."""
    step: Node | None = node
    while step is not None:
        step.is_sound = True
        step = step.parent


def find_unsound(node: Node) -> Node | None:
    """The first node on the path to ``node`` of which nobody knows that it is sound; None if there is none."""
    top: Node | None = None
    step: Node | None = node
    while step is not None and step.parent is not None:
        top = top if step.is_sound else step
        step = step.parent
    return top


def forget_unsound(tree: PrefixTree, node: Node) -> int:
    """Drop the unpinned pages on the path to ``node`` from the first of which nobody knows that it is sound, and all
    below them; returns the number of that page."""
    top = find_unsound(node)
    for each in reversed(list(walk_below([top] if top is not None else []))):
        for group, policy in enumerate(tree._policies):
            if each.pages[group]:  # else it may have left the tree
                drop = tree._cut_tail if policy.is_chained else tree._drop_head
                drop(each, group, len(each.pages[group]))
    return node.end if top is None else top.start
