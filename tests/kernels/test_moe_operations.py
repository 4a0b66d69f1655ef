"""Routing against a dense oracle token by token, grouped products against one product per row, MXFP4 by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from devices import DEVICES, relative_error
from hypothesis import given, settings

from headrace.kernels.block_scaled import dequantise_mxfp4 as dequantise
from headrace.kernels.linear import Norm
from headrace.kernels.moe import GROUPED_LINEAR, HASH_ROUTE, NORM_ROUTE, OWN_EXPERTS, ROUTE
from headrace.kernels.moe.reference import make_scores
from headrace.kernels.native import build
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import CLAMPED_SWIGLU

SHAPE = dict(top_k=2, score="softmax", renormalise=False, scale=1.0, num_groups=1, top_groups=1, group_best=1)


def load_route(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if name == "native" and build().status != "ready":
        pytest.skip("no native kernels")
    return ROUTE.load(name)


def score_densely(logits: list[float], kind: str) -> list[float]:
    if kind == "softmax":
        total = sum(math.exp(x - max(logits)) for x in logits)
        return [math.exp(x - max(logits)) / total for x in logits]
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    return [math.sqrt(math.log1p(math.exp(x))) for x in logits]


def route_densely(logits: list[float], bias: list[float] | None, shape: dict[str, Any]) -> dict[int, float]:
    """Expert: weight, of one token, in plain Python."""
    scores = score_densely(logits, shape["score"])
    choice = {x: s + (bias[x] if bias else 0.0) for x, s in enumerate(scores)}
    if shape["num_groups"] > 1:
        size = len(scores) // shape["num_groups"]
        worth = {
            g: sum(sorted((choice[x] for x in range(g * size, g * size + size)), reverse=True)[: shape["group_best"]])
            for g in range(shape["num_groups"])
        }
        best = sorted(worth, key=worth.__getitem__, reverse=True)[: shape["top_groups"]]
        choice = {x: c for x, c in choice.items() if x // size in best}
    chosen = sorted(choice, key=choice.__getitem__, reverse=True)[: shape["top_k"]]
    total = sum(scores[x] for x in chosen) if shape["renormalise"] else 1.0
    return {x: scores[x] / total * shape["scale"] for x in chosen}


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    num_groups, size = draw(st.sampled_from([(1, 5), (1, 16), (2, 4), (4, 2), (3, 5)]))
    top_groups = draw(st.integers(1, num_groups))
    shape = dict(
        top_k=draw(st.integers(1, top_groups * size)),
        score=draw(st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"])), renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])), num_groups=num_groups, top_groups=top_groups,
        group_best=draw(st.integers(1, min(2, size))),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(draw(st.integers(1, 4)), num_groups * size, generator=generator) * 2
    bias = torch.randn(num_groups * size, generator=generator) if draw(st.booleans()) else None
    return logits, bias, shape


@pytest.mark.parametrize("name", ["reference", "native"])
@settings(max_examples=120, deadline=None)
@given(routings())
def test_routing_is_what_the_words_say(name: str, case: tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]):
    logits, bias, shape = case
    ids, weights = load_route(name)(logits, bias, **shape)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    for row, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        expected = route_densely(logits[row].tolist(), None if bias is None else bias.tolist(), shape)
        assert dict(zip(row_ids, row_weights, strict=True)) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["reference", "native"])
def test_weights_sum_to_the_scale_even_where_scores_vanish(name: str):
    logits = torch.tensor([[-300.0, -310.0, 300.0, 0.0], [5e4, 0.0, 0.0, -5e4]]).bfloat16()
    for score in ("softmax", "sigmoid"):
        _, weights = load_route(name)(logits, None, **{**SHAPE, "score": score, "renormalise": True, "scale": 2.0})
        torch.testing.assert_close(weights.sum(-1), torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize(
    "shape",
    [SHAPE, {**SHAPE, "score": "sigmoid"}, {**SHAPE, "renormalise": True}, {**SHAPE, "num_groups": 2, "group_best": 2}]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_whatever_the_logits_two_experts_that_there_are_are_chosen(shape: dict[str, Any], value: float):
    """Of a broken model: nothing else is read or written than there is."""
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    logits[::2, 1::2], logits[3], logits[5, 0] = value, value, -value
    ids, _ = load_route("native")(logits, None, **shape)
    assert all(len(set(row)) == 2 and min(row) >= 0 and max(row) < 6 for row in ids.tolist())


def test_routes_that_cannot_be_are_refused():
    for wrong in (
        {"top_k": 7}, {"num_groups": 4}, {"num_groups": 3, "top_k": 3}, {"num_groups": 2, "top_groups": 3},
        {"num_groups": 2, "group_best": 4}
    ):
        with pytest.raises(RuntimeError, match="does not fit the experts"):
            load_route("native")(torch.zeros(2, 6), None, **{**SHAPE, **wrong})


@settings(max_examples=60, deadline=None)
@given(routings(), st.integers(0, 2**16))
def test_routing_by_token_id(case: tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]], seed: int):
    """The table alone chooses; weights are the chosen scores, however small."""
    logits, _, shape = case
    top_k, num_experts = min(shape["top_k"], logits.shape[1]), logits.shape[1]
    generator = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(11)])
    token_ids = torch.randint(0, 11, (len(logits),), generator=generator)
    options = {name: shape[name] for name in ("score", "renormalise", "scale")}
    ids, weights = HASH_ROUTE.load("reference")(logits, table, token_ids, **options)
    if find_spec("triton") is not None:
        fused = HASH_ROUTE.load("triton")(logits, table, token_ids, **options)
        assert torch.equal(fused[0], ids) and torch.allclose(fused[1], weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(ids, table[token_ids])
    for row, (chosen, given_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        scores = score_densely(logits[row].tolist(), shape["score"])
        total = sum(scores[x] for x in chosen) if shape["renormalise"] else 1.0
        assert given_weights == pytest.approx([scores[x] / total * shape["scale"] for x in chosen], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("name", "device"), [
    ("reference", "cpu"), pytest.param("triton", "cpu", marks=pytest.mark.interpreted),
    pytest.param("triton_pdl", "cuda", marks=pytest.mark.cuda),
])
@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (3, 2), (103, 10)])
def test_experts_of_a_rank_are_numbered_from_its_first(name: str, device: str, shape: tuple[int, int]):
    ids = torch.randint(-1, 12, shape, generator=torch.Generator().manual_seed(shape[0])).to(device)
    whole = ids.tolist()
    for first, count in ((0, 12), (0, 6), (6, 6), (4, 3), (11, 1)):
        own = OWN_EXPERTS.load(name)(ids, first, count)
        numbers = {first + i: i for i in range(count)}
        assert own.dtype == torch.int64
        assert own.tolist() == [[numbers.get(expert, -1) for expert in row] for row in whole]
        strided = OWN_EXPERTS.load(name)(ids.t(), first, count)
        assert torch.equal(strided.t(), own)


def grouped_case(
    counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(counts) + inputs)
    x, weight, bias = (
        torch.randn(*s, generator=generator).to(device, dtype)
        for s in ((sum(counts), inputs), (len(counts), outputs, inputs), (len(counts), outputs))
    )
    counts = torch.tensor(counts, device=device)
    return (
        x, weight, bias, counts.cumsum(0).int(),
        torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    )


def multiply_row_by_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor
) -> torch.Tensor:
    out = torch.einsum("ni,noi->no", x.double(), weight.double()[experts])
    return out if bias is None else out + bias.double()[experts]


COUNTS = [[1, 0, 3], [0, 0, 0, 5], [40, 1, 0, 0, 17], [0, 1]]


@pytest.mark.parametrize("counts", [*COUNTS, [0, 0]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_reference_grouped_linear(counts: list[int], has_bias: bool):
    x, weight, bias, ends, experts = grouped_case(counts, 12, 10, torch.float32, "cpu")
    out = GROUPED_LINEAR.load("reference")(x, weight, bias if has_bias else None, ends, experts)
    torch.testing.assert_close(
        out.double(), multiply_row_by_row(x, weight, bias if has_bias else None, experts), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize(
    "counts,inputs,outputs", [(COUNTS[0], 24, 40), (COUNTS[1], 100, 136), (COUNTS[2], 72, 24), (COUNTS[3], 8, 8)]
)
def test_triton_grouped_linear(
    counts: list[int], inputs: int, outputs: int, device: str, dtype: torch.dtype, tolerance: float
):
    pytest.importorskip("triton")
    from headrace.kernels.moe.triton import grouped_linear

    x, weight, bias, ends, experts = grouped_case(counts, inputs, outputs, dtype, device)
    for b in (None, bias):
        assert relative_error(
            grouped_linear(x, weight, b, ends, experts), multiply_row_by_row(x, weight, b, experts)
        ) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize(
    "solution,dtype", [("cutlass", torch.bfloat16), ("triton", torch.bfloat16), ("triton", torch.float32)]
)
@pytest.mark.parametrize("num_rows", [1, 8, 200, 4096])
def test_grouped_linear_at_size(solution: str, dtype: torch.dtype, num_rows: int):
    counts = torch.bincount(
        torch.randint(0, 64, (num_rows,), generator=torch.Generator().manual_seed(1)), minlength=64
    ).tolist()
    query = KernelQuery(
        "cuda", str(dtype).removeprefix("torch."), torch.cuda.get_device_capability(),
        {"in_features": 512, "out_features": 384}
    )
    if GROUPED_LINEAR.reason_against(solution, query):
        pytest.skip("not on this GPU")
    x, weight, bias, ends, experts = grouped_case(counts, 512, 384, dtype, "cuda")
    expected = torch.cat(
        [
            x[a:b].double() @ weight[e].double().T + bias[e].double() for e,
            (a, b) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False))
        ]
    )
    assert relative_error(
        GROUPED_LINEAR.load(solution)(x, weight, bias, ends, experts), expected
    ) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_triton_clamped_swiglu(device: str, dtype: torch.dtype, tolerance: float):
    pytest.importorskip("triton")
    from headrace.kernels.rowwise.triton import clamped_swiglu

    x = (3 * torch.randn(3, 2 * 1100, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    expected = CLAMPED_SWIGLU.load("reference")(x.double().float(), limit=2.0, alpha=1.702, up_offset=1.0)
    assert relative_error(clamped_swiglu(x, limit=2.0, alpha=1.702, up_offset=1.0), expected) < tolerance


def test_clamped_swiglu_bounds():
    """Far outside the limits only the bounds are left; far below them the gate is shut."""
    x = torch.tensor([[100.0, 100.0, -100.0, 100.0, -100.0, 3.0]])
    out = CLAMPED_SWIGLU.load("reference")(x, limit=7.0, alpha=1.702, up_offset=1.0)
    torch.testing.assert_close(out, torch.tensor([[7.0 * 8.0, -7.0 * 6.0, 0.0]]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mxfp4_code_under_every_scale(dtype: torch.dtype):
    """By the format's arithmetic: sign, two exponent bits of bias 1, one mantissa bit; subnormal where the exponent is
    0."""
    scales = torch.arange(1, 252, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | codes[1::2] << 4).expand(len(scales), 16)
    out = dequantise(packed, scales[:, None], dtype).tolist()
    for scale, row in zip(scales.tolist(), out, strict=True):
        for code, value in zip(codes.tolist(), row, strict=True):
            exponent, mantissa = (code >> 1) & 3, code & 1
            magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            assert value == (-1 if code & 8 else 1) * magnitude * 2.0 ** (scale - 127)


def test_mxfp4_as_transformers_has_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 6, 2), dtype=torch.uint8, generator=generator)
    assert torch.equal(
        dequantise(blocks.flatten(-2), scales, torch.bfloat16).transpose(1, 2),
        convert_moe_packed_tensors(blocks, scales)
    )


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize(("num_experts", "width", "top_k", "score", "renormalise", "has_bias"), [
    (32, 2880, 4, "softmax", True, True), (128, 2048, 8, "softmax", True, False),
    (60, 1536, 6, "sqrt_softplus", False, True), (256, 2048, 8, "sigmoid", True, False),
])
def test_norm_router_and_choice_in_one_kernel(
    num_tokens: int, splits: int, num_experts: int, width: int, top_k: int, score: str, renormalise: bool,
    has_bias: bool
):
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    pending = draw(splits, num_tokens, width) if splits else draw(num_tokens, width).bfloat16()
    residual, norm = draw(num_tokens, width).bfloat16(), Norm(draw(width).bfloat16(), 1e-5, 1.0)
    router = (draw(num_experts, width) * 4 * width**-0.5).bfloat16()
    bias = draw(num_experts).bfloat16() if has_bias else None
    choice_bias = draw(num_experts) if has_bias and score != "softmax" else None
    shape = {**SHAPE, "top_k": top_k, "score": score, "renormalise": renormalise, "scale": 1.5}
    found, expected = (
        NORM_ROUTE.load(name)(pending, residual.clone(), norm, router, bias, choice_bias, **shape)
        for name in ("cuda", "reference")
    )
    assert torch.equal(found[1], expected[1])
    assert relative_error(found[0], expected[0]) < 2e-3  # of a rounding, where sums are in another order
    x, _, ids, weights = found
    logits = x.float() @ router.float().T + (0 if bias is None else bias.float())
    scores = make_scores(logits, score)
    choice = logits if score == "softmax" else scores if choice_bias is None else scores + choice_bias
    assert all(len(set(row)) == top_k for row in ids.tolist())
    # logits are rounded before the choice, which may swap experts that are nearly as good
    assert (choice.gather(1, ids) >= choice.topk(top_k).values[:, -1:] - 0.06).all()
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(
        weights, chosen / (chosen.sum(1, keepdim=True) if renormalise else 1.0) * 1.5, rtol=0.15, atol=1e-5
    )
