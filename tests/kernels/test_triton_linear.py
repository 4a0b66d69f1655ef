"""Triton's products with few rows against float64: odd sizes, strided rows, biases, splits, and repeatability."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, relative_error

pytest.importorskip("triton")

from headrace.kernels.linear import LINEAR
from headrace.kernels.linear import triton as linear
from headrace.kernels.operation import KernelQuery


def _problem(device, dtype, rows, outputs, inputs):
    rng = torch.Generator().manual_seed(rows * outputs + inputs)
    wide, weight, bias = (
        torch.randn(rows, inputs + 8, generator=rng), torch.randn(outputs, inputs, generator=rng),
        torch.randn(outputs, generator=rng)
    )
    return wide.to(device, dtype)[:, :inputs], weight.to(device, dtype), bias.to(device, dtype)


def _expected(x, weight, bias):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows,outputs,inputs", [(1, 40, 96), (1, 7, 5000), (3, 33, 4104), (4, 64, 256)])
def test_gemv(rows, outputs, inputs, device, dtype, tolerance):
    x, weight, bias = _problem(device, dtype, rows, outputs, inputs)
    assert relative_error(linear.gemv(x, weight, None), _expected(x, weight, None)) < tolerance
    out = linear.gemv(x, weight, bias)
    assert relative_error(out, _expected(x, weight, bias)) < tolerance
    assert torch.equal(out[:1], linear.gemv(x[:1], weight, bias)), "a row's sum does not depend on the rows beside it"


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows,outputs,inputs", [(5, 40, 96), (8, 33, 700)])
def test_skinny(rows, outputs, inputs, splits, device, dtype, tolerance):
    x, weight, bias = _problem(device, dtype, rows, outputs, inputs)
    tile = linear.Tile(32, 64, 4, num_stages=3, splits=splits)
    for b in (None, bias):
        out = linear.skinny(x, weight, b, tile)
        assert relative_error(out, _expected(x, weight, b)) < tolerance
        assert torch.equal(out, linear.skinny(x, weight, b, tile))


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_linear_takes_any_number_of_rows(rows, device, dtype, tolerance):
    x, weight, bias = _problem(device, dtype, rows, 256, 264)
    assert relative_error(linear.linear(x, weight, bias), _expected(x, weight, bias)) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_products_stored_as_float32(rows, device, dtype, tolerance):
    """Sums of 16-bit products are not rounded."""
    x, weight, _ = _problem(device, dtype, rows, 72, 520)
    out = linear.linear_float(x, weight)
    assert out.dtype == torch.float32 and relative_error(out, _expected(x, weight, None)) < 1e-6


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_many_rows_are_added_to_the_residual(device, dtype, tolerance):
    rows, inputs = linear.LEAST_ADDED_ROWS, linear.LEAST_ADDED_INPUTS
    x, weight, bias = _problem(device, dtype, rows, 64, inputs)
    residual = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    total = residual.clone()
    assert linear.linear_sums(x, weight, None, total) is None
    assert relative_error(total, residual.double() + _expected(x, weight, None)) < tolerance
    for few, width, b in ((rows - 1, inputs, None), (rows, inputs - 8, None), (rows, inputs, bias)):
        out = linear.linear_sums(x[:few, :width], weight[:, :width], b, total[:few])
        assert relative_error(out, _expected(x[:few, :width], weight[:, :width], b)) < tolerance


def test_chosen_by_shape():
    def reason(in_features, out_features, device="cuda", dtype="bfloat16"):
        return LINEAR.reason_against(
            "triton", KernelQuery(device, dtype, (9, 0), {"in_features": in_features, "out_features": out_features})
        )

    assert reason(4096, 6144) is None
    assert (
        reason(1024, 151936) and reason(100, 4096) and reason(4096, 6144, dtype="float32")
        and reason(4096, 6144, device="cpu")
    )


def test_dependent_launch_wherever_there_is_any():
    """One kernel of a chain that is launched without it makes all the next ones wait."""
    import importlib
    import pkgutil

    import headrace.kernels
    from headrace.kernels.operation import Operation

    query = KernelQuery("cuda", "bfloat16", (9, 0), {"in_features": 4096, "out_features": 4096, "width": 4096})
    checked = 0
    for module in pkgutil.iter_modules(headrace.kernels.__path__):
        for operation in vars(importlib.import_module(f"headrace.kernels.{module.name}")).values():
            if isinstance(operation, Operation) and "triton_pdl" in operation:
                usable = [entry.name for entry in operation if operation.reason_against(entry.name, query) is None]
                if usable[0] != "reference":  # of other shapes
                    own_cuda = usable[0] in ("cuda", "hopper")  # `CudaKernel.launch` is told so
                    assert usable[0].endswith("_pdl") or own_cuda, operation.noun
                    checked += 1
    assert checked >= 7
