"""Rotation, page write and attention of decodes in one launch, on values: see ``csrc/cuda/few_decodes.cu``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import DecodeStep
from headrace.kernels.attention.reference import attend_densely
from headrace.kernels.cuda_source import MOST_BYTES
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.few_decodes import hopper as module
from headrace.kernels.few_decodes.hopper import few_decodes
from headrace.kernels.rowwise import HeadShape, reference
from headrace.layers.attention import triton
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LARGEST = 448.0
"""In e4m3."""


@dataclass(frozen=True)
class Case:
    """``lens`` of the rows; the last ``drafts`` rows follow the one before them in one request. ``rotary``: -1 whole
    heads. ``gap``: elements between pages. ``loud``: new keys and values are so much larger, queries smaller."""

    lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    rotary: int = -1
    interleaved: bool = False
    norm_offset: float | None = None
    softcap: float = 0.0
    window: int = 0
    sinks: torch.dtype | None = None
    drafts: int = 0
    gap: int = 0
    loud: float = 1.0


CASES = {
    "one": Case((1100,)),
    "first-token": Case((1,)),
    "end-of-unit": Case((16,)),
    "two-ranks": Case((1300,), num_heads=16, num_kv_heads=4),
    "two-ranks-of-4-kv-heads": Case((1300,), num_heads=16, num_kv_heads=2, norm_offset=0.0),
    "four-ranks-of-4-kv-heads": Case((1300, 70), num_heads=8, num_kv_heads=1, norm_offset=0.0),
    "group-16": Case((700,), num_heads=64, num_kv_heads=4),
    "group-1": Case((300,), num_heads=8),
    "group-7": Case((300, 5), num_heads=28, num_kv_heads=4),
    "norms": Case((700, 90), num_heads=32, num_kv_heads=4, norm_offset=0.0),
    "norms-with-offset": Case((130,), norm_offset=1.0),
    "dim-64-sinks": Case((1100,), num_heads=64, head_dim=64, sinks=BF16),
    "dim-64-window": Case((1100,), num_heads=64, head_dim=64, sinks=torch.float32, window=128),
    "window-in-pages": Case((200,), window=50, page_size=16),
    "softcap": Case((400,), softcap=2.0),
    "padded": Case((130, 0, 77, 0)),
    "five": Case((40, 4000, 77, 512, 513)),
    "long": Case((40000,)),
    "long-small-clusters": Case((9000, 20, 3000, 1)),
    "few-heads-long": Case((30000,), num_heads=8, num_kv_heads=4),
    "drafts": Case((100, 31, 32, 33), drafts=2, norm_offset=0.0),
    "drafts-over-units": Case((16,) + (0,) * 15, num_heads=8, num_kv_heads=2, head_dim=64, drafts=15),
    "pages-of-5": Case((77, 14, 15), page_size=5, drafts=1),
    "part-rotated": Case((515,), rotary=64),
    "interleaved": Case((515,), rotary=32, interleaved=True, head_dim=64, gap=4096),
    "unrotated": Case((515,), rotary=0),
    "loud": Case((515, 33), loud=256.0),
}


@dataclass
class Problem:
    qkv: torch.Tensor
    rotation: Rotation
    pages: tuple[torch.Tensor, torch.Tensor]
    head: Head
    step: DecodeStep
    written: tuple[torch.Tensor, torch.Tensor]
    expected: torch.Tensor

    def run(self) -> torch.Tensor | None:
        return few_decodes(self.qkv, self.rotation, self.pages, self.head, self.step)


def make_problem(case: Case, device: str, seed: int = 0, dtype: torch.dtype = BF16) -> Problem:
    """Pages of ``dtype`` in random order, NaN where nothing is, and what is expected of the result and the pages."""
    rng = torch.Generator().manual_seed(seed)
    lens, rows, page = list(case.lens), len(case.lens), case.page_size
    owner = list(range(rows))  # row that a request begins with
    for row in range(rows - case.drafts, rows):
        owner[row], lens[row] = rows - case.drafts - 1, lens[row - 1] + 1
    mine = {first: [lens[row] for row in range(rows) if owner[row] == first] for first in set(owner)}
    counts = [-(-max(mine.get(row, [0])) // page) for row in range(rows)]
    num_pages, kv_heads, dim = sum(counts) + 1, case.num_kv_heads, case.head_dim
    tables = torch.zeros(rows, max(counts) + 1, dtype=torch.int32)
    for row, ids in enumerate((torch.randperm(num_pages - 1, generator=rng) + 1).split(counts)):
        tables[row, : len(ids)] = ids
    table, at = tables[owner], torch.tensor([max(0, n - 1) for n in lens])
    slots = table.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
    size = page * kv_heads * dim
    whole = tuple(torch.full((num_pages, size + case.gap), float("nan"), dtype=BF16) for _ in range(2))
    pages = tuple(x[:, :size].unflatten(1, (page, kv_heads, dim)) for x in whole)
    for first, own in mine.items():
        seen = torch.arange(max(0, min(own) - case.window) if case.window else 0, max(0, min(own) - 1))
        for x in pages:
            x[tables[first].long()[seen // page], seen % page] = torch.randn(
                len(seen), kv_heads, dim, generator=rng
            ).to(BF16)
    pages = tuple(x.to(dtype)[:, :size].unflatten(1, (page, kv_heads, dim)) for x in whole)
    rotary = dim if case.rotary < 0 else case.rotary
    width = (case.num_heads + 2 * kv_heads) * dim
    norms = None
    if case.norm_offset is not None:
        norms = (torch.randn(dim, generator=rng).to(BF16), torch.randn(dim, generator=rng).to(BF16))
    rotation = Rotation(
        at, torch.randn(max(lens) + 1, rotary, generator=rng) if rotary else None, slots, norms,
        HeadShape(
            num_heads=case.num_heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=rotary,
            interleaved=case.interleaved, norm_eps=1e-6, norm_offset=case.norm_offset or 0.0,
        ),
    )
    sinks = None if case.sinks is None else torch.randn(case.num_heads, generator=rng).to(case.sinks)
    head = Head(dim**-0.5, case.window, case.softcap, sinks)
    step = DecodeStep(torch.tensor(lens, dtype=torch.int32), table, rows, max(lens))
    qkv = torch.randn(rows, width + 8, generator=rng).to(BF16)[:, :width]
    qkv[:, : case.num_heads * dim] /= case.loud
    qkv[:, case.num_heads * dim :] *= case.loud
    written, expected = _expect(qkv, rotation, pages, head, step)
    return _on_device(Problem(qkv, rotation, pages, head, step, written, expected), device)


def _expect(qkv, rotation, pages, head, step):
    """In e4m3, k and v are rounded once and attention sees what that leaves of them; queries are as they are."""
    in_codes, page = pages[0].dtype == E4M3, pages[0].shape[1]
    written = tuple(x.float() if in_codes else x.clone() for x in pages)
    qkv = qkv.float() if in_codes else qkv
    norms = {} if rotation.norms is None else dict(zip(("q_norm", "k_norm"), rotation.norms, strict=True))
    q = reference.rope_write(
        qkv.contiguous(), rotation.positions, rotation.cos_sin, rotation.slots, *written, **norms, **rotation.shape
    )
    if in_codes:
        written = tuple(x.clamp(-LARGEST, LARGEST).to(E4M3) for x in written)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for row, n in enumerate(step.kv_lens.tolist()):
        if n:
            at = torch.arange(n)
            k, v = (x.float()[step.page_table[row].long()[at // page], at % page].nan_to_num() for x in written)
            expected[row] = attend_densely(
                q[row : row + 1].float(), k, v, scale=head.scale, window=head.window, softcap=head.softcap,
                sinks=head.sinks,
            )[0]
    return written, expected


def _on_device(problem: Problem, device: str) -> Problem:
    rotation, head, step = problem.rotation, problem.head, problem.step

    def move(x):
        """With its strides, on which pages with gaps depend."""
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    return Problem(
        move(problem.qkv),
        replace(
            rotation, positions=move(rotation.positions), cos_sin=move(rotation.cos_sin), slots=move(rotation.slots),
            norms=None if rotation.norms is None else tuple(map(move, rotation.norms)),
        ),
        tuple(map(move, problem.pages)), replace(head, sinks=move(head.sinks)),
        replace(step, kv_lens=move(step.kv_lens), page_table=move(step.page_table)),
        tuple(map(move, problem.written)), move(problem.expected),
    )


def take_all(monkeypatch: pytest.MonkeyPatch, cluster: int) -> None:
    """Leave nothing to other kernels because they are faster."""
    monkeypatch.setattr(module, "DIVISIONS", {dim: (module.Division(1 << 20, cluster, 1 << 20),) for dim in (64, 128)})


def own_slots(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of the step's tokens, and places in these."""
    slots = problem.rotation.slots[problem.step.kv_lens > 0]
    return slots // problem.pages[0].shape[1], slots % problem.pages[0].shape[1]


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cluster", [16, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 1e-2), (E4M3, 4e-3)])
def test_matches_rotation_and_dense_attention(
    name: str, cluster: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
):
    problem = make_problem(CASES[name], "cuda", dtype=dtype)
    take_all(monkeypatch, cluster)
    out = problem.run()
    assert out is not None
    error = float((out.double() - problem.expected).norm() / problem.expected.norm())
    assert error < tolerance
    own = own_slots(problem)
    for found, expected in zip(problem.pages, problem.written, strict=True):
        # page 0 is the null page
        assert torch.equal(found[1:].float().isnan(), expected[1:].float().isnan())
        # in e4m3 a code may be the next, where both sums lie beside what is between them
        rtol, atol = (1e-2, 1e-3) if dtype == BF16 else (0.13, 2e-3)
        torch.testing.assert_close(found.float()[own], expected.float()[own], rtol=rtol, atol=atol)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_writes_the_codes_that_the_separate_kernel_writes(name: str, monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.rowwise.triton import rope_write

    problem = make_problem(CASES[name], "cuda", dtype=E4M3)
    take_all(monkeypatch, 16)
    rotation = problem.rotation
    q_norm, k_norm = rotation.norms or (None, None)
    copies = _on_device(problem, "cuda").pages
    rope_write(
        problem.qkv, rotation.positions, rotation.cos_sin, rotation.slots, *copies, q_norm=q_norm, k_norm=k_norm,
        **rotation.shape,
    )
    assert problem.run() is not None
    own = own_slots(problem)
    for found, expected in zip(problem.pages, copies, strict=True):
        found, expected = (x.view(torch.uint8)[own] for x in (found, expected))
        if rotation.norms is None:
            assert torch.equal(found, expected)
        else:  # squares are added up in another order
            assert float((found != expected).float().mean()) < 1e-3


@pytest.mark.cuda
@pytest.mark.parametrize("lens", [(60,), (1000, 127)])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_dependent_steps_in_a_graph(lens: tuple[int, ...], dtype: torch.dtype):
    """Keys that a step writes are read by the next, before whose product has ended."""
    from headrace.kernels.linear.triton import linear_pdl
    from headrace.kernels.rowwise.triton import rope_write

    num_steps, dim, kv_heads, page = 40, 128, 4, 16
    case = Case(tuple(n + num_steps for n in lens), num_heads=16, num_kv_heads=kv_heads, head_dim=dim, page_size=page)
    problem = make_problem(case, "cuda", seed=1, dtype=dtype)
    problem.pages = tuple(x.float().nan_to_num(0.25).to(dtype) for x in problem.pages)
    copies = tuple(x.clone() for x in problem.pages)
    table, rows = problem.step.page_table, len(lens)
    weight = torch.randn(problem.qkv.shape[1], 2048, device="cuda", dtype=BF16) / 45
    x = torch.randn(num_steps, rows, 2048, device="cuda", dtype=BF16)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    shape = problem.rotation.shape

    def walk(pages: tuple[torch.Tensor, torch.Tensor], is_fused: bool) -> torch.Tensor:
        outs, own = [], kv_lens.clone()
        for number in range(num_steps):
            own += 1
            positions = own.long() - 1
            slots = table.gather(1, (positions // page)[:, None])[:, 0].long() * page + positions % page
            first = linear_pdl(x[number], weight, None)
            qkv = linear_pdl((x[number] + first[:, :2048] * 0.01), weight, None)
            rotation = Rotation(positions, problem.rotation.cos_sin, slots, None, shape)
            step = DecodeStep(own.clone(), table, rows, 4096)
            if is_fused:
                out = few_decodes(qkv, rotation, pages, problem.head, step)
                assert out is not None
            else:
                q = rope_write(qkv, positions, rotation.cos_sin, slots, *pages, **shape)
                out = _attend(q, pages, problem.head, step)
            outs.append(out)
        return torch.stack(outs)

    expected = walk(copies, is_fused=False)
    walk(tuple(p.clone() for p in problem.pages), is_fused=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = walk(problem.pages, is_fused=True)
    for _ in range(3):
        graph.replay()
        assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 1e-2


def _attend(q, pages, head, step):
    from headrace.kernels.attention.decodes import DecodeWorkspace, decode

    out = torch.empty_like(q)
    group = q.shape[1] // pages[0].shape[2]
    decode(q, pages, out, DecodeWorkspace.allocate(132, group, q.shape[2], q.device), head, step)
    return out


def test_takes_what_the_kernel_can():
    """Everything else is left to the kernels that it replaces, untouched."""
    problem = make_problem(CASES["one"], "cpu")

    def takes(**changes) -> bool:
        own = replace(problem, **changes)
        return module._takes(own.qkv, own.rotation, own.pages, own.head, own.step)

    assert takes()
    assert not takes(qkv=problem.qkv.half())
    codes = tuple(x.to(E4M3) for x in problem.pages)
    assert takes(pages=codes)
    assert not takes(pages=(codes[0], problem.pages[1])) and not takes(pages=(problem.pages[0], codes[1]))
    assert not takes(pages=tuple(x.to(torch.float8_e5m2) for x in problem.pages))
    for pages, is_aligned in ((problem.pages, True), (codes, False)):  # to 16 bytes, with 8 elements between pages
        apart = tuple(x.new_zeros(len(x), x[0].numel() + 8)[:, :-8].view_as(x) for x in pages)
        assert takes(pages=apart) == is_aligned
    assert not takes(pages=tuple(x[..., :64] for x in problem.pages))
    assert not takes(step=replace(problem.step, query_start=problem.step.kv_lens))
    assert not takes(rotation=replace(problem.rotation, positions=problem.rotation.positions.expand(3, -1)))
    whole = torch.ones(32 * 128, dtype=BF16), torch.ones(8 * 128, dtype=BF16)
    assert not takes(rotation=replace(problem.rotation, norms=whole))
    many = make_problem(Case((5,) * (module.MOST_ROWS + 1)), "cpu")
    assert not takes(qkv=many.qkv, rotation=many.rotation, step=many.step)


@pytest.mark.parametrize(("head_dim", "tiles", "most_keys", "cluster"), [
    (128, 8, 8192, 16), (128, 4, 131_072, None), (128, 4, 1, 16), (128, 2, 8192, 16), (128, 1, 8192, 16),
    (128, 1, 8193, None), (64, 1, 8192, 16),
    (128, 16, 4096, 8), (128, 16, 8192, None), (128, 32, 128, None),
    (64, 16, 4096, 16), (64, 32, 2048, 8), (64, 32, 4096, None), (64, 33, 1, None), (256, 8, 1, None),
])
def test_it_is_taken_where_it_is_faster(head_dim: int, tiles: int, most_keys: int, cluster: int | None):
    found = module.find_division(head_dim, tiles, most_keys)
    assert (found and found.cluster) == cluster


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_each_rank_takes_it(ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch):
    """With 32 heads, 4 kv heads and norms per head, as many keys as its steps are captured for."""
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(module, "_find_kernel", lambda shared_bytes, cluster, device, **macros: asked.append(macros))
    case = Case((700, 90)[:rows], num_heads=32 // ranks, num_kv_heads=4 // ranks, norm_offset=0.0)
    problem = make_problem(case, "cpu")
    problem.step = replace(problem.step, max_kv_len=module.SHORT_CONTEXTS[rows - 1])
    assert problem.run() is None
    assert [(each["CLUSTER"], each["G"], each["NORM"]) for each in asked] == [(16, 8, 1)]


def test_a_window_bounds_what_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Nothing is compiled for long contexts; with a window it is, whatever the context."""
    asked: list[int] = []
    monkeypatch.setattr(module, "_find_kernel", lambda shared_bytes, cluster, device, **macros: asked.append(cluster))
    for window, count in ((0, 0), (128, 1)):
        problem = make_problem(replace(CASES["dim-64-window"], window=window), "cpu")
        problem.step = replace(problem.step, max_kv_len=131_072)
        assert problem.run() is None
        assert len(asked) == count


@pytest.mark.parametrize(("dtype", "kv_dtype", "is_taken"), [
    ("bfloat16", "bfloat16", True), ("bfloat16", "float8_e4m3fn", True), ("float16", "float8_e4m3fn", False),
    ("float16", "float16", False),
])
def test_a_backend_hands_decodes_over(dtype: str, kv_dtype: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch):
    """With pages of both types, for as many keys."""
    problem, given = make_problem(CASES["norms"], "cpu", dtype=getattr(torch, kv_dtype)), []
    monkeypatch.setattr(triton, "few_decodes", lambda *call: given.append(call) or call[0])
    geometry = AttentionGeometry("cuda", dtype, kv_dtype, (9, 0), 32, 4, 128, 128, 64)
    backend, step = triton.DependentLaunchTritonAttention(geometry, torch.device("cpu")), problem.step
    assert backend.short_context(1) == (module.SHORT_CONTEXTS[0] if is_taken else 0)
    lens = step.kv_lens
    inputs = AttentionInputs(
        2, 2, [1, 1], lens.tolist(), 1, step.max_kv_len, torch.arange(3, dtype=torch.int32), lens, step.page_table,
        problem.rotation.slots,
    )
    out = backend.rotate_decodes(
        problem.qkv, problem.rotation, KvPages(*problem.pages), AttentionParams(problem.head.scale), inputs
    )
    assert (out is not None) == is_taken == (len(given) == 1)
    if is_taken:
        assert given[0][2] == problem.pages and given[0][4] == step


def test_short_contexts_are_those_where_it_is_taken():
    """A step that is captured by itself must find a division."""
    for rows, longest in enumerate(module.SHORT_CONTEXTS, 1):
        assert any(module.find_division(dim, rows * 8, longest) for dim in module.DIVISIONS)
        assert not any(module.find_division(dim, rows * 8, longest + 1) for dim in module.DIVISIONS)


@pytest.mark.parametrize(("head_dim", "division"), [
    (dim, each) for dim, divisions in module.DIVISIONS.items() for each in divisions
])
def test_blocks_fit_beside_a_product(head_dim: int, division: module.Division):
    """Whose blocks are kept apart, so that keys are on their way before it has ended."""
    most = module.count_shared_bytes(head_dim, module.MOST_GROUP, division.cluster)
    assert most < MOST_BYTES // 2
