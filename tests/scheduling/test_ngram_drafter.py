"""The n-gram drafter against a search that looks at every position."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.speculation import SpeculativeOptions
from headrace.scheduling.speculation import ngram
from headrace.scheduling.speculation.drafter import DrafterOptions, make_text_drafter
from headrace.scheduling.speculation.ngram import NgramDrafter

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def search(known: list[int], continuation: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """Every n from the longest down, every earlier end from the latest down; O(n^2)."""
    tokens = known + continuation
    for n in range(longest, shortest - 1, -1):
        for end in range(len(known) - 1, n - 1, -1):
            if len(tokens) >= n and known[end - n : end] == tokens[len(tokens) - n :]:
                found = list(tokens)
                for i in range(most):
                    found.append(found[end + i])
                return found[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    prompt=TOKENS, outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8),
    shortest=st.integers(1, 3), more=st.integers(0, 3), most=st.integers(1, 9), continuation=st.lists(
        st.integers(0, 2), max_size=3
    )
)
def test_finds_what_a_full_search_finds(
    prompt: list[int], outputs: list[list[int]], shortest: int, more: int, most: int, continuation: list[int]
):
    drafter = NgramDrafter(DrafterOptions(prompt_lookup_min=shortest, prompt_lookup_max=shortest + more))
    drafter.start(7, prompt)
    known = list(prompt)
    for new_ids in [*outputs, []]:
        for assumed in ([], continuation):
            proposal = drafter.propose(7, most, assumed)
            assert proposal.token_ids == search(known, assumed, shortest, shortest + more, most)
            assert len(proposal.probabilities) == len(proposal.token_ids)
            assert all(0.0 < p < 1.0 for p in proposal.probabilities)
        drafter.append(7, new_ids)
        known += new_ids


def test_a_long_prompt_is_indexed_in_slices(monkeypatch):
    monkeypatch.setattr(ngram, "SLICE", 100)
    drafter = NgramDrafter(DrafterOptions(prompt_lookup_min=3, prompt_lookup_max=3))
    # The match is at position 250 of 1,000: three slices are needed to see it, and none of them sees more.
    prompt = [*range(1000), 250, 251, 252]
    drafter.start(0, prompt)
    found = [drafter.propose(0, 2).token_ids for _ in range(4)]
    assert found == [[], [], [253, 254], [253, 254]]


def test_requests_do_not_see_each_other():
    drafter = NgramDrafter(DrafterOptions(prompt_lookup_min=2, prompt_lookup_max=2))
    drafter.start(0, [1, 2, 3, 4, 5])
    drafter.start(1, [8, 1, 2])
    assert drafter.propose(1, 3).token_ids == []
    drafter.stop(0)
    drafter.start(0, [8, 1, 2])
    assert drafter.propose(0, 3).token_ids == []


def test_a_drafter_is_made_from_the_users_options():
    drafter = make_text_drafter("ngram", SpeculativeOptions(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    assert isinstance(drafter, NgramDrafter)
    drafter.start(0, [1, 2, 9, 4, 1, 2])
    assert drafter.propose(0, 1).token_ids == [9]
    strict = make_text_drafter("ngram", SpeculativeOptions(method="ngram"))
    strict.start(0, [1, 2, 9, 4, 1, 2])
    assert strict.propose(0, 1).token_ids == []
