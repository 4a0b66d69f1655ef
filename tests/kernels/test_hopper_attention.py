"""Attention of chunks by own CUDA C++ for Hopper: values against float64, what it leaves alone, when it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Problem, make_problem
from planned_attention import attend_by_plan

pytest.importorskip("triton")

from headrace.kernels.attention import HOPPER_ROWS, hopper
from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.prefill import plan_open_prefill, plan_prefill
from headrace.kernels.cuda_source import CudaSourceError
from headrace.layers import attention
from headrace.layers.attention import ATTENTION_BACKENDS, reason_against_hopper
from headrace.layers.attention.contract import AttentionGeometry
from headrace.layers.attention.hopper import HopperAttention

MIXED = ((1, 1), (1, 75), (7, 7), (20, 75), (3, 64), (130, 300))
SHAPE = dict(num_heads=8, num_kv_heads=2, head_dim=128, page_size=64)
CASES = {
    "mixed": Case(MIXED, **SHAPE),
    "small-pages": Case(MIXED, **SHAPE | {"page_size": 8}),
    "large-pages": Case(MIXED, **SHAPE | {"page_size": 256}),
    "multi-head": Case(((300, 700),), **SHAPE | {"num_kv_heads": 8}),
    "group-7": Case(MIXED, **SHAPE | {"num_heads": 14}),
    "dim-64": Case(MIXED, **SHAPE | {"head_dim": 64}),
    "many-tiles": Case(((700, 3000), (64, 2112), (1300, 1300)), **SHAPE | {"num_heads": 32, "num_kv_heads": 8}),
    "window": Case(MIXED, **SHAPE, window=9),
    "window-over-tiles": Case(((640, 700), (300, 650)), **SHAPE | {"head_dim": 64}, window=128, has_sinks=True),
    "softcap": Case(MIXED, **SHAPE, softcap=2.0),
    "sinks": Case(MIXED, **SHAPE, has_sinks=True),
    "all": Case(MIXED, **SHAPE, window=70, softcap=2.0, has_sinks=True),
    "steep": Case(((700, 900),), **SHAPE, steepness=6.0),
}
ALONE = 7.0
H200 = AttentionGeometry("cuda", "bfloat16", "bfloat16", (9, 0), 32, 8, 128, 128, 64)
CPU = torch.device("cpu")


@pytest.fixture
def on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def attend(
    problem: Problem, *, first: int = 0, rows: int | None = None, is_open: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel writes into a tensor of `ALONE`, and what it leaves in the plan's claims."""
    inputs, params, geometry = problem.inputs, problem.params, problem.geometry
    group = geometry.num_heads // geometry.num_kv_heads
    tile = hopper.prefill_tile(geometry.head_dim, rows or HOPPER_ROWS[geometry.head_dim][-1])
    plan = (
        plan_open_prefill(inputs.query_start, problem.q.shape[0] + 9, group=group, tile=tile) if is_open
        else plan_prefill(inputs.query_start, inputs.query_lens_cpu, first=first, group=group, tile=tile)
    )
    out = torch.full_like(problem.q, ALONE)
    head = Head(params.scale, params.window, params.softcap, params.sinks)
    step = (inputs.query_start, inputs.kv_lens, inputs.page_table)
    hopper.prefill(problem.q, (problem.pages.k, problem.pages.v), out, plan, head, step)
    return out, plan.claims


