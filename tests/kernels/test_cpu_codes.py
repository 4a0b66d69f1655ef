"""Keys and values in 8 bits on CPUs: what is written, what attention makes of it, in C++ and in plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from attention_cases import MIXED, SHAPES, Case, Problem, code_problem, empty_pages, make_problem
from cpu_isas import isa  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.kernels import native
from headrace.kernels.attention.reference import encode, read_codes, write_codes
from headrace.kernels.rowwise import cpu, reference
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import KvPages
from headrace.layers.attention.cpu import CpuAttention

CPU = torch.device("cpu")
CASES = {
    **SHAPES,
    "pages-of-eight": Case(MIXED, page_size=8),
    "pages-of-one": Case(MIXED, page_size=1, num_heads=7, num_kv_heads=1),
    "pages-of-two": Case(MIXED, page_size=2, window=9),
    "group-8": Case(MIXED, num_heads=16, num_kv_heads=2, head_dim=32),
    "dim-36": Case(MIXED, head_dim=36, num_heads=6),
    "shared-pages-prompts-all": Case(
        ((4, 200), (6, 140), (3, 131)), num_heads=8, num_kv_heads=2, head_dim=40, has_sinks=True, softcap=2.0,
        shared_pages=8
    ),
    "steep": Case(((1, 700), (300, 300), (130, 900)), num_heads=6, num_kv_heads=2, steepness=6.0),
}
TOLERANCE = 1.2e-2
"""Beside what rounding keys and values costs: queries, and weights for each 32 keys, are rounded to 8 bits, too."""


@cache
def make(name: str, dtype: torch.dtype) -> Problem:
    """Drawn once for all instruction sets; tests leave it as it is."""
    return code_problem(CASES[name], dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_what_codes_stand_for(name: str, dtype: torch.dtype):
    problem = make(name, dtype)
    assert ATTENTION_BACKENDS.choose(problem.geometry) is CpuAttention
    steep = CASES[name].steepness
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < TOLERANCE * steep


@pytest.mark.parametrize("name", ["mixed", "pages-of-two", "sinks", "shared-pages"])
def test_plain_torch_reads_codes(name: str, monkeypatch: pytest.MonkeyPatch):
    problem = code_problem(CASES[name], torch.float32)
    monkeypatch.setattr(native.NATIVE, "find", lambda: None)
    assert problem.error(problem.run(CpuAttention(problem.geometry, CPU))) < 1e-5


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 3])
def test_shares_of_work_give_the_same(threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    problem = code_problem(
        Case(((1, 1), (1, 2400), (1, 129), (1, 33), (1, 32), (30, 500)), num_heads=6, window=200), torch.bfloat16
    )
    backend = CpuAttention(problem.geometry, CPU)
    first, second = problem.run(backend), problem.run(backend)
    torch.set_num_threads(before)
    assert problem.error(first) < TOLERANCE
    assert torch.equal(first, second)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("page_size", "heads", "dim", "dtype"), [
    (16, (9, 3), 64, torch.bfloat16), (32, (4, 2), 80, torch.float32), (1, (2, 1), 8, torch.float16),
    (2, (4, 4), 36, torch.bfloat16), (8, (3, 1), 256, torch.float32),
])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_makes_the_codes_of_plain_torch(
    page_size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, normed: bool
):
    rng = torch.Generator().manual_seed(1)
    tokens, (num_heads, num_kv_heads) = 19, heads
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * dim, generator=rng).to(dtype)
    qkv[3] = 0.0
    positions, slots = torch.randint(0, 50, (tokens,), generator=rng), torch.randperm(64, generator=rng)[:tokens]
    cos_sin = torch.randn(50, dim, generator=rng)
    norms = (
        dict(q_norm=torch.rand(dim, generator=rng).to(dtype), k_norm=torch.rand(dim, generator=rng).to(dtype)) if normed
        else {}
    )
    shape = dict(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=dim, rotary_dim=dim, interleaved=False, norm_eps=1e-6,
        norm_offset=0.0
    )
    pages = [empty_pages(64 // page_size, page_size, num_kv_heads, dim) for _ in range(2)]
    pages[1] = KvPages(pages[0].k.clone(), pages[0].v.clone(), pages[0].scales.clone())
    queries = [
        solution.rope_write(qkv.clone(), positions, cos_sin, slots, own.k, own.v, scales=own.scales, **norms, **shape)
        for solution, own in zip((reference, cpu), pages, strict=True)
    ]
    assert torch.allclose(queries[0].float(), queries[1].float(), rtol=2e-2, atol=1e-5)
    for name in ("k", "v"):
        codes = [getattr(own, name).int() for own in pages]
        assert int((codes[0] - codes[1]).abs().max()) <= 1 + 2 * (name == "k" and dtype == torch.bfloat16)
    scales = [own.scales.nan_to_num(-1.0) for own in pages]
    assert torch.allclose(*scales, rtol=1e-2)
    assert not torch.equal(scales[0], torch.full_like(scales[0], -1.0))


@given(arrays("float32", (3, 2, 8), elements=st.floats(-1e6, 1e6, width=32)), st.sampled_from([1, 2, 4, 16, 64]))
@settings(max_examples=40, deadline=None)
def test_a_number_is_kept_to_half_of_its_scale(x, page_size: int):
    numbers = torch.from_numpy(x)
    pages = empty_pages(64 // page_size, page_size, 2, 8)
    slots = torch.tensor([0, 5, 63])
    write_codes((pages.k, pages.v), pages.scales, slots, numbers, -numbers)
    k, v = (t[slots] for t in read_codes((pages.k, pages.v), pages.scales, torch.arange(64 // page_size)))
    _, scale = encode(numbers)
    bound = 0.5001 * scale[..., None] + 1e-30
    assert bool(((k - numbers).abs() <= bound).all() and ((v + numbers).abs() <= bound).all())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [1, 2])
def test_what_is_no_number_is_not_hidden(broken: float, side: int):
    pages = empty_pages(1, 16, 1, 32)
    qkv = torch.randn(5, 3 * 32)
    qkv[2, side * 32 + 7] = broken
    shape = dict(
        num_heads=1, num_kv_heads=1, head_dim=32, rotary_dim=0, interleaved=False, norm_eps=1e-6, norm_offset=0.0
    )
    problem = make_problem(Case(((1, 5),), num_heads=1, num_kv_heads=1, head_dim=32), "cpu", torch.float32)
    problem.inputs.page_table.zero_()
    q = cpu.rope_write(qkv, torch.arange(5), None, torch.arange(5), pages.k, pages.v, scales=pages.scales, **shape)
    problem.pages, problem.q = pages, q[4:]
    assert not bool(problem.run(CpuAttention(replace(problem.geometry, kv_dtype="int8"), CPU)).isfinite().all())
