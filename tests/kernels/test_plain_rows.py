"""Products of few rows with bfloat16 weights in own CUDA C++, against float64; how they are divided, on any machine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from headrace.kernels.cuda_source import LONE_BYTES, MOST_BYTES
from headrace.kernels.linear import Norm, reference, rows

SHAPES = [
    (1, 256, 256), (1, 1000, 1032), (2, 5120, 2880), (2, 301, 4096), (1, 77, 14336), (2, 64, 8192), (1, 4096, 2048)
]
"""M, N, K: fewer outputs than multiprocessors, parts of a vector's turn, one row of the weight a stage."""


@given(
    num_rows=st.integers(1, 2), outputs=st.integers(1, 2**17), inputs=st.integers(32, 4096).map(lambda n: 8 * n),
    kinds=st.integers(1, 2), sms=st.sampled_from([1, 78, 132]),
)
def test_a_plan_fits_a_block_and_covers_all_outputs(num_rows: int, outputs: int, inputs: int, kinds: int, sms: int):
    plan = rows.make_plan(num_rows, outputs, inputs, kinds, True, sms)
    if plan is None:
        return
    most = -(-outputs // plan.blocks)
    assert plan.blocks <= min(sms, outputs) and 1 <= plan.each <= most and plan.stages >= 1
    assert (plan.stages - 1) * plan.each < most, "no stage that is never used"
    assert MOST_BYTES >= plan.shared_bytes >= LONE_BYTES
    sums = num_rows * rows.WARPS * (most * kinds + 1) * 4
    assert plan.stages * (plan.each * kinds * inputs * 2 + 16) + sums <= plan.shared_bytes


def test_shapes_of_models_are_taken():
    for outputs, inputs, kinds in (
        (6144, 4096, 1), (14336, 4096, 2), (4096, 14336, 1), (8192, 28672, 1), (2880, 4096, 1)
    ):
        plan = rows.make_plan(1, outputs, inputs, kinds, False, 132)
        assert plan is not None and plan.blocks == 132 and plan.stages >= 2


def _problem(num_rows: int, outputs: int, inputs: int) -> list[torch.Tensor]:
    draw = torch.Generator(device="cuda").manual_seed(outputs + inputs)
    sizes = (num_rows, inputs + 8), (num_rows, inputs), (inputs,), (outputs, inputs), (outputs,)
    parts = [torch.randn(size, generator=draw, device="cuda").bfloat16() for size in sizes]
    return [parts[0][:, :inputs], *parts[1:]]


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_gates(shape: tuple[int, int, int], on_hopper: None):
    x, _, _, weight, bias = _problem(*shape)
    wide = torch.cat([weight, weight.flip(0)])
    for b in (None, bias):
        out = rows.multiply(x, weight, b)
        assert out is not None
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert relative_error(out, expected) < 4e-3
        assert torch.equal(out, rows.multiply(x, weight, b)), "sums are in a fixed order"
        for activation, function in (("silu", F.silu), ("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"))):
            both = None if b is None else torch.cat([b, b.flip(0)])
            out = rows.multiply(x, wide, both, activation)
            assert out is not None
            up = expected.flip(1)
            assert relative_error(out, function(expected) * up) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] <= 8192])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_with_the_norm_before_them(shape: tuple[int, int, int], activation: str, on_hopper: None):
    x, residual, scale, weight, bias = _problem(*shape)
    if activation:
        weight, bias = torch.cat([weight, weight.flip(0)]), torch.cat([bias, bias.flip(0)])
    before = residual.clone()
    out, total = rows.multiply_normalised(x, residual, Norm(scale, 1e-5, 1.0), weight, bias, activation)
    assert torch.equal(total, x + residual) and torch.equal(residual, before)
    normed = (x + residual).double()
    expected, _ = reference.norm_linear(
        normed, torch.zeros_like(normed), Norm(scale.double(), 1e-5, 1.0), weight.double(), bias.double(), activation
    )
    assert relative_error(out, expected) < 1e-2


@pytest.mark.cuda
def test_a_row_does_not_depend_on_the_row_beside_it(on_hopper: None):
    x, residual, scale, weight, bias = _problem(2, 512, 4096)
    whole, _ = rows.multiply_normalised(x, residual, Norm(scale, 1e-5), weight, bias)
    for m in range(2):
        alone, _ = rows.multiply_normalised(x[m : m + 1], residual[m : m + 1], Norm(scale, 1e-5), weight, bias)
        assert torch.equal(alone[0], whole[m])


@pytest.mark.cuda
def test_what_it_does_not_take_is_passed_on(on_hopper: None):
    x, residual, scale, weight, _ = _problem(1, 256, 256)
    assert rows.multiply(x.half(), weight.half(), None) is None
    assert rows.multiply(x.expand(3, -1), weight, None) is None
    out, total = rows.multiply_normalised(x.half(), residual.half(), Norm(scale.half(), 1e-5), weight.half(), None)
    assert out.dtype == total.dtype == torch.float16 and out.isfinite().all()
