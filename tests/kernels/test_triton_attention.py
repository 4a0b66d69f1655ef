"""The Triton attention kernels on values: mixed batches, page tables in any order, every geometry they claim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make_problem
from devices import DEVICES, ON_GPU

pytest.importorskip("triton")

from headrace.kernels.attention import LEAST_MEMBERS, PREFIX_STEP, PrefixGroups, count_packed
from headrace.kernels.attention.blocks import Tile, block_dim
from headrace.kernels.attention.decodes import MOST_PROGRAMS, DecodeWorkspace, decode_tile, plan_splits
from headrace.kernels.attention.prefixes import count_members, count_splits
from headrace.kernels.operation import LARGE_BLOCK
from headrace.layers.attention import reason_against_triton
from headrace.layers.attention.contract import AttentionGeometry
from headrace.layers.attention.triton import DependentLaunchTritonAttention, TritonAttention

MIXED = ((1, 1), (1, 75), (7, 7), (20, 75))
CASES = {
    "mixed": Case(MIXED),
    "mixed-big-pages": Case(MIXED, page_size=64),
    "multi-head": Case(MIXED, num_heads=3, num_kv_heads=3),
    "multi-query-odd-group": Case(MIXED, num_heads=7, num_kv_heads=1, page_size=4),
    "dim-8": Case(MIXED, head_dim=8),
    "dim-80": Case(MIXED, head_dim=80),
    "dim-96": Case(MIXED, head_dim=96, page_size=32),
    "dim-128": Case(MIXED, head_dim=128, page_size=128),
    "dim-192-value-128": Case(((1, 40), (9, 50)), head_dim=192, value_dim=128),
    "dim-256": Case(((1, 40), (9, 50)), head_dim=256),
    "window": Case(MIXED, window=9),
    "window-over-pages": Case(((1, 150), (33, 150)), window=50, page_size=64),
    "softcap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, has_sinks=True),
    "all": Case(MIXED, window=12, softcap=2.0, has_sinks=True, head_dim=80),
    "prefill-of-one-token": Case(((1, 30), (1, 30)), num_decodes=0),
    "padded-graph-bound": Case(((1, 3), (1, 17)), max_kv_len=2048),
}


EXACTLY = pytest.param("cpu", torch.float32, 1e-5, marks=pytest.mark.interpreted)


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention(name, device, dtype, tolerance):
    problem = make_problem(CASES[name], device, dtype)
    assert problem.error(problem.run(TritonAttention(problem.geometry, torch.device(device)))) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
@pytest.mark.parametrize("name", ["mixed", "window", "all", "dim-128", "prefill-of-one-token"])
def test_open_steps(name, device, dtype, tolerance):
    """Spans known on the device alone, with room left in tokens and in requests."""
    problem = make_problem(CASES[name], device, dtype)
    num_tokens = problem.inputs.num_tokens
    problem.open(3)
    out = problem.run(TritonAttention(problem.geometry, torch.device(device)))
    assert problem.error(out[:num_tokens]) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
@pytest.mark.parametrize("name", ["mixed", "window", "all", "dim-128", "prefill-of-one-token", "padded-graph-bound"])
def test_pages_of_8_bit_floats(name, device, dtype, tolerance):
    """As exact as plain pages are for what the pages hold: products and sums are those of the queries' dtype."""
    problem = make_problem(CASES[name], device, dtype, kv_dtype=torch.float8_e4m3fn)
    assert problem.pages.k.dtype == torch.float8_e4m3fn
    assert problem.error(problem.run(TritonAttention(problem.geometry, torch.device(device)))) < tolerance
    plain = replace(problem.geometry, device="cuda", capability=(8, 0))
    assert "8.9" in reason_against_triton(plain)
    assert reason_against_triton(replace(plain, capability=(9, 0))) is None


def test_wide_heads_of_large_groups_are_left_to_others_where_blocks_are_small():
    wide = AttentionGeometry("cuda", "bfloat16", "bfloat16", (8, 9), 64, 1, 192, 192, 64)
    assert "99 KiB" in str(reason_against_triton(wide))
    narrow = {"head_dim": 128, "value_dim": 128}
    for fits in (narrow, {"num_heads": 32}, {"capability": (8, 0)}, {"capability": (9, 0)}):
        assert reason_against_triton(replace(wide, **fits)) is None


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_half_precision(device, dtype, tolerance):
    problem = make_problem(Case(MIXED, head_dim=16), device, dtype)
    assert problem.error(problem.run(TritonAttention(problem.geometry, torch.device(device)))) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
