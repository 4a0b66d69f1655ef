"""Experts in bfloat16 of a few tokens in own CUDA C++, against float64; how they are divided, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import relative_error
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from headrace.kernels.cuda_source import (
    LONE_BYTES,
    MOST_BYTES,
    RESERVED_BYTES,
    SM_BYTES,
    CudaSourceError,
    cache_compiled,
)
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.moe import NORM_ROUTE, RUN_EXPERTS, Stacked, plain_few, reference
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate

SILU, GELU, CLAMPED = Gate("silu"), Gate("gelu_tanh"), Gate("clamped", 2.0, 1.702, 1.0)
MODELS = [
    (128, 8, 2048, 768), (128, 8, 2048, 384), (128, 8, 2048, 192), (8, 2, 4096, 7168), (32, 4, 2880, 2880),
    (32, 4, 2880, 1440), (64, 6, 2048, 1408), (64, 6, 2048, 352), (64, 8, 2048, 1024), (60, 4, 2048, 1408),
]
"""X, k, D, F: Qwen3-30B-A3B, halves and quarters of it, half of Mixtral, gpt-oss-20b, DeepSeek-V2-Lite, OLMoE,
Qwen1.5-MoE."""


@given(
    num_tokens=st.integers(1, 4), top_k=st.integers(1, 8), num_experts=st.integers(8, 128),
    width=st.integers(4, 1024).map(lambda n: 8 * n), inner=st.integers(4, 2048).map(lambda n: 8 * n),
    sms=st.sampled_from([78, 114, 132]),
)
def test_plans_fit_a_multiprocessor(
    num_tokens: int, top_k: int, num_experts: int, width: int, inner: int, sms: int
):
    plans = plain_few.make_plans(num_tokens, top_k, num_experts, width, inner, sms)
    if plans is None:
        return
    first, second = plans
    pairs = num_tokens * top_k
    for plan, rows, kinds, inputs in ((first, num_tokens, 2, width), (second, pairs, 1, inner)):
        assert 1 <= plan.warps <= plain_few.MOST_WARPS and plan.stages >= 1
        unit = ceil_div(2 * kinds * plan.each * inputs, 128) * 128
        barriers = ceil_div(8 * plan.warps * plan.stages, 16) * 16
        sums = 4 * pairs * ceil_div(width, sms) if plan.is_down else 0
        needed = plan.warps * plan.stages * unit + 2 * rows * inputs + barriers + plain_few.FIXED_BYTES + sums
        assert needed <= plan.shared_bytes <= MOST_BYTES
    assert first.each == 1 and first.shared_bytes >= LONE_BYTES, "two blocks of a kernel never share a multiprocessor"
    both = first.shared_bytes + second.shared_bytes + 2 * RESERVED_BYTES
    assert (both <= SM_BYTES < both + second.shared_bytes) or second.shared_bytes >= LONE_BYTES


@pytest.mark.parametrize("model", MODELS)
def test_down_of_one_token_begins_beside_gate_and_up(model: tuple[int, int, int, int]):
    num_experts, top_k, width, inner = model
    assert all(plain_few.make_plans(t, top_k, num_experts, width, inner, 132) for t in range(2, 5))
    plans = plain_few.make_plans(1, top_k, num_experts, width, inner, 132)
    assert plans is not None
    assert sum(plan.shared_bytes + RESERVED_BYTES for plan in plans) <= SM_BYTES


def test_what_is_taken():
    shape = {"width": 2048, "expert_width": 768, "num_experts": 128}

    def is_taken(capability: tuple[int, int] = (9, 0), dtype: str = "bfloat16", **own: int) -> bool:
        return RUN_EXPERTS.reason_against("cuda", KernelQuery("cuda", dtype, capability, {**shape, **own})) is None

    assert is_taken() and is_taken(expert_width=352)
    assert not (is_taken((8, 0)) or is_taken((10, 0)) or is_taken(dtype="float16") or is_taken(width=2044))
    assert not is_taken(expert_width=700)
    assert plain_few.make_plans(4, 8, 128, 2048, 768, 132) is not None
    for num_tokens, top_k in ((0, 8), (5, 8), (2, 17)):
        assert plain_few.make_plans(num_tokens, top_k, 128, 2048, 768, 132) is None
    assert plain_few.make_plans(4, 2, 8, 4096, 14336, 132) is None, "inputs of eight pairs leave no room for a ring"


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What Triton's kernels are given."""
    found: list[torch.Tensor] = []
    monkeypatch.setitem(RUN_EXPERTS._loaded, "triton_pdl", lambda x, *_: found.append(x) or x)
    return found


