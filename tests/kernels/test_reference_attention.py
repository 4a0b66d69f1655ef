"""The plain-torch paged backend against attention written out request by request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention.reference import attend_densely
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages

CPU = torch.device("cpu")


class Case:
    """Requests of given ``(query_len, kv_len)`` with their keys and values in shuffled pages; every place that no
    request owns is NaN."""

    def __init__(
        self, lens: list[tuple[int, int]], *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16,
        page_size: int = 4, window: int = 0, softcap: float = 0.0, has_sinks: bool = False
    ):
        self.lens = sorted(lens, key=lambda pair: pair[0] > 1)
        self.query_lens, self.kv_lens = [q for q, _ in self.lens], [kv for _, kv in self.lens]
        counts = [-(-kv // page_size) for kv in self.kv_lens]
        ids = random.Random(7).sample(range(1, 1 + sum(counts)), sum(counts))
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        shape = (1 + sum(counts), page_size, num_kv_heads, head_dim)
        self.pages = KvPages(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        self.keys = [torch.randn(kv, num_kv_heads, head_dim) for kv in self.kv_lens]
        self.values = [torch.randn(kv, num_kv_heads, head_dim) for kv in self.kv_lens]
        for table, k, v in zip(tables, self.keys, self.values, strict=True):
            for at in range(len(k)):
                self.pages.k[table[at // page_size], at % page_size] = k[at]
                self.pages.v[table[at // page_size], at % page_size] = v[at]
        self.q = torch.randn(sum(self.query_lens), num_heads, head_dim)
        # A row's entries beyond its own pages are another's leavings.
        self.page_table = torch.tensor(
            [table + [ids_left % shape[0] for ids_left in range(max(counts) - len(table))] for table in tables],
            dtype=torch.int32
        )
        self.params = AttentionParams(0.21, window, softcap, torch.randn(num_heads) if has_sinks else None)
        geometry = AttentionGeometry(
            "cpu", "float32", "float32", (0, 0), num_heads, num_kv_heads, head_dim, head_dim, page_size, window,
            softcap > 0, has_sinks
        )
        self.backend = ATTENTION_BACKENDS.choose(geometry, "reference")(geometry, CPU)

    def inputs(self) -> AttentionInputs:
        return AttentionInputs(
            num_tokens=len(self.q), num_decodes=self.query_lens.count(1), query_lens_cpu=self.query_lens,
            kv_lens_cpu=self.kv_lens, max_query_len=max(self.query_lens), max_kv_len=max(self.kv_lens),
            query_start=torch.tensor([0, *self.query_lens]).cumsum(0).int(),
            kv_lens=torch.tensor(self.kv_lens, dtype=torch.int32), page_table=self.page_table,
            slots=torch.empty(0, dtype=torch.int64),
        )

    def check(self, inputs: AttentionInputs | None = None) -> None:
        self.backend.prepare(inputs or self.inputs())
        ours = self.backend.attend(self.q, self.pages, self.params)
        pieces = zip(self.q.split(self.query_lens), self.keys, self.values, strict=True)
        p = self.params
        expected = [
            attend_densely(q, k, v, scale=p.scale, window=p.window, softcap=p.softcap, sinks=p.sinks) for q, k,
            v in pieces
        ]
        torch.testing.assert_close(ours, torch.cat(expected), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("window", [0, 5])
def test_head_shapes(head_dim: int, num_heads: int, num_kv_heads: int, window: int):
    Case(
        [(1, 9), (1, 1), (6, 6), (3, 14)], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        window=window
    ).check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [0, 1, 9, 300])
def test_decodes_of_very_different_lengths(page_size: int, window: int):
    Case([(1, kv) for kv in (1, 2, 500, 17, 16, 33, 499)], page_size=page_size, window=window).check()


@pytest.mark.parametrize("window", [0, 40, 300, 1000])
@pytest.mark.parametrize("lens", [(600, 600), (300, 700), (257, 258), (1, 300)])
def test_long_prefills_are_tiled(window: int, lens: tuple[int, int]):
    Case([lens, (2, 5)], window=window, num_heads=2, num_kv_heads=1).check()


@pytest.mark.parametrize(("softcap", "has_sinks"), [(1.5, False), (0.0, True), (1.5, True)])
@pytest.mark.parametrize("window", [0, 4])
def test_softcap_and_sinks(softcap: float, has_sinks: bool, window: int):
    Case([(1, 9), (1, 30), (6, 6), (3, 14)], softcap=softcap, has_sinks=has_sinks, window=window).check()


request_lens = st.integers(1, 40).flatmap(lambda kv: st.tuples(st.integers(1, kv), st.just(kv)))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(request_lens, min_size=1, max_size=6), page_size=st.sampled_from([1, 2, 4, 16]),
    window=st.sampled_from([0, 1, 3, 8, 64])
)
def test_any_mixture(lens: list[tuple[int, int]], page_size: int, window: int):
    Case(lens, page_size=page_size, window=window).check()


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (0, 1.5), (7, 1.5)])
def test_lengths_of_the_host_are_bounds(window: int, softcap: float):
    """It counts drafts as accepted that may not be: what lies behind the device's length is not seen."""
    case = Case([(1, 9), (1, 30), (1, 4), (5, 12)], window=window, softcap=softcap)
    inputs = case.inputs()
    bounds = [length + 5 if row < inputs.num_decodes else length for row, length in enumerate(case.kv_lens)]
    case.page_table = torch.cat((case.page_table, case.page_table[:, :2]), dim=1)  # pages that the bounds take
    case.check(replace(inputs, kv_lens_cpu=bounds, max_kv_len=max(bounds), page_table=case.page_table))


def test_window_never_reads_pages_it_has_left():
    """Pages before the window are freed and written by others; their table entries are the null page."""
    case = Case([(1, 33), (5, 30)], window=6, page_size=4)
    for row, (query_len, kv_len) in enumerate(case.lens):
        gone = max(0, kv_len - query_len - 6 + 1) // 4
        case.page_table[row, :gone] = 0
    case.check()


def test_pages_of_a_narrower_type():
    case = Case([(1, 9), (4, 12)])
    exact = [case.pages.k, case.pages.v]
    case.keys, case.values = ([t.bfloat16().float() for t in ts] for ts in (case.keys, case.values))
    case.pages.k, case.pages.v = (t.bfloat16() for t in exact)
    case.check()