HALF_TYPES = [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,tolerance", HALF_TYPES)
@pytest.mark.parametrize("name,rows", [(name, rows) for name, c in CASES.items() for rows in HOPPER_ROWS[c.head_dim]])
def test_values(name, rows, dtype, tolerance, on_hopper):
    problem = make_problem(CASES[name], "cuda", dtype)
    out, claims = attend(problem, rows=rows)
    assert problem.error(out) < tolerance
    assert claims.tolist() == [0, 0], "the next layer counts from zero"
    assert torch.equal(attend(problem, rows=rows)[0], out), "whichever program takes a tile"
    if problem.params.sinks is not None:
        problem.params = replace(problem.params, sinks=problem.params.sinks.to(dtype))
        assert problem.error(attend(problem, rows=rows)[0]) < tolerance


@pytest.mark.cuda
def test_rows_behind_the_tokens_do_not_matter(on_hopper):
    """A tile of 18 tokens with 7 heads each has two rows more, of which shared memory holds what others left."""
    case = Case(((300, 364), (302, 600)), num_heads=28, num_kv_heads=4, head_dim=128, page_size=16)
    problem, other = make_problem(case, "cuda", torch.float16), make_problem(CASES["steep"], "cuda", torch.float16)
    expected = attend(problem)[0]
    for scale in range(1, 30):
        other.q.mul_(-1).add_(scale / 30)
        attend(other)
        assert torch.equal(attend(problem)[0], expected)


@pytest.mark.cuda
@pytest.mark.parametrize("is_open", [False, True])
def test_rows_of_decodes_are_left_alone(is_open, on_hopper):
    problem = make_problem(CASES["mixed"], "cuda", torch.bfloat16)
    out, _ = attend(problem, first=2, is_open=is_open)
    assert bool((out[:2] == ALONE).all())
    assert float((out[2:].double() - problem.expected[2:]).norm() / problem.expected[2:].norm()) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,tolerance", HALF_TYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_backend_on_steps_of_both_kinds(name, dtype, tolerance, on_hopper):
    problem = make_problem(CASES[name], "cuda", dtype)
    backend, num_tokens = HopperAttention(problem.geometry, torch.device("cuda")), problem.inputs.num_tokens
    assert problem.error(problem.run(backend)) < tolerance
    assert backend._is_own
    problem.open(3)
    assert problem.error(problem.run(backend)[:num_tokens]) < tolerance


@pytest.mark.cuda
def test_captured_steps_read_lengths_on_the_device(on_hopper):
    problem = make_problem(CASES["mixed"], "cuda", torch.bfloat16)
    num_tokens = problem.inputs.num_tokens
    problem.open(3)
    backend = HopperAttention(problem.geometry, torch.device("cuda"))
    problem.run(backend)
    starts, lens = problem.inputs.query_start, problem.inputs.kv_lens
    known = starts.clone(), lens.clone()
    starts.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.run(backend)
    starts.copy_(known[0])
    lens.copy_(known[1])
    for _ in range(2):
        out.fill_(ALONE)
        graph.replay()
        assert problem.error(out[:num_tokens]) < 1e-2


@pytest.fixture
def in_interpreter(monkeypatch):
    """The backend plans for its own kernel, for which plain torch stands in: with the same plans, and returned here."""
    plans = []

    def prefill(q, pages, out, plan, head, step, *, pdl):
        assert hopper.takes(q, pages, head)
        plans.append(plan)
        attend_by_plan(q, pages, out, plan, head, step)

    monkeypatch.setattr(HopperAttention, "pdl", False)  # the interpreter has no such launches
    monkeypatch.setattr(hopper, "is_compiled", lambda *_: True)
    monkeypatch.setattr(hopper, "prefill", prefill)
    return plans


@pytest.mark.interpreted
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("case", [
    Case(MIXED[:4], **SHAPE), Case(MIXED[2:4], **SHAPE), Case(MIXED[:2], **SHAPE),
    Case(MIXED[:4], **SHAPE | {"head_dim": 64, "num_heads": 14}, window=9, softcap=2.0, has_sinks=True),
], ids=["mixed", "chunks", "decodes", "all"])  # fmt: skip
def test_the_backend_plans_chunks_for_its_kernel(case, is_open, in_interpreter):
    problem = make_problem(case, "cpu", torch.float16)
    backend, num_tokens = HopperAttention(problem.geometry, CPU), problem.inputs.num_tokens
    if is_open:
        problem.open(3)
    assert problem.error(problem.run(backend)[:num_tokens]) < 2e-3
    assert len(in_interpreter) == (is_open or case.decodes < len(case.spans))
    for plan in in_interpreter:
        assert (plan.tile.rows, set(plan.claims.tolist())) == (128, {0})


@pytest.mark.interpreted
@pytest.mark.usefixtures("breaks_kernels")
def test_chunks_take_tritons_kernel_where_the_own_one_does_not_compile(monkeypatch, caplog):
    def refuse(name, *_, **macros):
        raise CudaSourceError(f"{name}.cu: no nvrtc")

    monkeypatch.setattr(HopperAttention, "pdl", False)
    monkeypatch.setattr(hopper, "load_kernel", refuse)
    problem = make_problem(Case(MIXED[:4], **SHAPE | {"head_dim": 64}), "cpu", torch.float16)
    backend = HopperAttention(problem.geometry, CPU)
    for _ in range(2):
        assert problem.error(problem.run(backend)) < 2e-3
    assert len(caplog.records) == 1 and "no nvrtc" in caplog.text


@pytest.mark.parametrize("head_dim,heads,num_tokens,rows", [
    (128, (32, 8), 8192, 128), (128, (32, 8), 1, 128),
    (64, (64, 8), 8192, 192), (64, (64, 8), 2048, 192), (64, (64, 8), 512, 128), (64, (64, 8), 2, 128),
])  # fmt: skip
def test_steps_of_few_tiles_take_smaller_ones(head_dim, heads, num_tokens, rows):
    tile = hopper.choose_tile(head_dim, heads[0] // heads[1], heads[1], num_tokens, 132)
    assert (tile.rows, tile.num_warps) == (rows, rows // 16 + 4)


def test_tensors_that_the_kernel_cannot_read():
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
    problem = make_problem(Case(((5, 9),), **shape), "cpu", torch.float16)
    pages, head = (problem.pages.k, problem.pages.v), Head(0.1)
    assert hopper.takes(problem.q, pages, head)
    assert hopper.takes(problem.q, pages, replace(head, sinks=torch.zeros(4)))
    assert not hopper.takes(problem.q, pages, replace(head, sinks=torch.zeros(4, dtype=torch.bfloat16)))
    assert not hopper.takes(problem.q, pages, replace(head, scale=-0.1))
    assert not hopper.takes(problem.q.float(), pages, head)
    assert not hopper.takes(problem.q, tuple(x.to(torch.float8_e4m3fn) for x in pages), head)
    assert not hopper.takes(problem.q, tuple(x[:, :12] for x in pages), head)
    assert not hopper.takes(problem.q, tuple(x[..., :48] for x in pages), head)


@pytest.mark.parametrize("change,reason", [
    ({}, None), ({"head_dim": 64, "value_dim": 64, "window": 128, "has_sinks": True, "has_softcap": True}, None),
    ({"page_size": 16}, None), ({"num_heads": 128, "num_kv_heads": 1, "dtype": "float16", "kv_dtype": "float16"}, None),
    ({"device": "cpu"}, "needs a cuda device"), ({"capability": (8, 9)}, "capability 9.0"),
    ({"capability": (10, 0)}, "capability 9.0"), ({"dtype": "float32", "kv_dtype": "float32"}, "float16 or bfloat16"),
    ({"kv_dtype": "float8_e4m3fn"}, "all alike"), ({"values_in_keys": True}, "pages of their own"),
    ({"head_dim": 96, "value_dim": 96}, "64, 128"), ({"value_dim": 64}, "keys and values alike"),
    ({"num_heads": 129, "num_kv_heads": 1}, "128 query heads"), ({"page_size": 4}, "8 tokens"),
    ({"page_size": 48}, "powers of two"),
], ids=str)  # fmt: skip
def test_says_what_it_cannot_serve(change, reason, monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    geometry = replace(H200, **change)
    found = reason_against_hopper(geometry)
    assert (found is None) if reason is None else reason in found
    if reason is None:
        assert ATTENTION_BACKENDS.choose(geometry) is HopperAttention, "whether cuDNN is installed or not"
