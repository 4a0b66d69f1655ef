"""Chunks whose keys are divided among programs: plans, and values against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Problem, make_problem
from planned_attention import attend_by_plan, find_blocks

pytest.importorskip("triton")

from headrace.kernels.attention import HOPPER_ROWS, hopper
from headrace.kernels.attention.blocks import Head, Tile
from headrace.kernels.attention.prefill import PrefillPlan, plan_open_prefill, plan_prefill, prefill
from headrace.kernels.attention.splits import (
    MOST_SPLITS,
    Splitting,
    SplitWorkspace,
    has_splits,
)
from headrace.layers.attention import hopper as backends
from headrace.layers.attention.contract import AttentionGeometry
from headrace.layers.attention.hopper import HopperAttention
from headrace.layers.attention.reference import ReferenceAttention

CPU = torch.device("cpu")
TILE = Tile(128, 128, 12, 2)
TOKENS = 32  # with four query heads of a kv head
ROOM = 16  # 132 multiprocessors, eight kv heads
H200 = AttentionGeometry("cpu", "bfloat16", "bfloat16", (9, 0), 32, 8, 128, 128, 64)
SHAPE = dict(num_heads=8, num_kv_heads=2, head_dim=128, page_size=64)


def make_workspace(room: int, rows: int = 1, head_dim: int = 1) -> SplitWorkspace:
    found = SplitWorkspace.allocate(room, 1, rows, head_dim, CPU)
    assert found is not None
    return found


def plan(
    lens: list[tuple[int, int]], *, room: int = ROOM, window: int = 0, first: int = 0, spare: int | None = None
) -> PrefillPlan:
    """Of (query length, kv length) of each request; with ``spare`` as if lengths were known on the device alone, with
    room for so many tokens more."""
    starts = torch.tensor([0, *(n for n, _ in lens)]).cumsum(0).int()
    splitting = Splitting(torch.tensor([n for _, n in lens], dtype=torch.int32), window, make_workspace(room))
    given = dict(group=4, tile=TILE, splitting=splitting)
    if spare is not None:
        return plan_open_prefill(starts, int(starts[-1]) + spare, **given)
    return plan_prefill(starts, [n for n, _ in lens], first=first, **given)


def count_by_request(found: PrefillPlan) -> dict[int, int]:
    """Splits of each tile of a request."""
    return {request: splits for request, _, _, splits in found.blocks.tolist() if request >= 0}


@pytest.mark.interpreted
@pytest.mark.parametrize("lens,splits", [
    ([(64, 8256)], [8]), ([(1, 8193)], [13]), ([(16, 8208)], [13]), ([(256, 8448)], [2]), ([(64, 32832)], [8]),
    ([(64, 2112)], [6]), ([(16, 16)], [1]), ([(64, 890)], [1]), ([(64, 1024)], [4]), ([(512, 8704)], [1]),
    ([(64, 8256)] * 2, [4, 4]), ([(64, 8256)] * 64, [1] * 64),
    ([(200, 200)] * 40 + [(20, 32768)], [1] * 40 + [6]),  # the long one alone, which would end last
    ([(1024, 1024)], [1]), ([(600, 8792)], [1]),
], ids=lambda lens: str(lens)[:40])  # fmt: skip
def test_few_tiles_behind_long_contexts_are_divided(lens, splits):
    assert count_by_request(plan(lens)) == dict(enumerate(splits))


@pytest.mark.interpreted
def test_a_kv_head_alone_has_no_more_splits_than_a_warp_merges():
    assert count_by_request(plan([(16, 32784)], room=132)) == {0: MOST_SPLITS}


@pytest.mark.interpreted
@pytest.mark.parametrize("window,splits", [(128, 1), (1024, 5), (4096, 11), (20000, 13)])
def test_windows_leave_less_to_divide(window, splits):
    assert count_by_request(plan([(16, 8208)], window=window)) == {0: splits}


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(24))
def test_plans_have_every_tile_once(seed):
    rng = random.Random(seed)
    room, window = rng.choice((2, 4, 16, 33, 132)), rng.choice((0, 0, 1, 700, 5000))
    lens = []
    for _ in range(rng.randint(1, 40)):
        query_len = rng.choice((1, 1, 7, 40, 300))
        lens.append((query_len, query_len + rng.choice((0, 0, 90, 1500, 9000, 32000))))
    first, is_open = rng.randint(0, len(lens) - 1), seed % 2 == 1
    found = plan(lens, room=room, window=window, first=first, spare=5 if is_open else None)
    entries = found.blocks.tolist()
    used = [entry for entry in entries if entry[0] >= 0]
    assert all(request == -1 for request, *_ in entries[len(used) :])
    divided = [entry for entry in used if entry[3] > 1]
    assert used[: len(divided)] == divided and found.claims.tolist() == [0, 0, 0, len(divided)]
    tiles = {
        (request, at) for request, (query_len, _) in enumerate(lens)
        if (query_len > 1 if is_open else request >= first) for at in range(0, query_len, TOKENS)
    }
    assert len(divided) <= room and (len(tiles) > room or len(used) <= room)
    at = 0
    while at < len(used):
        request, token, _, splits = used[at]
        begin, end = find_blocks(token, TOKENS, *lens[request], window)
        assert 1 <= splits <= min(MOST_SPLITS, end - begin), "no split is empty"
        assert used[at : at + splits] == [[request, token, split, splits] for split in range(splits)]
        tiles.remove((request, token))
        at += splits
    assert not tiles
    query_lens, kv_lens = ([n[i] for n in lens[0 if is_open else first :]] for i in (0, 1))
    if not is_open and not has_splits(query_lens, kv_lens, tokens=TOKENS, window=window, room=room):
        assert not divided, "the host rules out no more than the device"


@pytest.mark.parametrize("lens,expected", [
    ([(64, 8256)], True), ([(64, 890)], False), ([(8192, 8192)], False), ([(2048, 8192)], False),
    ([(64, 2112)] * 128, False), ([(2048, 2048)] * 4, False), ([(200, 200)] * 40 + [(20, 32768)], True), ([], False),
    ([(1100, 1100)], False), ([(512, 512)], False),
], ids=lambda lens: str(lens)[:40])  # fmt: skip
def test_steps_of_many_tiles_keep_plans_without_splits(lens, expected):
    given = [n for n, _ in lens], [n for _, n in lens]
    assert has_splits(*given, tokens=TOKENS, window=0, room=ROOM) is expected


@pytest.mark.parametrize("change,expected", [
    ({}, (128, 128, 128)), ({"head_dim": 64, "value_dim": 64, "num_kv_heads": 4}, (132, 192, 64)),
    ({"num_kv_heads": 72, "num_heads": 72}, None), ({"window": 128}, None), ({"window": 4096}, (128, 128, 128)),
], ids=str)  # fmt: skip
def test_the_workspace_has_a_split_for_each_multiprocessor(change, expected, monkeypatch):
    monkeypatch.setattr(backends, "count_processors", lambda _: 132)
    found = HopperAttention(replace(H200, **change), CPU)._split_workspace
    assert (None if found is None else tuple(found.parts.shape)) == expected
    assert found is None or tuple(found.stats.shape) == (*expected[:2], 2)


@pytest.fixture
def plans(monkeypatch):
    """Plans that the backend makes in Triton's interpreter, for 24 multiprocessors; plain torch does what they say."""
    made = []

    def attend(q, pages, out, plan, head, step, *, pdl):
        made.append(plan)
        attend_by_plan(q, pages, out, plan, head, step)

    monkeypatch.setattr(HopperAttention, "pdl", False)  # the interpreter has no such launches
    monkeypatch.setattr(hopper, "is_compiled", lambda *_: True)
    monkeypatch.setattr(hopper, "prefill", attend)
    monkeypatch.setattr(backends, "count_processors", lambda _: 24)
    return made


