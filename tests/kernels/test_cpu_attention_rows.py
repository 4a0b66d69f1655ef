"""A row of attention is one number, bit for bit, however it is computed: decoded alone or beside others, as a draft, in
a prompt cut anywhere, over a shared prefix, by any number of threads. Tiles of AMX, for prompts over pages of bfloat16
and int8, add in another order than decodes: there the number is close."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from attention_cases import Case, Problem, code_problem, make_problem
from cpu_isas import ISAS, isa  # noqa: F401
from devices import relative_error

from headrace.layers.attention.contract import AttentionInputs
from headrace.layers.attention.cpu import CpuAttention

LENGTH = 700
CASES = {
    "group-3": Case(((LENGTH, LENGTH),), num_heads=9, num_kv_heads=3),
    "one-kv-head": Case(((LENGTH, LENGTH),), num_heads=4, num_kv_heads=1, head_dim=128, has_sinks=True),
    "window": Case(((LENGTH, LENGTH),), num_heads=6, num_kv_heads=2, window=300),
    "narrow-window": Case(((LENGTH, LENGTH),), num_heads=2, num_kv_heads=2, window=37, page_size=32),
    "odd-dims": Case(((LENGTH, LENGTH),), num_heads=3, num_kv_heads=3, head_dim=40, value_dim=72, softcap=2.0,
                     page_size=64),
    "small-pages": Case(((LENGTH, LENGTH),), num_heads=7, num_kv_heads=1, head_dim=36, page_size=4),
    "group-8": Case(((LENGTH, LENGTH),), num_heads=8, num_kv_heads=1, head_dim=32, has_sinks=True, softcap=5.0,
                    window=450),
    "steep": Case(((LENGTH, LENGTH),), num_heads=10, num_kv_heads=2, steepness=40.0),
}
POSITIONS = (0, 1, 7, 15, 16, 31, 32, 63, 64, 95, 96, 97, 127, 128, 190, 191, 192, 255, 256, 287, 288, 301, 383, 384,
             449, 500, 576, 613, 697, 698, 699)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""Of pages; queries over int8 are float32."""


COMBINATIONS = [
    (name, case, dtype)
    for name in ISAS if name != "avxvnni"  # whose attention is AVX2's, one object
    for i, case in enumerate(CASES) for j, dtype in enumerate(DTYPES)
    # the slowest takes each case in two types and each type in half of the cases: vectors aside, it is the same code
    if name != "scalar" or (i + j) % 2 == 0
]
THREADS = (1, 2, 5)
CUTS = ((5, 2), (33, 5), (96, 1), (96, 2), (250, 5))
"""Tokens of each piece of a prompt, and threads that compute it."""


@pytest.fixture(autouse=True)
def threads_are_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def make(name: str, dtype: torch.dtype) -> Problem:
    """Drawn once for all instruction sets; tests leave it as it is."""
    if dtype == torch.int8:
        return code_problem(CASES[name], torch.float32)
    return make_problem(CASES[name], "cpu", dtype)


def run(problem: Problem, *spans: tuple[int, int]) -> list[torch.Tensor]:
    """Positions [first, end) of the prompt for each span, in one step: requests that share the prompt's pages."""
    inputs = problem.inputs
    starts = torch.tensor([0, *(end - first for first, end in spans)]).cumsum(0).int()
    kv_lens = torch.tensor([end for _, end in spans], dtype=torch.int32)
    inputs = AttentionInputs(
        int(starts[-1]), 0, [end - first for first, end in spans], kv_lens.tolist(), LENGTH, LENGTH, starts, kv_lens,
        inputs.page_table.expand(len(spans), -1), inputs.slots
    )
    q = torch.cat([problem.q[first:end] for first, end in spans])
    out = replace(problem, q=q, inputs=inputs).run(CpuAttention(problem.geometry, torch.device("cpu")))
    return list(out.split((starts[1:] - starts[:-1]).tolist()))


@cache
def decode_alone(name: str, dtype: torch.dtype, isa: str) -> dict[int, torch.Tensor]:  # noqa: F811
    """Each of `POSITIONS` by itself, by one thread; with this instruction set, which is in use."""
    problem = make(name, dtype)
    torch.set_num_threads(1)
    return {at: run(problem, (at, at + 1))[0][0] for at in POSITIONS}


def check(
    alone: dict[int, torch.Tensor], spans: list[tuple[int, int]], out: list[torch.Tensor], *, is_close: bool = False
) -> None:
    for (first, end), rows in zip(spans, out, strict=True):
        for at in range(first, end):
            if at in alone:
                row, place = rows[at - first], (at, first, end, torch.get_num_threads())
                if is_close:
                    assert relative_error(row, alone[at].double()) < 2e-2, place
                else:
                    assert torch.equal(row, alone[at]), place


def has_tiles(isa: str, dtype: torch.dtype) -> bool:  # noqa: F811
    """Whether prompts are tiles that add in an order of their own."""
    return isa == "amx" and dtype in (torch.bfloat16, torch.int8)


@pytest.mark.parametrize(("isa", "name", "dtype"), COMBINATIONS, indirect=["isa"], ids=str)
class TestOneRow:
    def test_a_prompt_gives_what_decodes_give(self, isa: str, name: str, dtype: torch.dtype):  # noqa: F811
        problem = make(name, dtype)
        alone, spans = decode_alone(name, dtype, isa), [(0, LENGTH)]
        for threads in THREADS:
            torch.set_num_threads(threads)
            check(alone, spans, run(problem, *spans), is_close=has_tiles(isa, dtype))

    def test_wherever_a_prompt_is_cut(self, isa: str, name: str, dtype: torch.dtype):  # noqa: F811
        problem = make(name, dtype)
        alone = decode_alone(name, dtype, isa)
        for size, threads in CUTS:
            torch.set_num_threads(threads)
            spans = [(first, min(first + size, LENGTH)) for first in range(0, LENGTH, size)]
            spans = [span for span in spans if any(first in range(*span) for first in POSITIONS)]
            check(alone, spans, [run(problem, span)[0] for span in spans], is_close=has_tiles(isa, dtype))

    def test_decodes_over_a_shared_prefix(self, isa: str, name: str, dtype: torch.dtype):  # noqa: F811
        """Requests of one query that share nothing, some, or nearly all of their pages, in one step."""
        problem = make(name, dtype)
        alone, spans = decode_alone(name, dtype, isa), [(at, at + 1) for at in POSITIONS]
        for threads in THREADS:
            torch.set_num_threads(threads)
            check(alone, spans, run(problem, *spans))

    def test_drafts_and_short_chunks_over_a_shared_prefix(self, isa: str, name: str, dtype: torch.dtype):  # noqa: F811
        problem = make(name, dtype)
        alone = decode_alone(name, dtype, isa)
        spans = [(at - n, at + 1) for n, at in zip((1, 2, 3, 4, 6, 9, 15, 0, 30), POSITIONS[-9:], strict=True)]
        for threads in THREADS:
            torch.set_num_threads(threads)
            check(alone, spans, run(problem, *spans), is_close=has_tiles(isa, dtype))
            check(alone, spans, [run(problem, span)[0] for span in spans], is_close=has_tiles(isa, dtype))
