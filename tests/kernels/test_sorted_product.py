"""Plain experts of many tokens in own CUDA C++, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import relative_error

pytest.importorskip("triton")

from headrace.kernels.cuda_source import MOST_BYTES
from headrace.kernels.moe import MANY_EXPERTS, plain_many, reference
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate

SILU, GELU, CLAMPED = Gate("silu"), Gate("gelu_tanh"), Gate("clamped", 2.0, 1.702, 1.0)


def test_ring_and_rows_that_leave_fit_a_multiprocessor():
    stage = (plain_many.ROWS + plain_many.WIDE) * plain_many.DEPTH * 2
    assert 1024 + plain_many.STAGES * stage + 1024 + 2 * (16 << 10) <= MOST_BYTES


def test_chosen_for_bfloat16_on_hopper_alone():
    def reason(dtype: str = "bfloat16", capability: tuple[int, int] = (9, 0), **shape: int) -> str | None:
        return MANY_EXPERTS.reason_against("cuda", KernelQuery("cuda", dtype, capability, shape=shape))

    assert reason(width=2048, expert_width=768) is None
    assert "steps of 8" in str(reason(width=2048, expert_width=84))
    assert reason("float16") and reason(capability=(10, 0)) and reason(capability=(8, 9))


def make(
    num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, *, has_bias: bool = False
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(num_tokens + width)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices
    stacks = []
    for rows, columns in ((2 * inner, width), (width, inner)):
        bias = draw(num_experts, rows) if has_bias else None
        stacks.append((draw(num_experts, rows, columns) / columns**0.5, bias))
    return draw(num_tokens, width), ids, torch.rand(num_tokens, top_k, generator=generator), *stacks


def check(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Any, down: Any, gate: Gate) -> None:
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for expert in ids[ids >= 0].unique():
        rows, choice = torch.where(ids == expert)
        hidden = x[rows].double()
        for i, (weight, bias) in enumerate((gate_up, down)):
            hidden = hidden @ weight[expert].double().T + (0 if bias is None else bias[expert].double())
            hidden = hidden if i else reference.gate_halves(hidden, gate)
        expected.index_add_(0, rows, hidden * weights[rows, choice, None].double())
    there = [tuple(None if part is None else part.cuda() for part in stack) for stack in (gate_up, down)]
    torch.full((64 << 20,), float("nan"), device="cuda", dtype=torch.bfloat16)  # freed: what is not written stays NaN
    out = plain_many.run_experts(x.cuda(), ids.cuda(), weights.cuda(), *there, gate)
    assert out is not None and relative_error(out, expected) < 8e-3
    again = plain_many.run_experts(x.cuda(), ids.cuda(), weights.cuda(), *there, gate)
    assert again is not None and torch.equal(out, again)


@pytest.mark.cuda
@pytest.mark.parametrize("gate", [SILU, GELU, CLAMPED], ids=lambda gate: gate.kind)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "inner"),
    [(300, 5, 2, 264, 72), (1024, 8, 2, 512, 256), (2000, 3, 2, 136, 400), (64, 16, 4, 2048, 384), (1, 2, 1, 64, 64)],
)
def test_values(num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, gate: Gate):
    check(*make(num_tokens, num_experts, top_k, width, inner, has_bias=gate is CLAMPED), gate)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1, 8, 16, 17, 100, 128, 255, 256, 257, 400, 512, 513])
def test_any_number_of_rows_of_an_expert(count: int):
    """Beside another expert with few rows, and two with none."""
    x, ids, weights, *stacks = make(count + 3, 4, 1, 128, 96)
    ids[:count], ids[count:] = 2, 3
    check(x, ids, weights, *stacks, SILU)


@pytest.mark.cuda
def test_pairs_without_an_expert_add_nothing():
    x, ids, weights, *stacks = make(500, 6, 3, 256, 128)
    ids[100:200, 1], ids[300], ids[ids == 4] = -1, -1, -1
    check(x, ids, weights, *stacks, SILU)


@pytest.mark.cuda
def test_experts_of_a_real_shape():
    check(*make(700, 128, 8, 2048, 768), SILU)