LONG = ((1, 75), (20, 1500), (40, 2600), (9, 9))


@pytest.mark.interpreted
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("case", [
    Case(LONG, **SHAPE), Case(LONG, **SHAPE | {"head_dim": 64}, window=1100, softcap=2.0, has_sinks=True),
], ids=["plain", "all"])  # fmt: skip
def test_the_backend_divides_keys(case, is_open, plans):
    problem = make_problem(case, "cpu", torch.float16)
    num_tokens = problem.inputs.num_tokens
    backend = HopperAttention(problem.geometry, CPU)
    if is_open:
        problem.open(3)
    assert problem.error(problem.run(backend)[:num_tokens]) < 2e-3
    counts = count_by_request(plans[0])
    assert counts[1] > 1 and counts[2] > 1 and counts[3] == 1
    assert plans[0].workspace is backend._split_workspace


@pytest.mark.interpreted
def test_a_closed_step_of_short_contexts_has_a_plan_without_splits(plans):
    problem = make_problem(Case(((1, 75), (20, 75)), **SHAPE), "cpu", torch.float16)
    assert problem.error(problem.run(HopperAttention(problem.geometry, CPU))) < 2e-3
    assert plans[0].workspace is None and plans[0].blocks.shape == (1, 2)


@pytest.mark.interpreted
def test_tritons_kernel_refuses_plans_with_splits():
    problem, made = make_problem(Case(((9, 1200),), **SHAPE), "cpu", torch.float16), plan([(9, 1200)])
    with pytest.raises(AssertionError, match="divide"):
        prefill(problem.q, (problem.pages.k, problem.pages.v), problem.q, made, Head(0.1), (None, None, None))


