"""Products with coded weights on Hopper's tensor cores against float64: scales of outputs and of blocks, rows with a
scale each or one per 128 inputs, splits, biases, activations, sizes that are no multiples of tiles; what is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.reference import dequantise, quantise_rows

SHAPES = [(5, 136, 272), (100, 528, 1040), (64, 256, 512), (300, 1024, 384)]


@pytest.fixture(scope="module")
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    from headrace.kernels.coded_linear import hopper

    return hopper


def make_fp8(outputs: int, inputs: int, *, has_blocks: bool) -> DeviceCodes:
    codes = (torch.randn(outputs, inputs, device="cuda") * 60).to(torch.float8_e4m3fn)
    if not has_blocks:
        return DeviceCodes(Code.E4M3, inputs, codes, torch.rand(outputs, 1, device="cuda") * 1e-3, inputs)
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128), device="cuda") * 1e-3
    return DeviceCodes(Code.E4M3, inputs, codes, scales, 128, rows=128)


@pytest.mark.cuda
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("rows,outputs,inputs", SHAPES)
def test_fp8_products(hopper, rows: int, outputs: int, inputs: int, has_blocks: bool, group: int):
    torch.manual_seed(rows)
    weight = make_fp8(outputs, inputs, has_blocks=has_blocks)
    x = quantise_rows(torch.randn(rows, inputs, device="cuda").bfloat16(), group)
    bias = torch.randn(outputs, device="cuda").bfloat16()
    expected = x.decode(torch.float64) @ dequantise(weight, torch.float64).T
    for tile in (hopper.Tile(32, 64, 3), hopper.Tile(64, 128, 4, num_warps=8)):
        assert relative_error(hopper.multiply(x, weight, bias, tile), expected + bias.double()) < 5e-3
    sums = hopper.multiply(x, weight, None, hopper.Tile(64, 64, 4, splits=2))
    assert sums.shape == (2, rows, outputs) and relative_error(sums.sum(0), expected) < 5e-3
    assert torch.equal(sums, hopper.multiply(x, weight, None, hopper.Tile(64, 64, 4, splits=2)))
    half = outputs // 2
    if half % 128 == 0:
        gated = F.silu(expected[:, :half]) * expected[:, half:]
        silu = hopper.Gated("silu")
        assert relative_error(hopper.multiply(x, weight, None, hopper.Tile(32, 64, 3), gated=silu), gated) < 5e-3
        tile = hopper.Tile(32, 128, 3, num_warps=8)
        rounded = hopper.multiply(x, weight, None, tile, gated=silu, is_fp8=True)
        assert relative_error(rounded.decode(torch.float64), gated) < 4e-2


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

class Hopper:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
launch, compiled = jit.JITFunction.run, []
jit.JITFunction.run = lambda self, *args, grid, warmup=False, **named: compiled.append(
    launch(self, *args, grid=grid, warmup=True, **named))

from headrace.kernels.coded_linear import hopper
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows

blocks = DeviceCodes(
    Code.E4M3, 512, torch.zeros(256, 512, dtype=torch.float8_e4m3fn), torch.ones(2, 4), 128, rows=128)
rows = Fp8Rows(torch.zeros(100, 512, dtype=torch.float8_e4m3fn), torch.ones(4, 100))
hopper.multiply(rows, blocks, None, hopper.Tile(64, 128, 4))
short = DeviceCodes(Code.E2M1, 512, torch.zeros(2048, 256, dtype=torch.uint8),
                    torch.zeros(2048, 16, dtype=torch.uint8), 32)
groups = hopper.Sorted(torch.zeros(8, dtype=torch.int32))
hopper.multiply(torch.zeros(100, 512, dtype=torch.bfloat16), short, None, hopper.Tile(32, 64, 4),
                gated=hopper.Gated("clamped", 7.0, 1.7, 1.0), groups=groups)
for kernel, instruction in zip(compiled, ("wgmma.mma_async.sync.aligned.m64n64k32", "m64n32k16.f32.bf16"), strict=True):
    assembly = kernel.asm["ptx"]
    assert instruction in assembly and "ld.local" not in assembly
    print("compiled")
"""


def test_products_compile_for_hopper_without_spills(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["compiled"] * 2, done.stderr[-2000:]
