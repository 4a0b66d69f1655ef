"""Own C++ attention on values: mixed batches, page tables in any order, every geometry, instruction set and thread
count."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attention_cases import MIXED, SHAPES, SHARING, Case, Problem, make_problem
from cpu_isas import isa  # noqa: F401

from headrace.kernels import native
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import KvPages
from headrace.layers.attention.cpu import CpuAttention

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
CASES = {
    **SHAPES,
    "pages-of-one": Case(MIXED, page_size=1),
    "group-5": Case(MIXED, num_heads=5, num_kv_heads=1),
    "multi-query-odd-group": Case(MIXED, num_heads=7, num_kv_heads=1, page_size=4),
    "group-8": Case(MIXED, num_heads=16, num_kv_heads=2),
    "dim-33": Case(MIXED, head_dim=33, num_heads=6),
    "dim-192-value-128": Case(((1, 40), (9, 50)), head_dim=192, value_dim=128),
    "dim-40-value-72": Case(((1, 40), (9, 50)), head_dim=40, value_dim=72),
    "prefill-of-one-token": Case(((1, 30), (1, 30)), num_decodes=0),
    "shared-pages-odd-dims": Case(
        SHARING, num_heads=8, num_kv_heads=2, head_dim=40, value_dim=72, shared_pages=5, softcap=2.0
    ),
    "shared-pages-prompts-all": Case(
        ((4, 200), (6, 140), (3, 131)), num_heads=8, num_kv_heads=2, head_dim=40, value_dim=72, has_sinks=True,
        softcap=2.0, shared_pages=8
    ),
    "shared-pages-prompts-many-rows": Case(
        tuple((4 + i % 5, 140 + 7 * i) for i in range(14)), num_heads=9, num_kv_heads=3, shared_pages=8
    ),
    "shared-pages-prompts-many-tiles": Case(
        tuple((8, 270 + 7 * i) for i in range(36)), num_heads=6, num_kv_heads=1, head_dim=32, shared_pages=16
    ),
}


@cache
def make(name: str, dtype: torch.dtype) -> Problem:
    """Drawn once for all instruction sets; tests leave it as it is."""
    return make_problem(CASES[name], "cpu", dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention(name, dtype):
    problem = make(name, dtype)
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < TOLERANCES[dtype]


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [2, 3, 7], indirect=True)
@pytest.mark.parametrize("window,has_sinks,shared", [(0, False, 0), (0, True, 0), (200, False, 0), (0, True, 64)])
def test_work_is_shared_among_threads(window, has_sinks, shared, threads):
    spans = (
        ((1, 1), (1, 2400), (1, 129), (1, 33), (1, 32), (300, 500)) if not shared
        else tuple((1, 1100 + 90 * i) for i in range(5))
    )
    case = Case(spans, num_heads=6, window=window, has_sinks=has_sinks, head_dim=128, shared_pages=shared)
    problem = make_problem(case, "cpu", torch.float32)
    backend = CpuAttention(problem.geometry, CPU)
    first, second = problem.run(backend), problem.run(backend)
    assert problem.error(first) < 2e-6
    assert torch.equal(first, second)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("steepness", [6.0, 60.0, 400.0])
def test_later_keys_may_outweigh_all_before(steepness):
    case = Case(((1, 700), (300, 300), (130, 900)), num_heads=6, num_kv_heads=2, steepness=steepness)
    problem = make_problem(case, "cpu", torch.bfloat16)
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_what_is_no_number_is_not_hidden(side, isa):  # noqa: F811
    if isa == "amx":
        pytest.skip("weights out of a table of 16 bits do not tell")
    case = Case(((60, 300),), num_heads=3, num_kv_heads=1)
    problem = make_problem(case, "cpu", torch.bfloat16)
    page = problem.inputs.page_table[0, 10]
    {
        "q": problem.q[30, :, 7], "k": problem.pages.k[page, 5, :, 7], "v": problem.pages.v[page, 5, :, 7]
    }[side].fill_(float("nan"))
    out = problem.run(CpuAttention(problem.geometry, CPU))
    seen = out[30] if side == "q" else out[:, :, 7] if side == "v" else out
    assert not bool(seen.isfinite().all(-1).any())


def test_a_lone_head_has_any_stride():
    """Torch gives dims of size 1 what stride it likes: products of one token and head have 1 there."""
    problem = make_problem(Case(((1, 30),), num_heads=1, num_kv_heads=1), "cpu", torch.float32)
    problem.q = problem.q.as_strided(problem.q.shape, (1, 1, 1))
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < TOLERANCES[torch.float32]


@pytest.mark.usefixtures("isa")
def test_values_inside_the_keys():
    problem = make_problem(
        Case(((1, 40), (6, 50)), num_heads=20, num_kv_heads=1, head_dim=72, value_dim=64), "cpu", torch.float32
    )
    problem.pages.v.copy_(problem.pages.k[..., :64])
    expected = problem.run(CpuAttention(problem.geometry, CPU))
    problem.pages = KvPages(problem.pages.k, problem.pages.k[..., :64])
    assert torch.equal(problem.run(CpuAttention(problem.geometry, CPU)), expected)


def test_pages_of_a_narrower_type(isa):  # noqa: F811
    """Queries in float32 over pages in bfloat16: products of pairs round queries, and give what they give of rounded
    ones; others do not round."""
    problem = make_problem(Case(MIXED), "cpu", torch.bfloat16)
    narrow = problem.run(CpuAttention(problem.geometry, CPU))
    problem.q = problem.q.float()
    wide = problem.run(CpuAttention(problem.geometry, CPU))
    takes_pairs = isa in ("avx512", "amx")
    assert problem.error(wide) < (2e-3 if takes_pairs else 2e-6)
    if takes_pairs:
        assert torch.equal(wide.bfloat16(), narrow)


def test_plain_torch_serves_until_the_kernels_are_there(monkeypatch):
    problem = make_problem(Case(MIXED, window=9), "cpu", torch.float32)
    backend = CpuAttention(problem.geometry, CPU)
    monkeypatch.setattr(native.NATIVE, "find", lambda: None)
    assert problem.error(problem.run(backend)) < 1e-5
    monkeypatch.undo()
    assert problem.error(backend.attend(problem.q, problem.pages, problem.params)) < 1e-5  # ready within a step


def test_is_the_default_of_a_cpu():
    geometry = make_problem(Case(MIXED), "cpu", torch.float32).geometry
    assert ATTENTION_BACKENDS.choose(geometry) is CpuAttention
