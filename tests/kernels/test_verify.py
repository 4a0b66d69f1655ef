"""Decode entries and drafts: the reference against plain Python, the Triton kernels against the reference."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.step import MAX_DRAFTS
from headrace.kernels.verify import DecodeInputs, RowTensors, cpu
from headrace.kernels.verify import reference as reference_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def solutions() -> list[Any]:
    return ["reference", "triton"]


def checkers() -> list[str]:
    """Solutions of what is done with drafts."""
    return [*solutions(), *(["cpu"] if DEVICE == "cpu" else [])]


def load(name: str) -> Any:
    if name != "triton":
        return reference_kernels if name == "reference" else cpu
    pytest.importorskip("triton")
    from headrace.kernels.verify import triton

    return triton


def random_rows(count: int, seed: int, longest: int = 50, vocab: int = 3) -> RowTensors:
    """Rows with few different tokens, so that drafts are often right; the last is the null row."""
    generator = torch.Generator().manual_seed(seed)
    rows = RowTensors(
        torch.randint(0, vocab, (count + 1,), generator=generator),
        torch.randint(0, longest, (count + 1,), generator=generator),
        torch.randint(-1, vocab, (count + 1, MAX_DRAFTS), generator=generator),
    )
    rows.computed_len[-1] = 0
    return RowTensors(*(part.to(DEVICE) for part in (rows.last_token, rows.computed_len, rows.drafts)))


def entries_of(spans: list[tuple[int, int]]) -> torch.Tensor:
    """Entries of ``(row, drafts)``."""
    pairs = [(row, offset) for row, count in spans for offset in range(count + 1)]
    return torch.tensor(pairs, device=DEVICE).T.contiguous()


def random_spans(count: int, seed: int, *, padding: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    chosen = random.permutation(count)[: random.integers(1, count + 1)]
    return [*((int(row), int(random.choice((0, 0, 1, 2, 5, MAX_DRAFTS)))) for row in chosen), *[(count, 0)] * padding]


@pytest.mark.parametrize("solution", solutions())
@pytest.mark.parametrize(("groups", "page_size", "seed"), [(1, 16, 0), (2, 4, 1), (1, 64, 2)])
def test_inputs_of_entries(solution: str, groups: int, page_size: int, seed: int):
    rows, entries = random_rows(5, seed, longest=40 * page_size), entries_of(random_spans(5, seed, padding=2))
    tables = torch.randint(0, 9000, (groups, 6, 700), dtype=torch.int32).to(DEVICE)
    out = DecodeInputs.allocate(entries.shape[1], tables)
    load(solution).decode_inputs(entries, rows, tables, page_size, out)
    for i, (row, offset) in enumerate(entries.T.tolist()):
        position = int(rows.computed_len[row]) + offset
        token = int(rows.last_token[row]) if offset == 0 else max(0, int(rows.drafts[row, offset - 1]))
        assert (int(out.token_ids[i]), int(out.positions[i]), int(out.kv_lens[i])) == (token, position, position + 1)
        used = position // page_size + 1
        for group in range(groups):
            page = int(tables[group, row, position // page_size])
            assert out.slots[group, i] == page * page_size + position % page_size
            assert torch.equal(out.page_tables[group, i, :used], tables[group, row, :used])
    if solution == "triton":
        assert not out.page_tables[:, :, 300:].any(), "columns that nobody uses are not copied"


@pytest.mark.parametrize("solution", checkers())
@pytest.mark.parametrize("seed", range(6))
def test_drafts_count_up_to_the_first_wrong_one(solution: str, seed: int):
    rows, spans = random_rows(6, seed), random_spans(6, seed, padding=seed % 3)
    entries = entries_of(spans)
    before = copy.deepcopy(rows)
    positions = rows.computed_len[entries[0]] + entries[1]
    size = entries.shape[1]
    sampled = torch.stack((torch.randint(0, 3, (size,)), torch.randint(0, 2, (size,)))).to(DEVICE)
    most = max(count for _, count in spans)
    out = load(solution).accept(sampled, entries, positions, rows, most)
    assert torch.equal(out[:2], sampled) and torch.equal(rows.drafts, before.drafts)
    at, last, lengths = 0, before.last_token.tolist(), before.computed_len.tolist()
    for row, count in spans:
        ids, right = sampled[0, at : at + count + 1].tolist(), 0
        while right < count and int(before.drafts[row, right]) == ids[right]:
            right += 1
        assert out[2, at : at + count + 1].tolist() == [right + 1] * (count + 1)
        if row < 6:
            last[row], lengths[row] = ids[right], lengths[row] + right + 1
        at += count + 1
    assert rows.last_token[:-1].tolist() == last[:-1] and rows.computed_len.tolist() == lengths
    if not most:
        assert not rows.computed_len[-1]


@pytest.mark.parametrize("solution", checkers())
def test_a_guess_is_placed_where_the_row_stands(solution: str):
    rows = random_rows(9, 0)
    rows.last_token[:], rows.computed_len[:] = 5, 10  # the next token is at 11
    none = [-1] * MAX_DRAFTS
    cases = {
        (11, 7, 8, 9): [7, 8, 9], (10, 5, 8, 9): [8, 9], (8, 0, 1, 5, 9): [9], (9, 0, 5): [], (10, 6, 8, 9): [],
        (12, 7, 8): [], (3, 1, 2): [], (9, 5, 4, 9): [],
    }
    width = max(map(len, cases)) - 1
    guesses = [[row, case[0], *case[1:], *[-1] * (width - len(case) + 1)] for row, case in enumerate(cases)]
    untouched = rows.drafts[8].tolist()
    load(solution).place_drafts(torch.tensor(guesses, device=DEVICE), rows)
    for row, wanted in enumerate(cases.values()):
        assert rows.drafts[row].tolist() == [*wanted, *none[len(wanted) :]], guesses[row]
    assert rows.drafts[8].tolist() == untouched
    long = [[0, 11, *range(MAX_DRAFTS + 9)]]
    load(solution).place_drafts(torch.tensor(long, device=DEVICE), rows)
    assert rows.drafts[0].tolist() == list(range(MAX_DRAFTS)), "no more than there is room for"
