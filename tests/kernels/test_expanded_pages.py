"""Pages of 8-bit floats expanded for chunks: which, where, and attention over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make_problem

pytest.importorskip("triton")

from headrace.kernels.attention import expanded, hopper
from headrace.kernels.attention import prefill as in_triton
from headrace.kernels.attention.expanded import ExpandedPages
from headrace.layers.attention import ATTENTION_BACKENDS, reason_against_expanding
from headrace.layers.attention.contract import AttentionGeometry
from headrace.layers.attention.expanded import ExpandingAttention

E4M3, CPU = torch.float8_e4m3fn, torch.device("cpu")
MIXED = ((1, 1), (1, 75), (7, 7), (20, 75), (3, 64), (130, 300))
SHAPE = dict(num_heads=8, num_kv_heads=2, head_dim=128, page_size=64)
CASES = {
    "mixed": Case(MIXED, **SHAPE),
    "small-pages": Case(MIXED, **SHAPE | {"page_size": 8}),
    "dim-64": Case(MIXED, **SHAPE | {"head_dim": 64, "num_heads": 14}),
    "window": Case(((1, 90), (64, 400), (30, 650)), **SHAPE | {"head_dim": 64}, window=128, has_sinks=True),
    "softcap": Case(MIXED, **SHAPE, softcap=2.0),
}
H200 = AttentionGeometry("cuda", "bfloat16", "float8_e4m3fn", (9, 0), 32, 8, 128, 128, 64)


@pytest.mark.interpreted
@pytest.mark.parametrize(("window", "first"), [(0, 0), (0, 2), (9, 0), (40, 1)])
def test_pages_that_chunks_read(window: int, first: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expanded, "BLOCK", 64)  # several programs a page, the last one not full
    query_lens, kv_lens, page = [1, 1, 5, 30], [17, 64, 5, 100], 16
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(40, 2, page, 2, 3, generator=generator).to(E4M3)  # keys and values of a page side by side
    k, v = pool[:, 0], pool[:, 1]
    table = (torch.randperm(39, generator=generator)[:28] + 1).view(4, 7).to(torch.int32)
    pages = ExpandedPages(page, 2, 3, torch.float16, CPU, room_bytes=2 * 2 * 15 * page * 6)
    pages.k.fill_(float("nan"))
    pages.v.fill_(float("nan"))
    step = pages.plan(query_lens, kv_lens, first=first, window=window)
    assert step is not None and step.table.dtype == step.bounds.dtype == torch.int32
    pages.fill(k, v, table, step)
    used: list[int] = []
    for request in range(first, 4):
        oldest = max(0, kv_lens[request] - query_lens[request] - window + 1) if window else 0
        for entry in range(oldest // page, -(-kv_lens[request] // page)):
            own = int(step.table[request, entry])
            used.append(own)
            for mine, source in ((pages.k, k), (pages.v, v)):
                assert torch.equal(mine[own], source[int(table[request, entry])].half())
    assert sorted(used) == list(range(len(used)))
    assert pages.k[len(used) :].isnan().all() and pages.v[len(used) :].isnan().all()


def test_more_than_there_is_room_for():
    pages = ExpandedPages(16, 2, 8, torch.float16, CPU, room_bytes=2 * 2 * 5 * 16 * 16)
    assert pages.plan([3, 4], [48, 33], first=0) is None
    step = pages.plan([3, 4], [48, 32], first=0)
    assert step is not None and step.most == 3
    assert pages.plan([1, 4], [900, 33], first=1) is not None, "decodes are not expanded"
    assert pages.plan([3], [900], window=30) is not None


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CASES)
def test_the_backend_expands_chunks_and_leaves_the_rest_to_triton(name: str, monkeypatch: pytest.MonkeyPatch):
    taken = []

    def prefill(q, pages, out, plan, head, step, *, pdl):
        assert hopper.takes(q, pages, head)
        taken.append(plan)
        in_triton.prefill(q, pages, out, plan, head, step, pdl=pdl)

    monkeypatch.setattr(ExpandingAttention, "pdl", False)  # the interpreter has no such launches
    monkeypatch.setattr(hopper, "is_compiled", lambda *_: True)
    monkeypatch.setattr(hopper, "prefill", prefill)
    case = replace(CASES[name], spans=CASES[name].spans[:4])
    problem = make_problem(case, "cpu", torch.float16, kv_dtype=E4M3)
    assert problem.error(problem.run(ExpandingAttention(problem.geometry, CPU))) < 2e-3
    assert len(taken) == 1
    small = ExpandingAttention(problem.geometry, CPU)
    small._expanded = ExpandedPages(
        case.page_size, case.num_kv_heads, case.head_dim, torch.float16, CPU, room_bytes=1
    )
    assert problem.error(problem.run(small)) < 2e-3
    problem.open(1)
    assert problem.error(problem.run(ExpandingAttention(problem.geometry, CPU))[:-1]) < 2e-3
    assert len(taken) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    problem = make_problem(CASES[name], "cuda", torch.bfloat16, kv_dtype=E4M3)
    backend = ExpandingAttention(problem.geometry, torch.device("cuda"))
    for _ in range(2):
        assert problem.error(problem.run(backend)) < 1e-2
        assert backend._is_own
    problem.open(1)
    assert problem.error(problem.run(backend)[:-1]) < 1e-2
    assert not backend._is_own


def test_which_geometries_take_it():
    assert reason_against_expanding(H200) is None
    assert ATTENTION_BACKENDS.choose(H200) is ExpandingAttention
    for change in (
        {"kv_dtype": "bfloat16"}, {"dtype": "float32"}, {"head_dim": 256, "value_dim": 256}, {"capability": (10, 0)},
        {"page_size": 4}, {"device": "cpu"},
    ):
        assert reason_against_expanding(replace(H200, **change))
