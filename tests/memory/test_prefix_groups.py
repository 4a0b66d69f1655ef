"""Groups of decodes that begin with the same pages: what is said of them is true, and what saves enough is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.sampling import SamplingSpec
from headrace.base.step import PageAppend, RowStart
from headrace.kernels.attention import LEAST_MEMBERS, PREFIX_STEP
from headrace.memory.prefix_groups import LEAST_DECODES, LEAST_KEYS, PrefixFinder

SPEC = CacheSpec("full", 1, 8, 8, "float32")
MAX_LEN = 4096


def make_finder(max_rows: int, page_size: int = 16, members: tuple[int, ...] = (16,)) -> PrefixFinder:
    groups = [CacheGroup(SPEC, [i], 10**6) for i in range(len(members))]
    return PrefixFinder(CacheLayout(page_size, max_rows, MAX_LEN, groups), list(members))


class Tables:
    """Page tables as a prefix tree gives them: pages of a request's own, behind those of others."""

    def __init__(self, finder: PrefixFinder, page_size: int, num_groups: int = 1):
        self.finder, self.page_size, self.num_groups = finder, page_size, num_groups
        self.pages: dict[int, list[int]] = {}
        self._next = 1

    def start(self, row: int, length: int, shared: list[int]) -> list[int]:
        """A row with ``length`` keys, of which full pages may be shared."""
        count = -(-length // self.page_size)
        shared = shared[: (length - 1) // self.page_size]
        own = list(range(self._next, self._next + count - len(shared)))
        self._next += len(own)
        self.pages[row] = shared + own
        begin = RowStart(row, f"r{row}", [1], 1, SamplingSpec())
        # the shared pages and the row's own come apart
        appends = [
            PageAppend(group, row, start, pages) for group in range(self.num_groups)
            for start, pages in ((0, shared), (len(shared), own)) if pages
        ]
        self.finder.note([begin], appends)
        return self.pages[row]


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]], bool]:
    """Page size, and of each row the number of its family, how many pages it shares with it, and its length."""
    page_size = draw(st.sampled_from([8, 16, 64, 128]))
    most = MAX_LEN // page_size
    count = draw(st.integers(LEAST_DECODES, 90))
    num_families = draw(st.integers(1, 12))
    begins = draw(st.lists(st.integers(0, most // 2), min_size=num_families, max_size=num_families))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(count):
        family = int(rng.integers(num_families))
        shared = begins[family] if rng.random() < 0.8 else int(rng.integers(0, most // 2))
        rows.append((family, shared, int(rng.integers(1, MAX_LEN // 2))))
    return page_size, rows, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(batches())
def test_groups_have_their_keys_in_the_same_pages(batch):
    page_size, wanted, sorts = batch
    finder = make_finder(len(wanted), page_size)
    tables = Tables(finder, page_size)
    # families branch off one another: pages of the first half of a family are those of all
    trunk = [10**5 + i for i in range(MAX_LEN // page_size)]
    stems = {}
    for row, (family, shared, length) in enumerate(wanted):
        stem = stems.setdefault(family, [
            *trunk[: family * 3], *range((family + 2) * 10**5, (family + 2) * 10**5 + MAX_LEN // page_size)
        ])
        tables.start(row, length, stem[:shared])
    rows = np.random.default_rng(len(wanted)).permutation(len(wanted))
    ends = np.array([wanted[row][2] for row in rows])
    found = finder.find(rows, ends, sorts=sorts)
    if found is None:
        return
    assert (found.order is not None) == sorts
    if found.order is not None:
        assert sorted(found.order) == list(range(len(rows)))
        rows, ends = rows[found.order], ends[found.order]
    grouped = np.zeros(len(rows), dtype=bool)
    stop = 0
    for first, count in found.groups:
        assert first >= stop and LEAST_MEMBERS <= count <= 16
        stop = first + count
        grouped[first:stop] = True
        keys = found.keys[first]
        assert keys >= LEAST_KEYS and keys % PREFIX_STEP == 0 and (found.keys[first:stop] == keys).all()
        assert (keys < ends[first:stop]).all()
        num_pages = -(-keys // page_size)
        assert len({tuple(tables.pages[int(row)][:num_pages]) for row in rows[first:stop]}) == 1
    assert not found.keys[~grouped].any()
    packed = found.pack(96)
    assert list(packed[: len(rows)]) == list(found.keys) and not packed[len(rows) : 96].any()
    assert packed[96 : 96 + found.groups.size].tolist() == found.groups.ravel().tolist()
    assert not packed[96 + found.groups.size :].any()


def shared_rows(finder: PrefixFinder, page_size: int, sizes: list[int], begin: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in families that begin with as many pages of their own each, dealt in turns; returns rows and lengths."""
    tables, ends, waiting, row = Tables(finder, page_size), [], list(sizes), 0
    while any(waiting):
        for family, left in enumerate(waiting):
            if left:
                waiting[family] -= 1
                stem = list(range((family + 1) * 10**5, (family + 1) * 10**5 + begin))
                ends.append(begin * page_size + 1 + 7 * row % 60)
                tables.start(row, ends[-1], stem)
                row += 1
    return np.arange(row), np.array(ends)


@pytest.mark.parametrize(("sizes", "expected"), [
    ([64], [16, 16, 16, 16]), ([50], [12, 13, 12, 13]), ([16, 17, 17], [16, 8, 9, 8, 9]),
    ([20, 20, 3, 21], [10, 10, 10, 10, 10, 11]), ([4] * 12, [4] * 12), ([3] * 20, None), ([16], [16]), ([15], None),
    ([1] * 64, None),
])
def test_families_are_put_side_by_side_and_divided_equally(sizes, expected):
    finder = make_finder(64)
    rows, ends = shared_rows(finder, 16, sizes, begin=64)
    found = finder.find(rows, ends, sorts=True)
    if expected is None:
        assert found is None
    else:
        assert sorted(found.groups[:, 1].tolist()) == sorted(expected)
        assert set(found.keys.tolist()) <= {0, 1024}
    # one behind the other only where they are anyway
    in_turns = finder.find(rows, ends, sorts=False)
    assert (in_turns is None) == (expected is None or len(sizes) > 1)


def test_little_in_common_is_none():
    """Less than half of two neighbours, or too little of the step."""
    finder = make_finder(64)
    tables, stem = Tables(finder, 16), list(range(10**5, 10**5 + 32))  # 512 keys
    for row in range(64):
        tables.start(row, 1100, stem)
    assert finder.find(np.arange(64), np.full(64, 1100), sorts=True) is None
    assert finder.find(np.arange(64), np.full(64, 1000), sorts=True) is not None
    for row in range(40):
        tables.start(row, 1000, [])
    assert finder.find(np.arange(64), np.full(64, 1000), sorts=True) is None


@pytest.mark.parametrize(("count", "begin", "is_found"), [
    (16, 1024, True), (16, 512, False), (15, 2048, False), (64, 512, True), (64, 256, False),
])
def test_a_second_launch_must_pay(count, begin, is_found):
    finder = make_finder(64)
    rows, ends = shared_rows(finder, 16, [count], begin // 16)
    assert (finder.find(rows, ends, sorts=True) is not None) == is_found


def test_a_long_rest_is_read_by_one_program():
    """Beside 15 others, of keys that are not in common, it would take longer than what is saved."""
    finder = make_finder(64)
    rows, ends = shared_rows(finder, 16, [16], 128)
    tables = Tables(finder, 16)
    for length, is_found in ((200, True), (1500, False)):
        tables.start(16, length, [])
        found = finder.find(np.append(rows, 16), np.append(ends, length), sorts=True)
        assert (found is not None) == is_found


def test_a_page_that_was_replaced():
    """Pages behind it are no longer in common."""
    finder = make_finder(64)
    tables, stem = Tables(finder, 16), list(range(10**5, 10**5 + 64))
    for row in range(64):
        tables.start(row, 1030, stem)
    rows, ends = np.arange(64), np.full(64, 1030)
    found = finder.find(rows, ends, sorts=True)
    assert found.keys.tolist() == [1024] * 64 and not finder.has_changed
    finder.note([], [PageAppend(0, row, 65, [9 * 10**5 + row]) for row in range(64)])
    assert not finder.has_changed, "a page behind the others"
    finder.note([], [PageAppend(0, 5, 40, [7])])
    assert finder.has_changed
    found = finder.find(rows, ends, sorts=False)
    assert not finder.has_changed
    assert found.keys.tolist() == [640] * 16 + [1024] * 48


def test_pages_of_all_tables_that_have_a_use_for_it():
    """Several cache groups: what is in common in one and not in the other is not; a window's table is not asked."""
    finder = make_finder(64, members=(16, 0, 8))
    for row in range(64):
        finder.note([], [
            PageAppend(0, row, 0, [*range(1, 49), 100 + row]), PageAppend(1, row, 0, [row] * 49),
            PageAppend(2, row, 0, [*range(1, 29), *range(1000 + 21 * row, 1021 + 21 * row)]),
        ])
    found = finder.find(np.arange(64), np.full(64, 776), sorts=True)
    assert found.keys.tolist() == [448] * 64
    assert found.groups[:, 1].tolist() == [8] * 8
