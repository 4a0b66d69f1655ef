"""The prefix tree by itself: matching, splitting, pins, tombstones and the order of eviction."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.cache import CacheSpec
from headrace.scheduling.cache.groups import FullPolicy, SlidingWindowPolicy
from headrace.scheduling.cache.node import count_common_pages
from headrace.scheduling.cache.pages import PageAccounts
from headrace.scheduling.cache.prefix_tree import PrefixMatch, PrefixTree

PAGE = 4


def as_bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Bench:
    """A tree with a full group and, if asked, a window group; stores and reads prefixes like a short-lived request."""

    def __init__(self, num_pages: int = 64, window: int = 0, page_size: int = PAGE):
        spec = CacheSpec("full", 1, 8, 8, "float32")
        self.page_size = page_size
        self.policies = [FullPolicy(spec, page_size)]
        if window:
            self.policies.append(
                SlidingWindowPolicy(CacheSpec("sliding_window", 1, 8, 8, "float32", window=window), page_size)
            )
        self.accounts = [PageAccounts(num_pages) for _ in self.policies]
        self.tree = PrefixTree(self.policies, page_size, self.accounts)

    def match(self, tokens: list[int], namespace: str = "") -> PrefixMatch:
        return self.tree.match(namespace, as_bytes(tokens))

    def hit(self, tokens: list[int], namespace: str = "") -> int:
        return self.match(tokens, namespace).num_pages * self.page_size

    def store(self, tokens: list[int], namespace: str = "") -> list[int]:
        """Compute and store whole pages of ``tokens``; returns the full group's pages for them."""
        tree, match = self.tree, self.match(tokens, namespace)
        opened = self.open(match)
        held, starts, tables = opened
        begin, end = held.end, len(tokens) // self.page_size
        offers = []
        for g, table in enumerate(tables):
            table += self.accounts[g].take(end - begin)
            offers.append(table[len(table) - (end - begin) :] if end > begin else [])
        node, spare = tree.insert(held, as_bytes(tokens[begin * self.page_size : end * self.page_size]), offers)
        assert not any(spare)
        node.holders += 1
        tree.release(held)
        for g, table in enumerate(tables):
            tree.unpin(g, table, node, starts[g])
        tree.release(node)
        return tables[0]

    def open(self, match: PrefixMatch):
        starts = [policy.first_needed(match.num_pages * self.page_size) for policy in self.policies]
        tables = [
            self.tree.collect(match.node, g, s, match.num_pages) if match.node else [] for g, s in enumerate(starts)
        ]
        for g, pages in enumerate(tables):
            self.tree.pin(g, pages)
        return self.tree.hold(match), starts, tables

    def close(self, opened) -> None:
        node, starts, tables = opened
        for g, table in enumerate(tables):
            self.tree.unpin(g, table, node, starts[g])
        self.tree.release(node)


def test_a_hit_is_whole_pages_of_the_longest_stored_prefix() -> None:
    bench = Bench()
    bench.store([1, 2, 3, 4, 5, 6, 7, 8])
    assert bench.hit([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]) == 8
    assert bench.hit([1, 2, 3, 4, 5, 6, 7, 9]) == 4
    assert bench.hit([1, 2, 3, 9]) == 0


def test_runs_split_at_page_borders_and_keep_their_pages() -> None:
    bench = Bench()
    first = bench.store([*range(12)])
    second = bench.store([*range(8), 90, 91, 92, 93])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert sorted((node.start, node.end) for node in bench.tree.walk()) == [(0, 0), (0, 2), (2, 3), (2, 3)]
    match = bench.match([*range(12)])
    assert bench.tree.collect(match.node, 0, 0, 3) == first


def test_namespaces_do_not_see_each_other_and_leave_nothing_behind() -> None:
    bench = Bench()
    bench.store([*range(8)], "a")
    assert (bench.hit([*range(8)], "a"), bench.hit([*range(8)], "b"), bench.hit([*range(8)])) == (8, 0, 0)
    assert bench.tree.clear() and list(bench.tree.walk()) == []


