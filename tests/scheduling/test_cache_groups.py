"""Group policies against brute force over positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.scheduling.cache.groups import GROUP_POLICIES
from headrace.scheduling.cache.pages import PageAccounts


def make_policy(kind: str, page_size: int, window: int = 0):
    return GROUP_POLICIES.load(kind)(CacheSpec(kind, 1, 8, 8, "float32", window=window), page_size)


@given(length=st.integers(0, 200), window=st.integers(1, 70), page_size=st.sampled_from([1, 2, 4, 16]))
def test_a_window_needs_the_pages_of_the_positions_it_reads(length: int, window: int, page_size: int) -> None:
    policy = make_policy("sliding_window", page_size, window)
    read = range(max(0, length - window + 1), length + 1)
    assert policy.first_needed(length) == read[0] // page_size
    assert all(policy.first_needed(later) >= policy.first_needed(length) for later in range(length, length + 5))


@given(length=st.integers(1, 150), window=st.integers(1, 70), page_size=st.sampled_from([1, 2, 4, 16]))
def test_window_peak_is_what_growing_page_by_page_holds(length: int, window: int, page_size: int) -> None:
    policy = make_policy("sliding_window", page_size, window)
    held = [begin // page_size + 1 - policy.first_needed(begin - begin % page_size) for begin in range(length)]
    assert policy.peak_pages(length) == max(held)


def test_full_attention_keeps_everything() -> None:
    policy = make_policy("full", 4)
    assert [policy.first_needed(n) for n in (0, 5, 99)] == [0, 0, 0]
    assert [policy.peak_pages(n) for n in (1, 4, 5)] == [1, 1, 2]


def test_a_window_group_without_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        make_policy("sliding_window", 4)


def test_the_null_page_is_never_handed_out() -> None:
    account = PageAccounts(5)
    pages = account.take(4)
    assert sorted(pages) == [1, 2, 3, 4] and account.num_free == 0
    with pytest.raises(AssertionError):
        account.take(1)
    account.give(pages[:2])
    assert account.take(2) == pages[:2]
