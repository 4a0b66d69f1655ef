"""The benchmark of hot slots in whole steps: its synthetic choices are entries that rows have."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hot_streams import SyntheticChoice
from headrace.kernels.hot_slots import NONE, HotSlots, Loads
from headrace.kernels.hot_slots.reference import find_swaps
from headrace.kernels.sparse_attention import EntryView

CPU = torch.device("cpu")
ENTRIES, TOP_K, PER_PAGE, RATIO, SLOTS = 96, 8, 4, 4, 16


def choose(choice: SyntheticChoice, kv_lens: list[int], table: torch.Tensor | None = None) -> torch.Tensor:
    """Of a decode of each length; without a table, entries by their numbers."""
    count = len(kv_lens)
    if table is None:
        table = torch.arange(ENTRIES // PER_PAGE, dtype=torch.int32).expand(count, -1)
    visible = torch.tensor(kv_lens) // RATIO
    view = EntryView(table, torch.arange(count), visible, ENTRIES, count, [])
    # as captured: of lengths the host knows the longest alone, so that rows without entries select, too
    scores = torch.zeros(count, ENTRIES)
    return choice.select(scores, view, top_k=TOP_K, per_page=PER_PAGE, tokens=slice(0, count))


@pytest.mark.parametrize("kept", [0, 6, TOP_K])
def test_a_share_of_the_choices_stays(kept: int):
    choice = SyntheticChoice(CPU, ENTRIES, TOP_K)
    choice.kept.fill_(kept)
    first, second = (choose(choice, [RATIO * ENTRIES + 1])[0] for _ in range(2))
    assert (first == second).tolist() == [number < kept for number in range(TOP_K)]
    for chosen in (first, second):
        assert (chosen // (ENTRIES // TOP_K)).tolist() == list(range(TOP_K))


def test_choices_are_slots_of_a_request_s_pages():
    table = torch.randperm(2 * ENTRIES // PER_PAGE).to(torch.int32).view(2, -1)
    chosen = choose(SyntheticChoice(CPU, ENTRIES, TOP_K), [RATIO * ENTRIES + 1] * 2, table)
    for row in range(2):
        assert set((chosen[row] // PER_PAGE).tolist()) <= set(table[row].tolist())


def test_no_token_chooses_entries_that_it_does_not_see():
    chosen = choose(SyntheticChoice(CPU, ENTRIES, TOP_K), [1, RATIO * ENTRIES // 2, RATIO * ENTRIES])
    assert (chosen[0] == NONE).all() and (chosen[2] != NONE).all()
    seen = chosen[1][chosen[1] != NONE]
    assert len(seen) == TOP_K // 2 and (seen < ENTRIES // 2).all()


def test_recording_a_graph_touches_no_hot_slot():
    rows, choice = 3, SyntheticChoice(CPU, ENTRIES, TOP_K)
    hot = HotSlots.allocate(1, rows + 1, SLOTS, ENTRIES + 1, CPU, ratio=RATIO).layer(0)
    wanted = choose(choice, [1] * rows)  # null rows, the last one
    found, loads = torch.empty_like(wanted), Loads.allocate(rows, TOP_K, CPU)
    find_swaps(hot, torch.full((rows,), rows), wanted, torch.ones(rows, dtype=torch.int32), found, loads)
    assert (found == NONE).all() and not loads.counts.any() and (hot.entries == NONE).all()
