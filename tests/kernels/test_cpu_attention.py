"""Own C++ attention on values: mixed batches, page tables in any order, every geometry, instruction set and thread count."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, make_problem
from cpu_isas import isa  # noqa: F401

from headrace.kernels import native
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import KvPages
from headrace.layers.attention.cpu import CpuAttention

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
MIXED = ((1, 1), (1, 75), (7, 7), (20, 75))
SHARING = tuple((1, 130 + 37 * i) for i in range(7))
CASES = {
    "mixed": Case(MIXED),
    "mixed-big-pages": Case(MIXED, page_size=64),
    "pages-of-one": Case(MIXED, page_size=1),
    "multi-head": Case(MIXED, num_heads=3, num_kv_heads=3),
    "group-3": Case(MIXED, num_heads=9, num_kv_heads=3),
    "group-5": Case(MIXED, num_heads=5, num_kv_heads=1),
    "multi-query-odd-group": Case(MIXED, num_heads=7, num_kv_heads=1, page_size=4),
    "group-8": Case(MIXED, num_heads=16, num_kv_heads=2),
    "group-too-large-to-decode": Case(MIXED, num_heads=36, num_kv_heads=2),
    "dim-8": Case(MIXED, head_dim=8),
    "dim-33": Case(MIXED, head_dim=33, num_heads=6),
    "dim-80": Case(MIXED, head_dim=80),
    "dim-96": Case(MIXED, head_dim=96, page_size=32),
    "dim-128": Case(MIXED, head_dim=128, page_size=128),
    "dim-192-value-128": Case(((1, 40), (9, 50)), head_dim=192, value_dim=128),
    "dim-40-value-72": Case(((1, 40), (9, 50)), head_dim=40, value_dim=72),
    "dim-256": Case(((1, 40), (9, 50)), head_dim=256),
    "window": Case(MIXED, window=9),
    "window-of-one": Case(MIXED, window=1),
    "window-over-pages": Case(((1, 150), (33, 150)), window=50, page_size=64),
    "window-over-tiles": Case(((1, 700), (640, 700), (300, 650)), window=70, num_heads=2, num_kv_heads=1),
    "softcap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, has_sinks=True),
    "all": Case(MIXED, window=12, softcap=2.0, has_sinks=True, head_dim=80),
    "prefill-of-one-token": Case(((1, 30), (1, 30)), num_decodes=0),
    "shared-pages": Case((*SHARING, (40, 400)), num_heads=9, num_kv_heads=3, shared_pages=8),
    "shared-pages-odd-dims": Case(SHARING, num_heads=8, num_kv_heads=2, head_dim=40, value_dim=72, shared_pages=5, softcap=2.0),
    "shared-pages-and-sinks": Case(SHARING, num_heads=8, num_kv_heads=1, head_dim=128, has_sinks=True, page_size=64, shared_pages=2),
    "shared-pages-prompts": Case(((1, 400), (1, 300), (2, 300), (8, 290), (5, 310), (16, 330), (40, 600)), num_heads=9, num_kv_heads=3, shared_pages=8),
    "shared-pages-prompts-all": Case(((4, 200), (6, 140), (3, 131)), num_heads=8, num_kv_heads=2, head_dim=40, value_dim=72, has_sinks=True, softcap=2.0, shared_pages=8),
    "shared-pages-prompts-many-rows": Case(tuple((4 + i % 5, 140 + 7 * i) for i in range(14)), num_heads=9, num_kv_heads=3, shared_pages=8),
    "shared-pages-prompts-many-tiles": Case(tuple((8, 270 + 7 * i) for i in range(36)), num_heads=6, num_kv_heads=1, head_dim=32, shared_pages=16),
    "long": Case(((1, 1000), (300, 300), (130, 900)), num_heads=6, num_kv_heads=2),
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention(name, dtype):
    problem = make_problem(CASES[name], "cpu", dtype)
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
    spans = ((1, 1), (1, 2400), (1, 129), (1, 33), (1, 32), (300, 500)) if not shared else tuple((1, 1100 + 90 * i) for i in range(5))
    case = Case(spans, num_heads=6, window=window, has_sinks=has_sinks, head_dim=128, shared_pages=shared)
    problem = make_problem(case, "cpu", torch.float32)
    backend = CpuAttention(problem.geometry, CPU)
    first, second = problem.run(backend), problem.run(backend)
    assert problem.error(first) < 2e-6
    assert torch.equal(first, second)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("steepness", [6.0, 60.0])
def test_later_keys_may_outweigh_all_before(steepness):
    case = Case(((1, 700), (300, 300), (130, 900)), num_heads=6, num_kv_heads=2, steepness=steepness)
    problem = make_problem(case, "cpu", torch.bfloat16)
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < TOLERANCES[torch.bfloat16]


@pytest.mark.usefixtures("isa")
def test_values_inside_the_keys():
    problem = make_problem(Case(((1, 40), (6, 50)), num_heads=20, num_kv_heads=1, head_dim=72, value_dim=64), "cpu", torch.float32)
    problem.pages.v.copy_(problem.pages.k[..., :64])
    expected = problem.run(CpuAttention(problem.geometry, CPU))
    problem.pages = KvPages(problem.pages.k, problem.pages.k[..., :64])
    assert torch.equal(problem.run(CpuAttention(problem.geometry, CPU)), expected)


@pytest.mark.usefixtures("isa")
def test_pages_of_a_narrower_type():
    problem = make_problem(Case(MIXED), "cpu", torch.bfloat16)
    problem.q = problem.q.float()
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < 2e-6


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
