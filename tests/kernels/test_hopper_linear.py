"""Products on Hopper's tensor cores against float64: odd sizes, strided rows, biases, gates, sums; and that they
compile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from devices import ON_GPU, relative_error

pytest.importorskip("triton")

from headrace.kernels.linear import GATED_LINEAR, LINEAR, LINEAR_SUMS
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import ADD_RMS_NORM

on_gpu = pytest.mark.parametrize("device,dtype,tolerance", ON_GPU)
ROWS = (1, 3, 17, 64, 77, 129, 300)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    from headrace.kernels.linear import hopper

    return hopper


def _problem(device, dtype, rows, outputs, inputs):
    rng = torch.Generator().manual_seed(rows * outputs + inputs)
    wide, weight, bias = (
        torch.randn(rows, inputs + 8, generator=rng), torch.randn(outputs, inputs, generator=rng),
        torch.randn(outputs, generator=rng)
    )
    return wide.to(device, dtype)[:, :inputs], weight.to(device, dtype), bias.to(device, dtype)


def _expected(x, weight, bias=None):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def _gated(out, activation):
    gate, up = out.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@on_gpu
@pytest.mark.parametrize("outputs,inputs", [(1000, 1032), (256, 3072)])
def test_products(outputs, inputs, hopper, device, dtype, tolerance):
    for rows in ROWS:
        x, weight, bias = _problem(device, dtype, rows, outputs, inputs)
        for b in (None, bias):
            assert relative_error(hopper.linear(x, weight, b), _expected(x, weight, b)) < tolerance
            out = hopper.linear_sums(x, weight, b)
            assert out.dtype == (dtype if out.dim() == 2 else torch.float32)
            assert relative_error(out if out.dim() == 2 else out.sum(0), _expected(x, weight, b)) < tolerance
            assert torch.equal(out, hopper.linear_sums(x, weight, b)), "summed in a fixed order"


@on_gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("outputs,inputs", [(656, 1032)])
def test_gated_products(outputs, inputs, activation, hopper, device, dtype, tolerance):
    for rows in ROWS:
        x, weight, bias = _problem(device, dtype, rows, outputs, inputs)
        weight = weight / inputs**0.5
        for b in (None, bias):
            out = hopper.gated_linear(x, weight, b, activation)
            if out is not None:
                assert relative_error(out, _gated(_expected(x, weight, b), activation)) < 2 * tolerance


@on_gpu
@pytest.mark.parametrize("rows", [20, 40, 100])
def test_tiles_for_large_weights(rows, hopper, device, dtype, tolerance):
    x, weight, bias = _problem(device, dtype, rows, 512, 1032)
    weight, large = weight / 32, 2 * hopper.LARGE_WEIGHT
    expected = _expected(x, weight, bias)
    if (tile := hopper.choose_tile(rows, large, 1)) is not None:
        assert relative_error(hopper.multiply(x, weight, bias, tile), expected) < tolerance
    if (tile := hopper.choose_gated_tile(rows, large)) is not None:
        assert relative_error(hopper.multiply(x, weight, bias, tile, "silu"), _gated(expected, "silu")) < 2 * tolerance


@on_gpu
def test_a_row_does_not_depend_on_the_rows_beside_it(hopper, device, dtype, tolerance):
    x, weight, bias = _problem(device, dtype, 100, 512, 1032)
    tile = hopper.choose_tile(100, *weight.shape)
    whole = hopper.multiply(x, weight, bias, tile)
    assert torch.equal(hopper.multiply(x[30:], weight, bias, tile), whole[30:])
    assert torch.equal(hopper.multiply(x[97:], weight, bias, tile), whole[97:])


@on_gpu
def test_the_norm_adds_up_what_a_product_leaves(hopper, device, dtype, tolerance):
    x, weight, _ = _problem(device, dtype, 40, 1024, 4096)
    residual, scale = torch.randn(40, 1024, device=device).to(dtype), torch.randn(1024, device=device).to(dtype)
    sums = hopper.linear_sums(x, weight / 64, None)
    assert sums.dim() == 3
    normed, total = ADD_RMS_NORM.load("triton_pdl")(sums, residual.clone(), scale, 1e-6)
    expected = _expected(x, weight / 64) + residual.double()
    assert relative_error(total, expected) < tolerance
    assert relative_error(normed, F.rms_norm(expected, (1024,), scale.double(), 1e-6)) < tolerance


@on_gpu
def test_rows_that_begin_anywhere(hopper, device, dtype, tolerance):
    x, weight, _ = _problem(device, dtype, 40, 512, 512)
    odd = torch.zeros(40, 515, device=device, dtype=dtype)[:, 3:].copy_(x)
    assert relative_error(hopper.linear(odd, weight, None), _expected(x, weight)) < tolerance
    assert hopper.gated_linear(odd, weight, None, "silu") is None


def test_tiles_of_hundreds_of_rows_are_one_wave():
    from headrace.kernels.linear import hopper

    for rows, outputs, inputs in ((250, 5120, 2880), (250, 6144, 2560), (250, 3072, 4096), (129, 8192, 1024)):
        tile = hopper.choose_tile(rows, outputs, inputs)
        assert tile is not None and -(-rows // tile.rows) * -(-outputs // tile.outputs) <= hopper.NUM_SMS
    assert hopper.choose_tile(190, 5120, 2880) == hopper.choose_tile(250, 3072, 4096) == hopper.Tile(64, 128, 64, 8)


@on_gpu
def test_more_outputs_than_a_wave_of_narrow_tiles_has(hopper, device, dtype, tolerance):
    for rows in (193, 250, 256):
        x, weight, bias = _problem(device, dtype, rows, 5096, 520)
        assert hopper.choose_tile(rows, 5096, 520).rows == 128
        assert relative_error(hopper.linear(x, weight, bias), _expected(x, weight, bias)) < tolerance


def test_chosen_on_hopper_alone():
    def reasons(capability=(9, 0), in_features=4096, out_features=6144, dtype="bfloat16"):
        query = KernelQuery("cuda", dtype, capability, {"in_features": in_features, "out_features": out_features})
        solutions = (LINEAR, "gluon_pdl"), (LINEAR_SUMS, "gluon_pdl"), (GATED_LINEAR, "cuda")
        return [operation.reason_against(name, query) for operation, name in solutions]

    assert reasons() == [None] * 3 and all(reasons((8, 0))) and all(reasons((10, 0))) and all(reasons(dtype="float32"))
    assert all(reasons(in_features=4095)) and all(reasons(out_features=2**17))


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from headrace.kernels.linear import hopper

kernel = hopper._product_kernel
for tile, gate in ((hopper.choose_sums_tile(128, 1024, 3072), 0), (hopper.choose_gated_tile(192, 6144 * 1024), 1)):
    describe = lambda *block: f"tensordesc<bf16{list(block)},{hopper.tile_layout(block, torch.bfloat16)!r}>"
    weight = describe(tile.outputs // 8, 2, 8, tile.inputs) if gate else describe(tile.outputs, tile.inputs)
    types = dict(x_desc=describe(tile.rows, tile.inputs), weight_desc=weight,
                 bias_ptr="*bf16", out_ptr="*bf16", M="i32", N="i32", K="i32", depth="i32")
    given = dict(BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, STAGES=tile.stages,
                 SPLIT=not gate, REFILL=True, GATE=gate, HAS_BIAS=True, num_warps=4)
    source = GluonASTSource(
        kernel, {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in given.items()}, {},
    )
    options = {"num_warps": 4, "launch_pdl": True}
    assembly = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before, after = assembly.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor" in before and "cp.async.bulk.tensor" in after
    assert "wgmma" in after and "local" not in after
    print("compiled")
"""


def test_weights_are_asked_for_before_the_previous_kernel_ends(tmp_path):
    """By the compiler for Hopper, which needs no device."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["compiled"] * 2, done.stderr[-2000:]
