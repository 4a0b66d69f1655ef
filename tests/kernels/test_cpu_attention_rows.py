"""A row of attention is one number whatever else is computed with it: threads, other requests, and drafts beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Problem, make_problem
from cpu_isas import isa  # noqa: F401

from headrace.layers.attention.cpu import CpuAttention

LENGTHS = (1, 31, 64, 255, 256, 257, 700, 1900)
CASES = {
    "group-3": Case(tuple((1, n) for n in LENGTHS), num_heads=9, num_kv_heads=3),
    "one-kv-head": Case(tuple((1, n) for n in LENGTHS), num_heads=4, num_kv_heads=1, head_dim=128, has_sinks=True),
    "window": Case(tuple((1, n) for n in LENGTHS), num_heads=6, num_kv_heads=2, window=300),
    "odd-dims": Case(tuple((1, n) for n in LENGTHS), num_heads=3, num_kv_heads=3, head_dim=40, value_dim=72,
                     softcap=2.0, page_size=64),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run_alone(problem: Problem, row: int, query_len: int) -> torch.Tensor:
    """The last ``query_len`` positions of a request of one query, which read as many keys fewer; by one thread."""
    inputs = problem.inputs
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        problem = replace(problem, q=problem.q[row : row + 1].expand(query_len, -1, -1).contiguous(), inputs=replace(
            inputs, query_start=torch.tensor([0, query_len], dtype=torch.int32), kv_lens=inputs.kv_lens[row : row + 1],
            page_table=inputs.page_table[row : row + 1],
        ))
        return problem.run(CpuAttention(problem.geometry, torch.device("cpu")))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_decode_does_not_depend_on_threads_or_other_requests(name: str, dtype: torch.dtype, threads: int):
    problem = make_problem(CASES[name], "cpu", dtype)
    together = problem.run(CpuAttention(problem.geometry, torch.device("cpu")))
    for row in range(len(LENGTHS)):
        assert torch.equal(together[row], run_alone(problem, row, 1)[0]), f"{threads} threads, {LENGTHS[row]} keys"


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_verified_drafts_are_computed_as_decodes(name: str, dtype: torch.dtype):
    """Four queries of a request in one call, each as if it came alone with the keys up to its own."""
    problem = make_problem(CASES[name], "cpu", dtype)
    for pages in (problem.pages.k, problem.pages.v):
        pages.nan_to_num_(nan=0.5)  # before the window of the last query lie keys of those before it
    inputs = problem.inputs
    for row, length in enumerate(LENGTHS):
        query_len = min(4, length)
        together = run_alone(problem, row, query_len)
        for i in range(query_len):
            shorter = inputs.kv_lens - (query_len - 1 - i)
            alone = run_alone(replace(problem, inputs=replace(inputs, kv_lens=shorter)), row, 1)
            assert torch.equal(together[i], alone[0])
