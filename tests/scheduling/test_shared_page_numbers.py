"""Groups that keep the same entries and have equally many pages hold equal page numbers, whatever comes and goes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.models.deepseek_v4 import family, layout
from headrace.scheduling.cache.ledger import CacheLedger

PAGE = 128
CHAINED, WINDOWED = (0, 1, 2), (3, 4)


def make_ledger(num_pages: int, window_pages: int) -> CacheLedger:
    """Two ratios of entries and index keys; a window and a state as long-lived."""
    assert family.FAMILY.name == "deepseek_v4"  # it registers the kinds
    specs = [
        CacheSpec(layout.ENTRIES, 1, 8, 8, "float32", compress_ratio=4),
        CacheSpec(layout.ENTRIES, 1, 8, 8, "float32", compress_ratio=128),
        CacheSpec(layout.INDEX_KEYS, 1, 8, 8, "float32", compress_ratio=4),
        CacheSpec(layout.WINDOW, 1, 8, 8, "float32", window=5),
        CacheSpec(layout.STATE, 1, 8, 8, "float32", window=8, compress_ratio=4),
    ]
    groups = [CacheGroup(spec, [i], num_pages if i in CHAINED else window_pages) for i, spec in enumerate(specs)]
    return CacheLedger(CacheLayout(PAGE, 8, 4096, groups), use_prefixes=True)


def tokens(stem: int, pages: int) -> bytes:
    return b"".join(np.full(PAGE, stem * 10 + min(i, 2 + stem), dtype=np.int32).tobytes() for i in range(pages))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 5)), max_size=25), st.integers(8, 16),
    st.integers(4, 10)
)
def test_equal_tables(visits: list[tuple[int, int, int]], num_pages: int, window_pages: int):
    """Requests come, grow page by page, store their pages, and leave when a later one needs room or at random."""
    ledger, running = make_ledger(num_pages, window_pages), []
    for stem, pages, leave in visits:
        run = tokens(stem, pages)
        holding = ledger.open(ledger.match("", run[: (pages - 1) * PAGE * 4]), pages * PAGE, force=not running)
        if holding is not None:
            for length in range(holding.capacity + PAGE, pages * PAGE + 1, PAGE):
                ledger.trim(holding, length - PAGE)
                if not ledger.reserve(1):
                    break
                ledger.grow(holding, length)
            done = holding.capacity // PAGE
            ledger.store(holding, run[holding.stored * PAGE * 4 : done * PAGE * 4])
            running.append(holding)
        for each in running:
            for group in CHAINED:
                assert each.tables[group] == each.tables[0]
            for group in WINDOWED:
                assert each.tables[group] == each.tables[WINDOWED[0]]
        while running and (leave or len(running) > 2):
            ledger.close(running.pop(leave % len(running)))
            leave = 0
    for holding in running:
        ledger.close(holding)
    assert ledger.tree.clear()
    assert all(account.num_free == account.capacity for account in ledger.accounts)
