"""Own kernels of mixtures against plain torch: routing, grouping, and experts from choices to sums."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from devices import DEVICES, relative_error
from hypothesis import given, settings

from headrace.kernels.moe import ROUTE, RUN_EXPERTS, reference
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate

pytest.importorskip("triton")
PLACES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
SILU, CLAMPED = Gate("silu"), Gate("clamped", 2.0, 1.702, 1.0)


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    num_experts = draw(st.sampled_from([1, 5, 32, 130]))
    shape = dict(
        top_k=draw(st.integers(1, min(8, num_experts))),
        score=draw(st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"])), renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])), num_groups=1, top_groups=1, group_best=1,
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(draw(st.integers(1, 4)), num_experts, generator=generator) * draw(st.sampled_from([0.5, 2.0]))
    bias = torch.randn(num_experts, generator=generator) if draw(st.booleans()) else None
    return logits, bias, shape


@pytest.mark.parametrize("device", PLACES)
def test_routing(device: str):
    from headrace.kernels.moe.triton import route

    @settings(max_examples=15, deadline=None)
    @given(routings())
    def check(case: tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]) -> None:
        logits, bias, shape = case
        ids, weights = route(logits.to(device), None if bias is None else bias.to(device), **shape)
        expected_ids, expected = reference.route(logits.double().float(), bias, **shape)
        assert ids.dtype == torch.int64 and weights.dtype == torch.float32
        dense, expected_dense = (
            torch.zeros(logits.shape).scatter_(1, i.cpu(), w.cpu()) for i,
            w in ((ids, weights), (expected_ids, expected))
        )
        torch.testing.assert_close(dense, expected_dense, rtol=2e-4, atol=1e-6)
        assert all(len(set(row)) == shape["top_k"] for row in ids.tolist())

    check()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("device", PLACES)
def test_what_is_no_number_chooses_no_expert_twice(device: str):
    from headrace.kernels.moe.triton import route

    logits = torch.tensor(
        [[float("nan")] * 6, [float("-inf")] * 6, [1.0, float("nan"), 2.0, float("-inf"), 3.0, float("inf")]],
        device=device
    )
    for score in ("softmax", "sigmoid"):
        ids, _ = route(
            logits, None, top_k=4, score=score, renormalise=True, scale=1.0, num_groups=1, top_groups=1, group_best=1
        )
        assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "at_once"),
    [(1, 3, (1024, 4096)), (40, 7, (64, 128)), (65, 4, (64, 128)), (300, 5, (256, 512))]
)
def test_grouping(
    num_tokens: int, num_experts: int, at_once: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
):
    from headrace.kernels.moe import triton as grouping

    monkeypatch.setattr(grouping, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, num_experts, (num_tokens, 3), generator=generator)
    expected = reference.group_pairs(ids, num_experts)
    assert [t.tolist() for t in grouping.group_pairs(ids.to(device), num_experts)] == [t.tolist() for t in expected]
    flat, (order, place, ends) = ids.flatten(), expected
    assert order[place].tolist() == list(range(ids.numel()))
    assert [-1 if i >= ends[-1] else int((i >= ends).sum()) for i in place.tolist()] == flat.tolist()


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_sums_of_pairs(device: str, dtype: torch.dtype, tolerance: float):
    from headrace.kernels.moe.triton import sum_pairs

    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(21, 2100, generator=generator).to(dtype), torch.rand(7, 3, generator=generator)
    place = torch.randperm(21, generator=generator).int()
    ids = torch.randint(5, (7, 3), generator=generator)
    ids[2], ids[3, 1] = -1, -1
    bias = torch.randn(5, 2100, generator=generator).to(dtype)
    rows[place[6:9].long()] = float("nan")  # nothing computed them
    for own in (None, bias):
        by_choice = rows.double()[place.long()].view(7, 3, -1) + (0 if own is None else own.double()[ids])
        expected = (by_choice * weights.double()[..., None]).masked_fill((ids < 0)[..., None], 0).sum(1)
        there = [None if tensor is None else tensor.to(device) for tensor in (rows, place, weights, ids, own)]
        assert relative_error(sum_pairs(*there), expected) < tolerance
        assert relative_error(reference.sum_pairs(rows, place, weights, ids, own), expected) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("gate", [SILU, CLAMPED])
def test_activations_of_pairs(gate: Gate, device: str, dtype: torch.dtype, tolerance: float):
    from headrace.kernels.moe.triton import gate_pairs

    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(rows, 2 * 1100, generator=generator).to(dtype) for rows in (9, 4))
    experts = torch.randint(4, (9,), generator=generator)
    for own in (None, bias):
        expected = reference.gate_halves(x.double() + (0 if own is None else own.double()[experts]), gate)
        there = [None if tensor is None else tensor.to(device) for tensor in (x, own, experts)]
        assert relative_error(gate_pairs(*there, gate), expected) < tolerance
        assert relative_error(reference.gate_pairs(x, own, experts, gate), expected) < tolerance


def experts_case(
    num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, seed: int = 3
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    shapes = (
        (num_tokens, width), (num_experts, 2 * inner, width), (num_experts, 2 * inner), (num_experts, width, inner),
        (num_experts, width)
    )
    x, gate_up, gate_up_bias, down, down_bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return (
        x, ids, torch.rand(ids.shape, generator=generator), gate_up * width**-0.5, gate_up_bias, down * inner**-0.5,
        down_bias
    )


def compare(case: tuple[torch.Tensor, ...], gate: Gate, device: str, dtype: torch.dtype, *, has_bias: bool) -> float:
    """The error against float64, of what inputs are in ``dtype``."""
    from headrace.kernels.moe.experts import run_experts

    x, ids, weights, gate_up, gate_up_bias, down, down_bias = case
    x, gate_up, gate_up_bias, down, down_bias = (t.to(dtype) for t in (x, gate_up, gate_up_bias, down, down_bias))
    matrices = ((gate_up, gate_up_bias if has_bias else None), (down, down_bias if has_bias else None))
    double = [tuple(None if t is None else t.double() for t in pair) for pair in matrices]
    expected = reference.run_experts(x.double(), ids, weights, *double, gate)
    there = [tuple(None if t is None else t.to(device) for t in pair) for pair in matrices]
    return relative_error(run_experts(x.to(device), ids.to(device), weights.to(device), *there, gate), expected)


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "gate", "has_bias"),
    [
        (1, 8, 2, SILU, False), (5, 4, 3, CLAMPED, True), (16, 3, 1, Gate("gelu_tanh"), False), (17, 6, 2, SILU, True),
        (70, 3, 1, CLAMPED, False)
    ],
)
def test_experts(
    num_tokens: int, num_experts: int, top_k: int, gate: Gate, has_bias: bool, device: str, dtype: torch.dtype,
    tolerance: float
):
    """Without sorting and with it; more pairs than a tile has rows; widths that are no multiples of the blocks."""
    case = experts_case(num_tokens, num_experts, top_k, 40, 36)
    assert compare(case, gate, device, dtype, has_bias=has_bias) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("num_tokens", [6, 20])
def test_nobody_adds_nothing(num_tokens: int, device: str, dtype: torch.dtype, tolerance: float):
    """A whole token's choices or one of them; memory that nobody fills is as it was, which may be NaN."""
    case = list(experts_case(num_tokens, 5, 3, 40, 24))
    case[1][2], case[1][4, 1] = -1, -1
    assert compare(tuple(case), SILU, device, dtype, has_bias=False) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 64, 300, 1024])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "inner"),
    [(128, 8, 2048, 768), (128, 8, 2048, 384), (32, 4, 2880, 2880), (8, 2, 1024, 3584)]
)
def test_experts_of_real_shapes(num_tokens: int, num_experts: int, top_k: int, width: int, inner: int):
    """As `auto` has it, with dependent launch; twice the same."""
    run = RUN_EXPERTS.choose(KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability()))
    x, ids, weights, gate_up, gate_up_bias, down, down_bias = (
        t.to("cuda", torch.bfloat16) if t.is_floating_point() and i != 2 else t.cuda()
        for i, t in enumerate(experts_case(num_tokens, num_experts, top_k, width, inner))
    )
    expected = reference.run_experts(
        x.float(), ids, weights, (gate_up.float(), gate_up_bias.float()), (down.float(), down_bias.float()), SILU
    )
    out = run(x, ids, weights, (gate_up, gate_up_bias), (down, down_bias), SILU)
    assert relative_error(out, expected) < 1e-2
    assert torch.equal(out, run(x, ids, weights, (gate_up, gate_up_bias), (down, down_bias), SILU))


def test_short_products_of_down_have_three_programs_on_a_multiprocessor():
    """As of ranks; other tiles are as they were."""
    from headrace.kernels.moe.experts import SHORT_INNER, choose_down_tile, choose_tile

    many = choose_tile(250, 8, 128, is_half=True)
    down = choose_down_tile(many, 384)
    assert (down.rows, down.outputs, down.inputs) == (many.rows, many.outputs, many.inputs), "the same tiles of pairs"
    assert (down.num_warps, down.num_stages) == (4, 3)
    assert choose_down_tile(many, SHORT_INNER) == down and choose_down_tile(many, 768) == many
    for other in (choose_tile(1, 8, 128, is_half=True), choose_tile(250, 8, 128, is_half=False)):
        assert choose_down_tile(other, 384) == other


@pytest.mark.cuda
def test_the_best_are_chosen():
    query = KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability(), {"num_experts": 8, "top_k": 2})
    assert (
        ROUTE.choose(query) is not ROUTE.load("reference")
        and RUN_EXPERTS.choose(query) is not RUN_EXPERTS.load("reference")
    )