# on the device

CASES = {
    "lengths": Case(((1, 1), (1, 5000), (2, 3000), (7, 1024), (40, 9000), (300, 4321), (33, 700)), **SHAPE),
    "alone-64": Case(((64, 8256),), **SHAPE | {"num_heads": 32, "num_kv_heads": 8}),
    "alone-1": Case(((1, 8193),), **SHAPE, num_decodes=0),
    "32k": Case(((64, 32768),), **SHAPE),
    "one-kv-head": Case(((17, 20000), (5, 2000)), **SHAPE | {"num_kv_heads": 1}),
    "multi-head": Case(((70, 5000),), **SHAPE | {"num_kv_heads": 8}),
    "group-7": Case(((70, 5000), (3, 3000)), **SHAPE | {"num_heads": 14}),
    "small-pages": Case(((50, 4000), (9, 1999)), **SHAPE | {"page_size": 8}),
    "large-pages": Case(((50, 4000), (9, 1999)), **SHAPE | {"page_size": 256}),
    "dim-64": Case(((1, 75), (64, 8256), (300, 4500)), **SHAPE | {"head_dim": 64}),
    "window": Case(((64, 8256), (30, 700)), **SHAPE, window=2000),
    "softcap": Case(((64, 8256),), **SHAPE, softcap=2.0),
    "sinks": Case(((64, 8256), (9, 9)), **SHAPE, has_sinks=True),
    "all": Case(((64, 8256), (300, 2000)), **SHAPE | {"head_dim": 64}, window=3000, softcap=2.0, has_sinks=True),
    "steep": Case(((64, 8256),), **SHAPE, steepness=6.0),
    "one-of-many": Case((*((200, 200),) * 12, (20, 9000)), **SHAPE | {"num_heads": 32, "num_kv_heads": 8}),
}


@pytest.fixture
def on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def attend(problem: Problem, rows: int) -> tuple[torch.Tensor, PrefillPlan]:
    inputs, params, geometry = problem.inputs, problem.params, problem.geometry
    device, group = problem.q.device, geometry.num_heads // geometry.num_kv_heads
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = SplitWorkspace.allocate(
        sms, geometry.num_kv_heads, max(HOPPER_ROWS[geometry.head_dim]), geometry.head_dim, device
    )
    workspace.parts.fill_(float("nan"))
    workspace.stats.fill_(float("nan"))
    made = plan_prefill(
        inputs.query_start, inputs.query_lens_cpu, first=0, group=group,
        tile=hopper.prefill_tile(geometry.head_dim, rows),
        splitting=Splitting(inputs.kv_lens, params.window, workspace),
    )
    out = torch.full_like(problem.q, 7.0)
    head = Head(params.scale, params.window, params.softcap, params.sinks)
    step = (inputs.query_start, inputs.kv_lens, inputs.page_table)
    for _ in range(2):  # layers share a plan
        hopper.prefill(problem.q, (problem.pages.k, problem.pages.v), out, made, head, step)
    return out, made


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name,rows", [(name, rows) for name, c in CASES.items() for rows in HOPPER_ROWS[c.head_dim]])
def test_values(name, rows, dtype, tolerance, on_hopper):
    problem = make_problem(CASES[name], "cuda", dtype)
    out, made = attend(problem, rows)
    assert max(count_by_request(made).values()) > 1
    assert problem.error(out) < tolerance
    assert made.claims.tolist()[:3] == [0, 0, 0], "the next layer counts from zero"
    for _ in range(5):
        assert torch.equal(attend(problem, rows)[0], out), "whichever program takes a split"