@pytest.mark.parametrize("processors", [4, 9])
@pytest.mark.parametrize("window,has_sinks", [(0, False), (0, True), (90, False)])
def test_decode_split_over_keys(window, has_sinks, processors, device, dtype, tolerance):
    """Some requests that are cut and some that are not; more slots than blocks."""
    problem = make_problem(
        Case(((1, 1), (1, 200), (1, 70)), page_size=16, window=window, has_sinks=has_sinks), device, dtype
    )
    backend = TritonAttention(problem.geometry, torch.device(device))
    backend._workspace = DecodeWorkspace.allocate(processors, 2, 64, torch.device(device))
    first, second = problem.run(backend), problem.run(backend)
    assert problem.error(first) < tolerance
    assert torch.equal(first, second)
    assert not backend._workspace.counters.any()


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
@pytest.mark.parametrize("num_requests", [1, 5])
def test_one_long_request_among_short_ones(num_requests, device, dtype, tolerance):
    spans = tuple((1, 300 if i == num_requests // 2 else 1 + 3 * i) for i in range(num_requests))
    problem = make_problem(Case(spans, num_heads=2, num_kv_heads=1, head_dim=16, max_kv_len=2048), device, dtype)
    backend = TritonAttention(problem.geometry, torch.device(device))
    backend._workspace = DecodeWorkspace.allocate(9, 2, 16, torch.device(device))
    assert problem.error(problem.run(backend)) < tolerance


def grouped_case(sizes: tuple[int, ...], begin: int, **about: object) -> Case:
    """Decodes in groups of these sizes, of which those of each begin with the same ``begin`` pages of their own; those
    of one decode begin with no other's."""
    leaders = tuple(first for i, size in enumerate(sizes) for first in [sum(sizes[:i])] * size)
    page_size = about.setdefault("page_size", 16)
    spans = tuple((1, begin * page_size + 1 + 19 * i % 150) for i in range(len(leaders)))
    return Case(spans, shared_pages=begin, leaders=leaders, **about)


def pack_groups(case: Case, device: str) -> PrefixGroups:
    """What the host finds in the page tables of `grouped_case`."""
    size, leaders = len(case.spans), case.leaders
    packed = torch.zeros(count_packed(size), dtype=torch.int64)
    room = iter(packed[size:].view(-1, 2))
    for first in sorted(set(leaders)):
        count = leaders.count(first)
        if count > 1:
            packed[first : first + count] = case.shared_pages * case.page_size // PREFIX_STEP * PREFIX_STEP
            next(room)[:] = torch.tensor((first, count))
    return PrefixGroups.of(packed.to(device), size)


GROUPED = {
    "one group": grouped_case((9,), 9, num_heads=8),
    "all sizes": grouped_case((1, 5, 2, 8, 1, 3, 7, 4, 6), 5, num_heads=8),
    "full tiles": grouped_case((16, 1, 16), 8, num_heads=8),
    "odd group of heads": grouped_case((7, 6), 3, num_heads=9, num_kv_heads=3, page_size=64, softcap=2.0),
    "one head each": grouped_case((1, 20, 9), 18, num_heads=2, head_dim=80, has_sinks=True),
    "a group of eight heads": grouped_case((3, 8, 8), 13, num_heads=8, num_kv_heads=1, has_sinks=True),
    "large pages": grouped_case((5, 4), 2, num_heads=4, num_kv_heads=1, head_dim=128, page_size=128),
    "wide heads": grouped_case((4, 5), 5, head_dim=256),
    "other values": grouped_case((1, 6), 5, head_dim=48, value_dim=32),
    "no group": grouped_case((1, 1, 1, 1), 4, num_heads=8),
}


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("processors", [1, 16])
def test_requests_that_begin_alike(processors, name, device, dtype, tolerance):
    """Groups of several sizes and single requests, with rests of several lengths; by one program a group and kv head,
    and by more than there are steps of keys."""
    case = GROUPED[name]
    problem = make_problem(case, device, dtype)
    problem.inputs = replace(problem.inputs, prefixes=pack_groups(case, device))
    backend = TritonAttention(problem.geometry, torch.device(device))
    assert backend.prefix_members == count_members(case.num_heads // case.num_kv_heads) >= 2 * LEAST_MEMBERS
    backend._workspace = replace(backend._workspace, processors=processors)
    first = problem.run(backend)
    assert problem.error(first) < tolerance
    assert torch.equal(first, problem.run(backend))


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
def test_requests_that_begin_alike_beside_prompts(device, dtype, tolerance):
    case = grouped_case((4, 1, 5), 5, num_heads=8)
    prompts = ((70, 150), (3, 81))
    problem = make_problem(
        replace(case, spans=(*case.spans, *prompts), leaders=(*case.leaders, 10, 11)), device, dtype
    )
    problem.inputs = replace(problem.inputs, prefixes=pack_groups(case, device))
    backend = TritonAttention(problem.geometry, torch.device(device))
    assert problem.error(problem.run(backend)) < tolerance


def test_requests_that_begin_alike_are_computed_together_by_plain_pages_alone():
    problem = make_problem(Case(((1, 3),), num_heads=4, num_kv_heads=1), "cpu", torch.float32)
    for change, members in (
        ({}, 16), ({"window": 9}, 0), ({"kv_dtype": "float8_e4m3fn"}, 0), ({"num_heads": 16}, 0), ({"num_heads": 8}, 8),
    ):
        geometry = replace(problem.geometry, **change)
        assert TritonAttention(geometry, torch.device("cpu")).prefix_members == members


def test_full_groups_give_each_multiprocessor_two_programs():
    assert count_splits(512, 8, 16, 132) == 1
    assert count_splits(256, 8, 16, 132) == 2
    assert count_splits(512, 4, 16, 132) == 2
    assert count_splits(64, 8, 16, 132) == 8
    assert count_splits(2048, 8, 16, 132) == 1


@pytest.mark.cuda
def test_groups_of_a_graph_may_change():
    """One capture serves every division, as its groups are read on the device."""
    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64)
    divisions = [(16,) * 6, (1,) * 32 + (13, 9, 40 - 32, 1, 1) + (16, 16), (4,) * 24, (1,) * 96]
    cases = [grouped_case(sizes, 12, **shape) for sizes in divisions]
    problems = [make_problem(case, "cuda", torch.bfloat16, seed=i) for i, case in enumerate(cases)]
    problem = problems[0]
    held = pack_groups(cases[0], "cuda")
    problem.inputs = replace(problem.inputs, prefixes=held)
    backend = DependentLaunchTritonAttention(problem.geometry, torch.device("cuda"))
    problem.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(problem.q, problem.pages, problem.params)
    for case, other in zip(cases, problems, strict=True):
        groups = pack_groups(case, "cuda")
        held.keys.copy_(groups.keys)
        held.groups.copy_(groups.groups)
        problem.q.copy_(other.q)
        problem.inputs.kv_lens.copy_(other.inputs.kv_lens)
        problem.inputs.page_table.copy_(other.inputs.page_table)
        problem.pages.k.copy_(other.pages.k)
        problem.pages.v.copy_(other.pages.v)
        graph.replay()
        assert other.error(out) < 1e-2


def test_splits_fill_the_device_and_stay_within_the_workspace():
    tile = decode_tile(4, 128, 2)
    assert plan_splits(1, 8, 8192, head_dim=128, tile=tile, processors=132) == (16, Tile(16, 64, 4, 9))
    assert plan_splits(1, 8, 100, head_dim=128, tile=tile, processors=132)[0] == 2
    assert plan_splits(256, 8, 8192, head_dim=128, tile=tile, processors=132) == (256, tile)
    few = replace(tile, num_stages=7)  # whole requests, as many as are on the device at once
    assert plan_splits(40, 8, 4096, head_dim=128, tile=tile, processors=132) == (40, few)
    assert plan_splits(250, 2, 4096, head_dim=128, tile=tile, processors=132) == (250, few)
    assert plan_splits(250, 4, 4096, head_dim=128, tile=tile, processors=132) == (250, tile)
    assert plan_splits(40, 8, 4096, head_dim=128, tile=tile, processors=132, is_roomy=False) == (40, tile)
    wide = decode_tile(4, 128, 4)  # float32, which keeps its small tile
    assert plan_splits(40, 8, 4096, head_dim=128, tile=wide, processors=132) == (40, wide)
    assert plan_splits(40, 8, 8192, head_dim=128, tile=tile, processors=132)[0] == 66
    assert plan_splits(100, 8, 8192, head_dim=128, tile=tile, processors=132)[0] == 132
    for head_dim in (64, 96, 128, 256):
        for requests in (1, 3, 8, 16, 17, 33, 34, 200):
            for kv_heads in (1, 2, 8, 32):
                slots, _ = plan_splits(
                    requests, kv_heads, 131072, head_dim=head_dim, tile=decode_tile(4, head_dim, 2), processors=132
                )
                assert slots >= requests and (slots == requests or slots * kv_heads <= 132 * MOST_PROGRAMS)


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 8, 16, 32, 64, 71, 128])
def test_splits_of_many_heads_fit_a_block(group: int, width: int):
    """Of queries in shared memory, from 64 rows on, with blocks of keys and of values."""
    tile, padded = decode_tile(group, block_dim(width), 2), block_dim(width)
    for requests, kv_heads in ((1, 1), (1, 8), (8, 8), (64, 1)):
        slots, split = plan_splits(requests, kv_heads, 8192, head_dim=width, tile=tile, processors=132)
        assert slots > requests and split.rows == tile.rows and split.num_stages >= 4
        if split.rows >= 64:
            assert 2 * padded * (split.rows + (split.num_stages + 1) * split.keys) + 64 <= LARGE_BLOCK
        else:
            assert split.num_stages in (5, 7, 9)


