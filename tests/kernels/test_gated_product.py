"""Gated products of many rows by own CUDA C++: values against float64, odd sizes, both activations and types, and when
they are chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error

from headrace.kernels.linear import GATED_LINEAR
from headrace.kernels.operation import KernelQuery

SHAPES = [(256, 128, 64), (1, 8, 8), (300, 264, 584), (1030, 1000, 1096), (2304, 3072, 1024)]
"""Rows, gated outputs, inputs."""


@pytest.fixture
def gated_product():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    from headrace.kernels.linear import gated_product

    return gated_product


def draw(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(rows + outputs)
    x, weight = torch.randn(rows, inputs, generator=rng), torch.randn(2 * outputs, inputs, generator=rng) / inputs**0.5
    return x.to("cuda", dtype), weight.to("cuda", dtype)


def expect(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_values(activation, dtype, tolerance, gated_product):
    kernel = gated_product.find_kernel(dtype, activation, torch.device("cuda", 0))
    for shape in SHAPES:
        x, weight = draw(*shape, dtype)
        out = gated_product.multiply(x, weight, kernel)
        assert relative_error(out, expect(x, weight, activation)) < tolerance
        assert torch.equal(out, gated_product.multiply(x, weight, kernel, band=1)), (
            "an output does not depend on the order of tiles"
        )


@pytest.mark.cuda
def test_nothing_beside_the_output_is_written(gated_product):
    kernel = gated_product.find_kernel(torch.bfloat16, "silu", torch.device("cuda", 0))
    x, weight = draw(300, 264, 128, torch.bfloat16)
    wide = torch.full((310, 128), 7.0, device="cuda", dtype=torch.bfloat16)
    wide[:300].copy_(x)
    assert torch.equal(
        gated_product.multiply(wide[:300], weight, kernel), gated_product.multiply(x, weight, kernel)
    ), "rows behind are not read"


@pytest.mark.cuda
def test_chosen_by_shape(gated_product):
    weight = draw(1, 3072, 256, torch.bfloat16)[1]
    for rows, is_own in ((2048, True), (300, False), (1024, False)):
        x = draw(rows, 1, 256, torch.bfloat16)[0]
        out = gated_product.gated_linear(x, weight, None, "silu")
        assert (out is not None) == is_own
        assert out is None or relative_error(out, expect(x, weight, "silu")) < 1e-2
    x = draw(2048, 1, 256, torch.bfloat16)[0]
    assert gated_product.gated_linear(x, weight, torch.zeros(6144, device="cuda", dtype=torch.bfloat16), "silu") is None


def test_chosen_on_hopper_alone():
    def reason(capability, dtype="bfloat16"):
        return GATED_LINEAR.reason_against(
            "cuda", KernelQuery("cuda", dtype, capability, {"in_features": 4096, "out_features": 28672})
        )

    assert reason((9, 0)) is None and reason((8, 0)) and reason((10, 0)) and reason((9, 0), "float32")