def test_the_least_recently_used_leaf_goes_first_and_from_its_tail() -> None:
    bench = Bench()
    old, new = [*range(100, 112)], [*range(200, 208)]
    bench.store(old)
    bench.store(new)
    assert bench.tree.evict(0, 1) == 1
    assert (bench.hit(old), bench.hit(new)) == (8, 8)
    bench.close(bench.open(bench.match(old)))  # now the old one was used last
    assert bench.tree.evict(0, 2) == 2
    assert (bench.hit(old), bench.hit(new)) == (8, 0)


def test_a_parent_goes_after_its_children() -> None:
    bench = Bench()
    bench.store([*range(8), 1, 1, 1, 1])
    bench.store([*range(8), 2, 2, 2, 2])
    assert bench.tree.evict(0, 3) == 3
    assert bench.hit([*range(8)]) == 4
    assert bench.tree.evict(0, 9) == 1 and list(bench.tree.walk()) == []
    assert bench.accounts[0].num_free == bench.accounts[0].capacity


def test_pinned_pages_stay() -> None:
    bench = Bench()
    bench.store([*range(16)])
    opened = bench.open(bench.match([*range(8)]))
    assert bench.tree.num_evictable == [2]
    assert bench.tree.evict(0, 99) == 2
    assert bench.hit([*range(16)]) == 8 and not bench.tree.clear()
    bench.close(opened)
    assert bench.tree.num_evictable == [2] and bench.tree.clear()


def test_duplicates_come_back_and_the_stored_pages_are_used() -> None:
    bench = Bench()
    kept = bench.store([*range(8)])
    node = bench.tree.hold(PrefixMatch("", None, 0))
    mine = bench.accounts[0].take(3)
    offers = [list(mine)]
    end, spare = bench.tree.insert(node, as_bytes([*range(12)]), offers)
    assert spare == [mine[:2]] and offers == [[*kept, mine[2]]] and end.end == 3


def test_a_window_group_needs_only_the_latest_pages_intact() -> None:
    bench = Bench(window=6)
    bench.store([*range(24)])
    assert bench.tree.evict(1, 4) == 4  # the head of the run: a tombstone, the last two pages stay
    assert bench.tree.num_evictable == [6, 2]
    assert bench.hit([*range(24)]) == 24
    assert bench.hit([*range(20)]) == 0
    assert bench.tree.evict(1, 1) == 1
    assert bench.hit([*range(24)]) == 0


def test_a_tombstone_is_healed_by_the_next_to_compute_it() -> None:
    bench = Bench(window=6)
    bench.store([*range(16)])
    bench.tree.evict(1, 4)
    assert bench.hit([*range(16)]) == 0
    node = bench.tree.hold(PrefixMatch("", next(bench.tree.walk()), 0))
    offers = [account.take(4) for account in bench.accounts]
    offers[1] = offers[1][1:]  # its first window page was let go already
    end, spare = bench.tree.insert(node, as_bytes([*range(16)]), offers)
    assert [len(pages) for pages in spare] == [4, 0]
    assert bench.hit([*range(16)]) == 16 and end.first_intact(1) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=12),
    st.lists(st.integers(0, 1), min_size=1, max_size=24)
)
def test_matching_agrees_with_a_set_of_prefixes(stored: list[list[int]], query: list[int]) -> None:
    bench, known = Bench(num_pages=400, page_size=2), set()
    for tokens in stored:
        bench.store(tokens)
        known |= {tuple(tokens[:end]) for end in range(0, len(tokens) + 1, 2)}
    query = query[: len(query) // 2 * 2]
    assert bench.hit(query) == max(
        (end for end in range(0, len(query) + 1, 2) if tuple(query[:end]) in known), default=0
    )
    num_stored = len(known) - 1
    assert bench.tree.num_evictable == [num_stored]
    assert sum(len(node.pages[0]) for node in bench.tree.walk()) == num_stored


@given(
    st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20), st.integers(0, 5),
    st.integers(1, 3)
)
def test_common_pages_are_counted_like_a_loop_would(run: list[int], tail: list[int], at: int, page: int) -> None:
    run = run[: len(run) // page * page]
    tokens = [9] * at + tail
    want = 0
    while (
        (want + 1) * page <= min(len(run), len(tail))
        and run[want * page : (want + 1) * page] == tail[want * page : (want + 1) * page]
    ):
        want += 1
    assert count_common_pages(as_bytes(run), as_bytes(tokens), at * 4, page * 4) == want