@pytest.mark.parametrize("device,dtype,tolerance", [EXACTLY, *ON_GPU])
def test_one_long_request_among_many(device, dtype, tolerance):
    """By itself, a program would read it long after the others have ended."""
    spans = tuple((1, 300 if i == 20 else 1 + i % 7) for i in range(34))
    problem = make_problem(Case(spans, num_heads=2, num_kv_heads=1, head_dim=16, max_kv_len=8192), device, dtype)
    backend = TritonAttention(problem.geometry, torch.device(device))
    backend._workspace = DecodeWorkspace.allocate(12, 2, 16, torch.device(device))
    assert plan_splits(34, 1, 8192, head_dim=16, tile=decode_tile(2, 16, dtype.itemsize), processors=12)[0] == 48
    assert problem.error(problem.run(backend)) < tolerance
    assert backend.short_context(34) == 4096 and backend.short_context(33) == backend.short_context(200) == 0


LONG = {
    "decode-131072": Case(((1, 131072), (1, 5), (1, 40000)), num_heads=32, num_kv_heads=8, head_dim=128, page_size=64),
    "decode-batch": Case(
        tuple((1, 1 + 37 * i) for i in range(64)), num_heads=16, num_kv_heads=8, head_dim=128, page_size=16
    ),
    "prefill-late-chunk": Case(((1, 9000), (513, 20000)), num_heads=8, num_kv_heads=2, head_dim=128, page_size=64),
    "prefill-many": Case(
        tuple((1 + 29 * i, 1 + 31 * i) for i in range(1, 30)), num_heads=8, num_kv_heads=8, head_dim=128, page_size=64,
        num_decodes=0
    ),
    "prefill-window": Case(
        ((1, 5000), (1500, 5000)), num_heads=8, num_kv_heads=1, head_dim=256, page_size=16, window=1024
    ),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", LONG)
def test_long_contexts(name, dtype, tolerance):
    problem = make_problem(LONG[name], "cuda", dtype)
    assert problem.error(problem.run(TritonAttention(problem.geometry, torch.device("cuda")))) < tolerance


@pytest.mark.cuda
def test_decode_replays_in_a_graph_with_other_lengths():
    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_kv_len=4096)
    problem = make_problem(Case(((1, 12), (1, 4000), (1, 1)), **shape), "cuda", torch.bfloat16)
    other = make_problem(Case(((1, 700), (1, 129), (1, 3000)), **shape), "cuda", torch.bfloat16)
    backend = TritonAttention(problem.geometry, torch.device("cuda"))
    problem.check_replays(other, backend, 1e-2)
