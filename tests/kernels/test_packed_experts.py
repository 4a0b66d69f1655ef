"""Mixtures of experts in packed layout against one product after another in float64, on each instruction set."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from cpu_isas import isa  # noqa: F401
from devices import relative_error
from hypothesis import HealthCheck, given, settings

from headrace.kernels.moe import PACKED_EXPERTS
from headrace.kernels.moe.reference import gate_halves
from headrace.kernels.native import build
from headrace.kernels.packed_linear.layout import PackedMatrix, pack_floats, unpack
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups
from headrace.kernels.rowwise import Gate

native = PACKED_EXPERTS.load("native")
FORMS: dict[str, Callable[[torch.Tensor], PackedMatrix]] = {
    "float32": pack_floats, "bfloat16": lambda weight: pack_floats(weight.bfloat16()),
    "int8": quantise_int8, "int8_group": quantise_int8_groups, "int4_group": quantise_int4,
}
GATES = [Gate("silu"), Gate("gelu_tanh"), Gate("clamped", 0.7, 1.702, 1.0)]
TOLERANCES = {"float32": 2e-6, "bfloat16": 1e-2, "int8": 3e-2, "int8_group": 2e-2, "int4_group": 2e-2}
"""Of what is stored; inputs of products are rounded to 8 bits but in the exact forms, and to bfloat16 on AMX where
there are many."""


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    if build().status != "ready":
        pytest.skip("no native kernels")


def compute(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: list[torch.Tensor],
    biases: list[torch.Tensor | None], gate: Gate
) -> torch.Tensor:
    """Pair by pair in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for choice, expert in enumerate(chosen):
            if expert < 0:
                continue
            hidden = x[token].double()
            for i, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
                hidden = matrix[expert].double() @ hidden + (0 if bias is None else bias[expert].double())
                hidden = hidden if i else gate_halves(hidden[None], gate)[0]
            out[token] += hidden * weights[token, choice].double()
    return out


def draw_case(
    seed: int, num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype, *,
    has_bias: bool = False
):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, width, generator=draw).to(dtype)
    ids = torch.stack(
        [torch.randperm(num_experts, generator=draw)[:top_k] for _ in range(num_tokens)]
    ).view(num_tokens, top_k)
    weights = torch.rand(num_tokens, top_k, generator=draw)
    matrices = [
        torch.randn(num_experts, out, into, generator=draw) * into**-0.5 for out,
        into in ((2 * inner, width), (width, inner))
    ]
    biases = [
        torch.randn(num_experts, out, generator=draw).to(dtype) if has_bias else None for out in (2 * inner, width)
    ]
    return x, ids, weights, matrices, biases


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_experts_match_pair_by_pair(form: str, dtype: torch.dtype, isa: str):  # noqa: F811
    for seed, (num_tokens, num_experts, top_k, width, inner) in enumerate(
        [(1, 8, 2, 64, 32), (3, 5, 1, 48, 24), (40, 4, 3, 80, 40), (70, 2, 2, 96, 72)]
    ):
        gate = GATES[seed % len(GATES)]
        x, ids, weights, matrices, biases = draw_case(
            seed, num_tokens, num_experts, top_k, width, inner, dtype, has_bias=seed % 2 == 1
        )
        packed = [FORMS[form](matrix.flatten(0, 1)) for matrix in matrices]
        kept = [unpack(matrix, torch.float32).unflatten(0, (num_experts, -1)) for matrix in packed]
        expected = compute(x, ids, weights, kept, biases, gate)
        out = native(
            x, ids, weights, *zip(packed, [None if bias is None else bias.flatten() for bias in biases], strict=True),
            gate
        )
        assert out.dtype == dtype
        tolerance = max(
            TOLERANCES[form] if form != "bfloat16" or isa == "amx" or dtype == torch.bfloat16 else 2e-6,
            1e-2 if dtype == torch.bfloat16 else 0
        )
        assert relative_error(out, expected) < tolerance


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31), num_tokens=st.integers(0, 50), num_experts=st.integers(1, 9), has_bias=st.booleans(),
    share=st.floats(0, 1), data=st.data()
)
def test_any_choice_of_experts(
    seed: int, num_tokens: int, num_experts: int, has_bias: bool, share: float, data: st.DataObject
):
    """Nobody, experts without tokens, all tokens at one expert."""
    top_k = data.draw(st.integers(1, num_experts))
    gate = data.draw(st.sampled_from(GATES))
    x, ids, weights, matrices, biases = draw_case(
        seed, max(num_tokens, 1), num_experts, top_k, 32, 16, torch.float32, has_bias=has_bias
    )
    x, ids, weights = x[:num_tokens], ids[:num_tokens], weights[:num_tokens]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < share, -1)
    packed = [pack_floats(matrix.flatten(0, 1)) for matrix in matrices]
    out = native(
        x, ids, weights, *zip(packed, [None if bias is None else bias.flatten() for bias in biases], strict=True), gate
    )
    torch.testing.assert_close(out.double(), compute(x, ids, weights, matrices, biases, gate), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_many_tokens_in_several_goes_and_threads(form: str, isa: str):  # noqa: F811
    """More rows than a block has, for some experts; with one thread what three give."""
    x, ids, weights, matrices, _ = draw_case(5, 700, 3, 2, 64, 48, torch.float32)
    stacks = [(FORMS[form](matrix.flatten(0, 1)), None) for matrix in matrices]
    threads = torch.get_num_threads()
    try:
        outs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            outs.append(native(x, ids, weights, *stacks, GATES[0]))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(outs[0], outs[1], atol=0, rtol=0)
    kept = [unpack(matrix, torch.float32).unflatten(0, (3, -1)) for matrix, _ in stacks]
    few = torch.tensor([0, 350, 699])
    tolerance = TOLERANCES[form] if form != "bfloat16" or isa == "amx" else 2e-6
    assert relative_error(
        outs[0][few], compute(x[few], ids[few], weights[few], kept, [None, None], GATES[0])
    ) < tolerance


def test_bad_choices_are_refused():
    x, ids, weights, matrices, _ = draw_case(1, 2, 4, 2, 32, 16, torch.float32)
    stacks = [(pack_floats(matrix.flatten(0, 1)), None) for matrix in matrices]
    ids[1, 0] = 4
    with pytest.raises(RuntimeError, match="no such expert"):
        native(x, ids, weights, *stacks, GATES[0])