def draw_on_cpu(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    gate_up, down = torch.zeros(2, 512, 256, dtype=dtype), torch.zeros(2, 256, 256, dtype=dtype)
    x, ids = torch.zeros(1, 256, dtype=dtype), torch.zeros(1, 1, dtype=torch.int64)
    return x, ids, torch.ones(1, 1), (gate_up, None), (down, None), SILU


def test_what_the_kernels_cannot_read_is_passed_on(passed_on: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_few, "count_sms", lambda _: 132)
    monkeypatch.setattr(plain_few, "_can_compile", lambda *_: pytest.fail("should not come so far"))
    x, ids, weights, gate_up, down, gate = draw_on_cpu()
    transposed = (gate_up[0].transpose(1, 2).contiguous().transpose(1, 2), None)
    bias = (down[0], torch.zeros(2, 256))
    for own in (
        draw_on_cpu(torch.float16), (x, ids, weights, transposed, down, gate), (x, ids, weights, gate_up, bias, gate),
        (torch.zeros(1, 257).bfloat16()[:, 1:], ids, weights, gate_up, down, gate),
        (x.expand(2, -1), ids.expand(2, -1), weights.expand(2, -1), gate_up, down, gate),
    ):
        assert plain_few.run_experts(*own) is own[0]
    monkeypatch.setattr(plain_few, "MOST_READ", 6 * 256 * 256 - 1)
    assert plain_few.run_experts(x, ids, weights, gate_up, down, gate) is x, "experts that are too large"
    assert len(passed_on) == 6


@pytest.mark.usefixtures("breaks_kernels")
def test_triton_runs_where_own_cuda_does_not_compile(
    passed_on: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise CudaSourceError("cuFuncSetAttribute: invalid argument")

    monkeypatch.setattr(plain_few, "count_sms", lambda _: 132)
    monkeypatch.setattr(plain_few, "find_kernel", fail)
    uncached = plain_few._can_compile.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(plain_few, "_can_compile", cache_compiled(uncached))
    step = draw_on_cpu()
    for _ in range(2):
        assert plain_few.run_experts(*step) is step[0]
    assert len(passed_on) == 2 and caplog.text.count("invalid argument") == 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """The kernels, for all that they take, with nothing to pass on to."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(plain_few, "MOST_TOKENS", 4)
    monkeypatch.setattr(plain_few, "MOST_READ", 1 << 40)
    monkeypatch.setitem(RUN_EXPERTS._loaded, "triton_pdl", lambda *_: pytest.fail("passed on"))
    return plain_few.run_experts


def draw_stacks(num_experts: int, width: int, inner: int, *, has_bias: bool) -> tuple[Stacked, Stacked]:
    generator = torch.Generator("cuda").manual_seed(width + inner)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    gate_up, down = draw(num_experts, 2 * inner, width) * width**-0.5, draw(num_experts, width, inner) * inner**-0.5
    biases = (draw(num_experts, 2 * inner), draw(num_experts, width)) if has_bias else (None, None)
    return (gate_up, biases[0]), (down, biases[1])


def draw_choices(num_tokens: int, num_experts: int, top_k: int, width: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x, which is strided, ids and weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_tokens, width + 8, generator=generator, device="cuda").bfloat16()[:, :width]
    scores, weights = torch.rand(2, num_tokens, num_experts, generator=generator, device="cuda")
    return x, scores.topk(top_k).indices, weights[:, :top_k].contiguous()


def add_up(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stacked, down: Stacked, gate: Gate
) -> torch.Tensor:
    """In float64, each pair by itself: the reference takes no expert twice."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(ids.tolist()):
        for choice, expert in enumerate(row):
            if expert >= 0:
                own = [
                    (matrix[expert][None].double(), None if bias is None else bias[expert][None].double())
                    for matrix, bias in (gate_up, down)
                ]
                first = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
                one = reference.run_experts(x[token, None].double(), first, weights.new_ones(1, 1), *own, gate)
                out[token] += weights[token, choice].double() * one[0]
    return out


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_experts_of_real_shapes(num_tokens: int, model: tuple[int, int, int, int], run: Callable[..., torch.Tensor]):
    num_experts, top_k, width, inner = model
    stacks = draw_stacks(min(num_experts, 16), width, inner, has_bias=width == 2880)
    gate = CLAMPED if width == 2880 else SILU
    step = draw_choices(num_tokens, min(num_experts, 16), top_k, width)
    out = run(*step, *stacks, gate)
    assert relative_error(out, add_up(*step, *stacks, gate)) < 6e-3
    assert torch.equal(out, run(*step, *stacks, gate)), "sums are in a fixed order"


@pytest.mark.cuda
@pytest.mark.parametrize("gate", [SILU, GELU, CLAMPED])
@pytest.mark.parametrize(("width", "inner"), [(64, 1032), (264, 136), (1032, 72), (2048, 520)])
def test_small_shapes_without_some_experts(width: int, inner: int, gate: Gate, run: Callable[..., torch.Tensor]):
    """Fewer outputs than multiprocessors, parts of units and of a warp's turn; all or some of a token's choices
    missing, an expert twice, by all tokens."""
    stacks = draw_stacks(5, width, inner, has_bias=True)
    for num_tokens in (1, 2, 4):
        x, ids, weights = draw_choices(num_tokens, 5, 3, width)
        for change in ("", "one", "token", "twice", "same", "all"):
            own = ids.clone()
            if change in ("one", "all"):
                own[0, 1] = -1
            if change in ("token", "all"):
                own[-1] = -1
            if change == "twice":
                own[0, 2] = own[0, 0]
            if change == "same":
                own[:] = own[0].clone()
            out = run(x, own, weights, *stacks, gate)
            expected = add_up(x, own, weights, *stacks, gate)
            assert torch.equal(out[(own < 0).all(1)], torch.zeros_like(out[(own < 0).all(1)]))
            assert float((out.double() - expected).norm()) <= 6e-3 * float(expected.norm())


@pytest.mark.cuda
def test_a_token_does_not_depend_on_those_beside_it(run: Callable[..., torch.Tensor]):
    stacks = draw_stacks(8, 2048, 768, has_bias=False)
    x, ids, weights = draw_choices(4, 8, 6, 2048)
    whole = run(x, ids, weights, *stacks, SILU)
    for t in range(4):
        assert torch.equal(run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], *stacks, SILU)[0], whole[t])


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_captured_chains_of_routers_and_experts(num_tokens: int, run: Callable[..., torch.Tensor]):
    """Down reads choices while gate and up runs, and memory of earlier steps is used again: what is replayed is what
    one kernel at a time gives, for whatever is chosen."""
    stacks = [draw_stacks(16, 1024, 512 + 8 * i, has_bias=False) for i in range(3)]
    routers = [draw_choices(16, 16, 1, 1024, seed)[0].contiguous() for seed in range(3)]
    norm, shape = Norm(torch.ones(1024, device="cuda").bfloat16(), 1e-6), dict(
        top_k=6, score="softmax", renormalise=True, scale=1.0, num_groups=1, top_groups=1, group_best=1
    )
    route = NORM_ROUTE.choose(KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability()))
    start = torch.zeros(num_tokens, 1024, device="cuda").bfloat16()

    def go(*, waits: bool) -> tuple[torch.Tensor, ...]:
        pending, residual, chosen = start.clone(), start.clone(), []
        for i in range(9):
            x, residual, ids, weights = route(pending, residual, norm, routers[i % 3], None, None, **shape)
            if waits:
                torch.cuda.synchronize()
            pending = run(x, ids, weights, *stacks[i % 3], SILU)
            if waits:
                torch.cuda.synchronize()
            chosen.append(ids)
        return pending, residual, torch.stack(chosen)

    start.normal_()
    go(waits=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = go(waits=False)
    before = None
    for seed in range(4):
        start.copy_(draw_choices(num_tokens, 16, 1, 1024, seed)[0])
        expected = go(waits=True)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        assert before is None or not torch.equal(before, expected[2]), "others are chosen"
        before = expected[2]
