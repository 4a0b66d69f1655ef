"""Attention of decodes over FP8 pages on values: see ``csrc/cuda/fp8_decodes.cu``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Problem, make_problem

pytest.importorskip("triton")

from headrace.kernels.attention import fp8_decodes as module
from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import MOST_PROGRAMS, DecodeStep, DecodeWorkspace, decode
from headrace.kernels.cuda_source import MOST_BYTES, CudaSourceError
from headrace.kernels.rowwise.triton import rope_write, rope_write_pdl
from headrace.layers.attention.triton import DependentLaunchTritonAttention

E4M3 = torch.float8_e4m3fn
ALONE = -7.0  # in rows that are left alone
HALF_TYPES = [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
SHAPE = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64)
LENS = tuple((1, n) for n in (1, 75, 16, 300, 17, 64, 1100, 15, 63, 65, 33, 34))
CASES = {
    "llama": Case(LENS, **SHAPE),
    "one": Case(((1, 1100),), **SHAPE),
    "first-token": Case(((1, 1),), **SHAPE),
    "group-1": Case(LENS, **SHAPE | {"num_heads": 8}),
    "group-2": Case(LENS, **SHAPE | {"num_heads": 16}),
    "group-7": Case(LENS, **SHAPE | {"num_heads": 28, "num_kv_heads": 4}),
    "group-8": Case(LENS, **SHAPE | {"num_kv_heads": 4}),
    "group-16": Case(LENS, **SHAPE | {"num_heads": 64, "num_kv_heads": 4}),
    "one-kv-head": Case(LENS, **SHAPE | {"num_heads": 4, "num_kv_heads": 1}),
    "pages-of-16": Case(LENS, **SHAPE | {"page_size": 16}),
    "pages-of-32": Case(LENS, **SHAPE | {"page_size": 32}),
    "pages-of-128": Case(LENS, **SHAPE | {"page_size": 128}),
    "window": Case(LENS, **SHAPE, window=50),
    "window-of-one": Case(LENS, **SHAPE, window=1),
    "softcap": Case(LENS, **SHAPE, softcap=2.0),
    "sinks": Case(LENS, **SHAPE, has_sinks=True),
    "steep": Case(LENS, **SHAPE, steepness=20.0),
    "dim-64-sinks": Case(LENS, **SHAPE | {"num_heads": 64, "head_dim": 64}, has_sinks=True),
    "dim-64-window": Case(LENS, **SHAPE | {"num_heads": 64, "head_dim": 64}, window=128, has_sinks=True),
    "dim-64-pages-of-16": Case(LENS, **SHAPE | {"head_dim": 64, "page_size": 16}),
    "all": Case(LENS, **SHAPE | {"num_heads": 56, "head_dim": 64}, window=40, softcap=2.0, has_sinks=True),
    "long": Case(((1, 5), (1, 32768), (1, 9000)), **SHAPE),
    "long-pages-of-16": Case(((1, 5), (1, 32768)), **SHAPE | {"num_heads": 4, "num_kv_heads": 1, "page_size": 16}),
    "graph-bound": Case(((1, 3), (1, 17)), **SHAPE, max_kv_len=4096),
    "many": Case(tuple((1, 1 + 37 * i % 500) for i in range(70)), **SHAPE | {"num_heads": 2, "num_kv_heads": 1}),
}


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper")


def attend(problem: Problem, slots: int | None = None, *, is_open: bool = False, pdl: bool = True) -> torch.Tensor:
    """``slots``: in so many shares instead of the planned ones; 0: undivided."""
    inputs, params = problem.inputs, problem.params
    kv_heads, device = problem.pages.k.shape[2], problem.q.device
    workspace = DecodeWorkspace.allocate(132, problem.q.shape[1] // kv_heads, problem.q.shape[2], device)
    out = torch.full_like(problem.q, ALONE)
    step = DecodeStep(
        inputs.kv_lens, inputs.page_table, inputs.num_requests, inputs.max_kv_len,
        inputs.query_start if is_open else None,
    )
    head = Head(params.scale, params.window, params.softcap, params.sinks)
    with pytest.MonkeyPatch.context() as patch:
        if slots is not None:
            patch.setattr(module, "plan_slots", lambda *_, **__: slots)
        assert module.fp8_decodes(problem.q, (problem.pages.k, problem.pages.v), out, workspace, head, step, pdl=pdl)
    assert not workspace.counters.any()
    return out


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,tolerance", HALF_TYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention(name, dtype, tolerance, on_hopper):
    """As planned, undivided, and in as few and as many shares as there can be."""
    problem = make_problem(CASES[name], "cuda", dtype, kv_dtype=E4M3)
    count, kv_heads = len(CASES[name].spans), CASES[name].num_kv_heads
    for slots in (None, 0, count + 1, count + 7, 132 * MOST_PROGRAMS // kv_heads):
        assert problem.error(attend(problem, slots)) < tolerance
    assert torch.equal(attend(problem), attend(problem, pdl=False))


@pytest.mark.cuda
@pytest.mark.parametrize("slots", [0, 9])
def test_padding_of_a_graph_gives_zeros(slots, on_hopper):
    problem = make_problem(Case(((1, 100), (1, 40), (1, 40), (1, 700)), **SHAPE), "cuda", torch.bfloat16, kv_dtype=E4M3)
    problem.inputs.kv_lens[1:3] = 0
    problem.expected[1:3] = 0
    out = attend(problem, slots)
    assert problem.error(out) < 1e-2 and not out[1:3].any()


@pytest.mark.cuda
def test_other_rows_of_a_mixed_step_are_left_alone(on_hopper):
    problem = make_problem(Case(((1, 1), (1, 75), (7, 7), (1, 300), (20, 75)), **SHAPE), "cuda", torch.float16,
                           kv_dtype=E4M3)
    out, decodes = attend(problem, is_open=True), torch.tensor((0, 1, 9), device="cuda")
    error = (out[decodes].double() - problem.expected[decodes]).norm() / problem.expected[decodes].norm()
    assert float(error) < 2e-3
    out[decodes] = ALONE
    assert bool((out == ALONE).all())


@pytest.mark.cuda
def test_a_request_does_not_depend_on_others(on_hopper):
    """Undivided, bit by bit, wherever it is in a step of whatever size."""
    case = Case(tuple((1, 100 + 13 * i % 900) for i in range(64)), **SHAPE)
    problem = make_problem(case, "cuda", torch.bfloat16, kv_dtype=E4M3)
    expected = attend(problem, 0)
    for kept in (0, 17, 63):
        own = replace(problem, q=problem.q[kept:].contiguous())
        own.inputs = replace(
            problem.inputs, kv_lens=problem.inputs.kv_lens[kept:].clone(), page_table=problem.inputs.page_table[kept:],
        )
        own.inputs.kv_lens[1:] = 0
        assert torch.equal(attend(own, 0)[0], expected[kept])


@pytest.mark.cuda
def test_a_graph_replays_with_other_lengths(on_hopper):
    shape = SHAPE | {"page_size": 16, "max_kv_len": 4096}
    problem, other = (
        make_problem(Case(tuple((1, n) for n in lens), **shape), "cuda", torch.bfloat16, kv_dtype=E4M3)
        for lens in ((12, 4000, 1), (700, 129, 3000))
    )
    backend = DependentLaunchTritonAttention(problem.geometry, torch.device("cuda"))
    problem.check_replays(other, backend, 1e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("rows,drafts,is_divided", [(1, 0, True), (6, 5, True), (40, 32, True), (40, 32, False)])
def test_dependent_steps_in_a_graph(rows, drafts, is_divided, on_hopper, monkeypatch):
    """Keys that a step writes are read by the same step and the next ones, from before the write has ended. The last
    ``drafts`` rows are of one request."""
    if not is_divided:
        monkeypatch.setattr(module, "plan_slots", lambda *_, **__: 0)
    steps, heads, kv_heads, dim, page = 30, 16, 4, 128, 16
    rng = torch.Generator(device="cuda").manual_seed(0)
    owner = torch.tensor([min(row, rows - drafts - 1) for row in range(rows)], device="cuda")
    ahead = torch.arange(rows, device="cuda") - owner
    pages_each = 16
    order = torch.randperm(rows * pages_each, generator=rng, device="cuda", dtype=torch.int32) + 1
    table = order.view(rows, pages_each)[owner].contiguous()
    first = torch.randint(1, 150, (rows,), generator=rng, device="cuda", dtype=torch.int32)[owner] + ahead.int()
    qkv = torch.randn(steps, rows, (heads + 2 * kv_heads) * dim, generator=rng, device="cuda").bfloat16()
    start = torch.randn(2, 1 + rows * pages_each, page, kv_heads, dim, generator=rng, device="cuda")
    cos_sin = torch.randn(512, dim, generator=rng, device="cuda")
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=dim, interleaved=False, norm_eps=1e-6,
                 norm_offset=0.0)
    workspace = DecodeWorkspace.allocate(132, heads // kv_heads, dim, torch.device("cuda"))
    head = Head(dim**-0.5)

    def walk(pages, is_own: bool) -> torch.Tensor:
        outs = []
        for number in range(steps):
            lens = first + number
            positions = lens.long() - 1
            slots = table.gather(1, (positions // page)[:, None])[:, 0].long() * page + positions % page
            step, out = DecodeStep(lens, table, rows, 256), torch.empty(rows, heads, dim, device="cuda").bfloat16()
            waits = qkv[number] * 1.0  # lengths are there before the kernel that rotation overlaps
            write = rope_write_pdl if is_own else rope_write
            q = write(waits.clone(), positions, cos_sin, slots, *pages, **shape)
            if is_own:
                assert module.fp8_decodes(q, pages, out, workspace, head, step, pdl=True)
            else:
                decode(q, pages, out, workspace, head, step)
            outs.append(out)
        return torch.stack(outs)

    expected = walk(tuple(start.to(E4M3)), is_own=False)
    own = tuple(start.to(E4M3))
    walk(own, is_own=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = walk(own, is_own=True)
    for _ in range(3):
        for x, value in zip(own, start, strict=True):
            x.copy_(value.to(E4M3))
        graph.replay()
        assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 5e-3


@pytest.mark.cuda
def test_the_backend_takes_it_for_decodes(on_hopper, monkeypatch):
    problem = make_problem(Case(((1, 1), (1, 75), (7, 7), (20, 75)), **SHAPE), "cuda", torch.bfloat16, kv_dtype=E4M3)
    monkeypatch.setattr("headrace.layers.attention.triton.decode", lambda *_, **__: pytest.fail("Triton's kernel"))
    backend = DependentLaunchTritonAttention(problem.geometry, torch.device("cuda"))
    assert problem.error(problem.run(backend)) < 1e-2


def test_takes_what_the_kernel_can():
    """Everything else is left to the Triton kernel."""
    problem = make_problem(CASES["llama"], "cpu", torch.bfloat16, kv_dtype=E4M3)
    pages, head = (problem.pages.k, problem.pages.v), Head(0.1)
    assert module.takes(problem.q, pages, head)
    assert module.takes(problem.q.half(), pages, replace(head, sinks=torch.zeros(32)))
    assert module.takes(problem.q, pages, replace(head, sinks=torch.zeros(32, dtype=torch.bfloat16), window=9))
    assert not module.takes(problem.q, pages, replace(head, sinks=torch.zeros(32, dtype=torch.float16)))
    assert not module.takes(problem.q.float(), pages, head)
    assert not module.takes(problem.q, tuple(x.bfloat16() for x in pages), head)
    assert not module.takes(problem.q, tuple(x[..., :96] for x in pages), head)
    assert not module.takes(problem.q, tuple(x[:, :48] for x in pages), head)
    assert not module.takes(problem.q, tuple(x.view(torch.uint8)[:, :8].view(E4M3) for x in pages), head)
    assert not module.takes(problem.q.repeat(1, 5, 1), pages, head)
    wide = make_problem(Case(((1, 5),), num_heads=4, num_kv_heads=2, head_dim=80), "cpu", torch.bfloat16, kv_dtype=E4M3)
    assert not module.takes(wide.q, (wide.pages.k, wide.pages.v), head)


@pytest.mark.parametrize("change,is_taken", [
    ({}, True), ({"capability": (10, 0)}, False), ({"capability": (8, 9)}, False), ({"kv_dtype": "bfloat16"}, False),
], ids=str)  # fmt: skip
def test_the_backend_asks_for_it_on_hopper(change, is_taken, monkeypatch):
    problem = make_problem(CASES["first-token"], "cpu", torch.bfloat16, kv_dtype=E4M3)
    asked = []
    for name in ("fp8_decodes", "decode"):
        monkeypatch.setattr(
            f"headrace.layers.attention.triton.{name}", lambda *_, name=name, **__: not asked.append(name)
        )
    geometry = replace(problem.geometry, **{"device": "cuda", "capability": (9, 0)} | change)
    problem.run(DependentLaunchTritonAttention(geometry, torch.device("cpu")))
    assert asked == (["fp8_decodes"] if is_taken else ["decode"])


@pytest.mark.usefixtures("breaks_kernels")
def test_without_a_compiler_it_is_left_to_triton(monkeypatch, caplog):
    def refuse(name, *_, **macros):
        raise CudaSourceError(f"{name}.cu: no nvrtc")

    monkeypatch.setattr(module, "load_kernel", refuse)
    problem = make_problem(Case(((1, 5),), num_heads=6, num_kv_heads=2), "cpu", torch.bfloat16, kv_dtype=E4M3)
    pages, out = (problem.pages.k, problem.pages.v), torch.full_like(problem.q, ALONE)
    step = DecodeStep(problem.inputs.kv_lens, problem.inputs.page_table, 1, 5)
    workspace = DecodeWorkspace.allocate(4, 3, 64, torch.device("cpu"))
    for _ in range(2):
        assert not module.fp8_decodes(problem.q, pages, out, workspace, Head(0.1), step)
    assert bool((out == ALONE).all())
    assert len(caplog.records) == 1 and "no nvrtc" in caplog.text


@pytest.mark.parametrize("head_dim", module.SHAPES)
def test_shares_stay_within_the_workspace(head_dim):
    """And within the shared memory that holds their maxima and sums, or a number for each request."""
    shape = module.SHAPES[head_dim]
    shared = shape.count_shared_bytes(head_dim)
    assert shape.blocks * (shared + 3072) <= MOST_BYTES
    for requests in (1, 3, 8, 33, 34, 100, 200, 900):
        for kv_heads in (1, 2, 8, 32):
            for group in (1, 5, 16):
                slots = module.plan_slots(
                    requests, kv_heads, 131072, head_dim=head_dim, group=group, processors=132
                )
                assert slots == 0 or requests < slots
                assert slots * kv_heads <= 132 * MOST_PROGRAMS and 8 * slots * group <= shared
                assert slots == 0 or 4 * requests <= shared // shape.warps
    assert module.plan_slots(1, 8, 200, head_dim=head_dim, group=4, processors=132) == 2
    assert module.plan_slots(256, 8, 8192, head_dim=head_dim, group=4, processors=132) == 0