@pytest.mark.cuda
@pytest.mark.parametrize("context", [1024, 1500, 8192])
def test_chunks_of_all_lengths(context, on_hopper):
    for first in range(1, 301, 60):
        spans = tuple((n, n + context) for n in range(first, first + 60, 13))
        problem = make_problem(Case(spans, **SHAPE, num_decodes=0), "cuda", torch.bfloat16)
        assert problem.error(attend(problem, 128)[0]) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_the_backend_on_steps_of_both_kinds(name, on_hopper):
    problem = make_problem(CASES[name], "cuda", torch.bfloat16)
    backend, num_tokens = HopperAttention(problem.geometry, torch.device("cuda")), problem.inputs.num_tokens
    assert problem.error(problem.run(backend)) < 1e-2
    assert backend._is_own and backend._plan.workspace is backend._split_workspace
    if name == "alone-1":
        return  # a decode, in a step of the other kind
    problem.open(3)
    assert problem.error(problem.run(backend)[:num_tokens]) < 1e-2
    assert max(count_by_request(backend._plan).values()) > 1


@pytest.mark.cuda
def test_captured_steps_divide_by_lengths_on_the_device(on_hopper):
    problem = make_problem(Case(((1, 3000), (64, 8256), (90, 5000)), **SHAPE), "cuda", torch.bfloat16)
    problem.open(40)
    problem.q.nan_to_num_()  # steps below have more tokens than the problem
    backend = HopperAttention(problem.geometry, torch.device("cuda"))
    problem.run(backend)
    starts, lens = problem.inputs.query_start, problem.inputs.kv_lens
    graph = torch.cuda.CUDAGraph()
    starts.zero_()
    with torch.cuda.graph(graph):
        out = problem.run(backend)
    for spans in (
        ((1, 3000), (64, 8256), (90, 5000)), ((1, 10), (64, 64), (90, 5000)), ((20, 2000), (9, 7000), (1, 4999)),
        ((64, 1100), (64, 400), (64, 300)), ((1, 3000), (64, 8256), (90, 5000)),
    ):
        query_lens, kv_lens = [n for n, _ in spans], [n for _, n in spans]
        num_tokens = sum(query_lens)
        starts[:4] = torch.tensor([0, *query_lens]).cumsum(0)
        starts[4:] = num_tokens
        lens[:3] = torch.tensor(kv_lens)
        inputs = replace(
            problem.inputs, has_dynamic_lengths=False, num_tokens=num_tokens, query_lens_cpu=query_lens,
            kv_lens_cpu=kv_lens, max_query_len=max(query_lens), max_kv_len=max(kv_lens),
            query_start=starts[:4].cpu(), kv_lens=lens[:3].cpu(), page_table=problem.inputs.page_table[:3].cpu(),
        )
        reference = ReferenceAttention(replace(problem.geometry, device="cpu", dtype="float32"), CPU)
        reference.prepare(inputs)
        pages = replace(problem.pages, k=problem.pages.k.cpu().float(), v=problem.pages.v.cpu().float())
        expected = reference.attend(problem.q[:num_tokens].cpu().float(), pages, problem.params)
        out.fill_(7.0)
        graph.replay()
        found = out[:num_tokens].cpu().float()
        assert float((found - expected).norm() / expected.norm()) < 1e-2
        again = out.clone()
        graph.replay()
        assert torch.equal(again[:num_tokens], out[:num_tokens])
