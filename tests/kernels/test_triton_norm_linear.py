"""The GEMV that normalises its own input, against its parts in float64 and against the separate kernels."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, relative_error

pytest.importorskip("triton")

from headrace.kernels.linear import NORM_LINEAR, Norm, fits, norm_linear, reference
from headrace.kernels.operation import KernelQuery

EPS = 1e-5


def _problem(device, dtype, rows, outputs, width):
    rng = torch.Generator().manual_seed(rows * outputs + width)
    x, residual = torch.randn(rows, width + 8, generator=rng)[:, :width], 3 * torch.randn(rows, width, generator=rng)
    norm, weight, bias = (
        torch.randn(width, generator=rng), torch.randn(outputs, width, generator=rng),
        torch.randn(outputs, generator=rng)
    )
    return [t.to(device, dtype) for t in (x, residual, norm, weight, bias)]


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("activation", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize("rows,outputs,width", [(1, 40, 96), (1, 34, 1000), (3, 64, 256), (4, 14, 264)])
def test_matches_its_parts(rows, outputs, width, activation, device, dtype, tolerance):
    x, residual, norm, weight, bias = _problem(device, dtype, rows, outputs, width)
    before = residual.clone()
    for b in (None, bias):
        for tile in (None, norm_linear.Tile(4, 4)):
            out, total = norm_linear.norm_linear(x, residual, Norm(norm, EPS, 1.0), weight, b, activation, tile=tile)
            assert torch.equal(total, x + residual), "rounded as a kernel of its own would"
            assert torch.equal(residual, before)
            normed = [t.double() for t in (x + residual, norm, weight)]
            expected, _ = reference.norm_linear(
                normed[0], torch.zeros_like(normed[0]), Norm(normed[1], EPS, 1.0), normed[2],
                None if b is None else b.double(), activation
            )
            assert relative_error(out, expected) < 2 * tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_a_row_does_not_depend_on_the_rows_beside_it(device, dtype, tolerance):
    x, residual, norm, weight, bias = _problem(device, dtype, 4, 64, 512)
    whole, _ = norm_linear.norm_linear(x, residual, Norm(norm, EPS), weight, bias, "silu")
    for row in range(4):
        alone, _ = norm_linear.norm_linear(
            x[row : row + 1], residual[row : row + 1], Norm(norm, EPS), weight, bias, "silu"
        )
        assert torch.equal(alone[0], whole[row])


def test_chosen_by_shape_and_rows():
    def reason(width, outputs=4096, device="cuda", dtype="bfloat16"):
        return NORM_LINEAR.reason_against(
            "triton", KernelQuery(device, dtype, (9, 0), {"in_features": width, "out_features": outputs})
        )

    assert reason(4096) is None and "launches" in reason(4096, 4104)
    assert "steps of 8" in reason(4095) and "steps of 8" in reason(16384)
    assert "cuda" in reason(4096, device="cpu") and "bfloat16" in reason(4096, dtype="float32")
    assert fits(1) and fits(2) and not fits(3) and not fits(0)
