"""Audits: every page, row and request is accounted for exactly once. O(all pages and tokens): for tests and after
failures, not for the step loop.
"""

from __future__ import annotations

from collections import Counter

from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.cache.node import Node
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Request, State
from headrace.scheduling.running import RunningSet


def audit_requests(running: RunningSet, queue: WaitingQueue) -> None:
    """Each request is prefilling, decoding, queued, following, held or waiting for its adapter; each row is free or has
    one request."""
    rows = []
    for request in running.requests.values():
        where = (
            request in running.prefilling, request in running.decoding, request in running.awaiting, request in queue,
            request.leader is not None, request in running.held, request in running.adapters.waiting
        )
        assert sum(where) == 1, f"{request} is in {sum(where)} places: {where}"
        assert request.is_running == any(where[:3]) == (request.holding is not None), request
        assert where[2] == bool(request.is_running and request.holding.arriving), request
        assert bool(request.tickets) == where[2] or request in running.held, request
        assert request.state != State.FINISHED, request
        if request.is_running:
            rows.append(request.row)
            assert (
                request.cached_len <= request.computed_len <= request.planned_len
                <= max(request.goal_len, request.limit_len)
            ), request
        if request.leader is not None:
            assert request.leader.is_running and request in request.leader.followers, (
                f"{request} follows {request.leader}, which does not run"
            )
    running.adapters.check(list(running))
    free = running.free_rows()
    assert sorted(rows + free) == list(range(running.num_rows)), f"rows in use {sorted(rows)}, free {sorted(free)}"


def audit_pages(ledger: CacheLedger, running_set: RunningSet) -> None:
    """Each page is free, in one holding, or in the tree; pins, promises and evictable counts are what they should
    be."""
    running = list(running_set)
    nodes = list(ledger.tree.walk())
    _audit_nodes(ledger, nodes, running)
    for group, account in enumerate(ledger.accounts):
        in_tree = [page for node in nodes for page in node.pages[group]]
        owned: list[int] = []
        pins: Counter[int] = Counter()
        for request in running:
            holding = request.holding
            table, first, stored = holding.tables[group], holding.firsts[group], holding.stored
            assert not any(table[:first]), f"{request} still lists freed pages"
            assert holding.capacity == len(table) * ledger.page_size >= request.planned_len, request
            pinned = table[first : max(first, stored)]
            assert pinned == (ledger.tree.collect(holding.node, group, first, stored) if stored > first else []), (
                request
            )
            pins.update(pinned)
            # Entries behind the stored prefix are the request's own; those before it were checked as pins.
            owned += table[max(first, stored) :]
        limbo = [page for own_group, pages in ledger.limbo.values() if own_group == group for page in pages]
        everything = sorted(account.free_pages() + owned + in_tree + limbo)
        assert everything == list(range(1, account.num_pages)), (
            f"group {group}: pages lost, shared or doubled: {everything}"
        )
        refs = ledger.tree.refs[group]
        assert all(refs[page] == pins[page] for page in in_tree), f"group {group}: wrong pins"
        assert ledger.tree.num_evictable[group] == sum(1 for page in in_tree if not refs[page]), (
            f"group {group}: wrong evictable count"
        )
        assert ledger.promised[group] == sum(r.holding.num_promised(group) for r in running), (
            f"group {group}: wrong promises"
        )


def _audit_nodes(ledger: CacheLedger, nodes: list[Node], running: list[Request]) -> None:
    page_bytes = 4 * ledger.page_size
    holders = Counter(id(request.holding.node) for request in running)
    for node in nodes:
        assert node.holders == holders[id(node)], f"node [{node.start}, {node.end}) counts {node.holders} holders"
        assert len(node.key) == (node.end - node.start) * page_bytes
        for key, child in node.children.items():
            assert child.parent is node and child.start == node.end and child.key[:page_bytes] == key
        for pages, policy in zip(node.pages, ledger.policies, strict=True):
            assert len(pages) <= node.end - node.start
            assert not policy.is_chained or len(pages) == node.end - node.start
        assert node.children or node.holders or any(node.pages), "a node that stores nothing was left in the tree"
