"""Own CUDA C++ products of few rows with e4m3 weights, against float64; their tiles and shapes without a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear import CODED_LINEAR, MOST_WGMMA_INPUTS, MOST_WGMMA_ROWS, fp8_rows, reference
from headrace.kernels.coded_linear.choice import describe_codes
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.quantise import quantise_float
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.reference import clamped_swiglu

FORMS = {"channel": (1, 0), "tensor": (1 << 20, 0), "block": (128, 128), "group": (1, 128)}


def draw_weight(form: str, outputs: int, inputs: int, device: str = "cpu") -> DeviceCodes:
    rows, group = FORMS[form]
    plain = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 0.05
    return pack_for_device(quantise_float(plain.to(device), rows=min(rows, outputs), group=group))


def draw_rows(rows: int, inputs: int) -> torch.Tensor:
    """With groups of zeros, beside others, and of much larger numbers."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    if inputs > 128:  # else nothing would be left: an error relative to zero is NaN
        x[:, :128], x[-1, 128:256] = 0.0, 1000.0
    return x.to("cuda", torch.bfloat16)


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """As the kernel does, in float64."""
    return reference.quantise_rows(x, 128).decode(torch.float64)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rows,outputs,inputs", [
        (1, 80, 256), (2, 4096, 768), (5, 272, 4096), (8, 176, 1536), (11, 144, 14336),
        (1, 80, 128), (3, 4096, 1408), (3, 48, 1152),  # odd numbers of blocks: half of a warp may be past the end
        # shared by two programs, with less for the second one; gate and up of DeepSeek-V4-Flash's shared MLP of two
        # ranks, its down projection of queries and latents, DeepSeek-V3's
        (1, 48, 2176), (2, 80, 2688), (1, 2048, 4096), (4, 1536, 4096), (3, 2112, 7168), (1, 4096, 1024),
    ]
)
def test_products_of_few_rows(form: str, rows: int, outputs: int, inputs: int):
    """Alone, with a bias and the activation, and after the norm; sizes are no multiples of tiles, and programs share
    inputs. The same again gives the same."""
    weight = draw_weight(form, outputs, inputs, "cuda")
    plain = reference.dequantise(weight, torch.float32).double()
    x, bias = draw_rows(rows, inputs), torch.randn(outputs, device="cuda").bfloat16()
    expected = round_rows(x) @ plain.T + bias.double()
    out = fp8_rows.multiply(x, weight, bias)
    assert relative_error(out, expected) < 8e-3 and torch.equal(out, fp8_rows.multiply(x, weight, bias))
    gate, up = expected.chunk(2, dim=1)
    assert relative_error(fp8_rows.multiply_gated(x, weight, bias, Gate("silu")), F.silu(gate) * up) < 1.2e-2
    clamp = Gate("clamped", limit=float(gate.abs().median()), alpha=1.7, up_offset=0.5)  # bounds many, on both sides
    clamped = clamped_swiglu(expected, limit=clamp.limit, alpha=clamp.alpha, up_offset=clamp.up_offset)
    assert relative_error(fp8_rows.multiply_gated(x, weight, bias, clamp), clamped) < 1.2e-2
    residual, norm = draw_rows(rows, inputs).flip(1), torch.rand(inputs, device="cuda").bfloat16()
    out, total = fp8_rows.multiply_normalised(x, residual, Norm(norm, 1e-5, 1.0), weight, None)
    added = x + residual
    rounded = round_rows(added.float() * (norm.float() + 1.0))
    root = (added.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    # a number that rounds to the next code counts more among a few
    most = 8e-3 if inputs > 2200 else 1e-2 if inputs > 512 else 1.5e-2
    assert torch.equal(total, added) and relative_error(out, rounded / root @ plain.T) < most


def test_tiles_alternate_rows_of_gate_and_up():
    weight = draw_weight("channel", 96, 256)
    codes = weight.codes.view(torch.uint8)
    whole = fp8_rows.view_weight(weight, is_gated=False)
    assert torch.equal(whole, codes.unflatten(1, (2, 128)).transpose(0, 1))
    gated = fp8_rows.view_weight(weight, is_gated=True)
    assert gated.shape == (2, 6, 2, 8, 128)
    for block, group, half, row in product(range(2), range(6), range(2), range(8)):
        own = codes[48 * half + 8 * group + row, 128 * block : 128 * (block + 1)]
        assert torch.equal(gated[block, group, half, row], own)


@pytest.mark.parametrize("has_norm", [False, True])
def test_programs_fit_shared_memory_and_cover_all_inputs(has_norm: bool):
    """Whatever they say that they take."""
    for rows, outputs in product((1, 3, 8, 9, 16), (16, 4096, 28672)):
        for inputs in (128, 4096, 7168, MOST_WGMMA_INPUTS // rows // 128 * 128):
            tiles = ceil_div(outputs, fp8_rows.TILE)
            shape = fp8_rows.choose_shape(tiles, inputs, rows)
            used = fp8_rows.count_shared_bytes(rows, inputs, shape, has_norm=has_norm)
            assert used <= fp8_rows.MOST_BYTES
            assert fp8_rows.count_chunks(inputs, shape) * shape.splits * shape.unit * fp8_rows.BLOCK >= inputs
            assert shape.splits == 1 or tiles * shape.splits <= 2 * fp8_rows.NUM_SMS or rows * inputs > 48 << 10


DENSE = {
    # outputs and inputs of a rank's weights by number of ranks
    "DeepSeek-V4-Flash": lambda n: (
        (1536, 4096), (32768 // n, 1024), (8192 // n, 4096), (4096, 8192 // n), (4096 // n, 4096), (4096, 2048 // n),
        (8192, 1024),
    ),
    "DeepSeek-V3": lambda n: (
        (2112, 7168), (24576 // n, 1536), (7168, 16384 // n), (36864 // n, 7168), (7168, 18432 // n),
        (4096 // n, 7168), (7168, 2048 // n),
    ),
    "Qwen3-30B-A3B": lambda n: ((5120 // n, 2048), (2048, 4096 // n)),
    "Qwen3-8B": lambda n: ((6144 // n, 4096), (4096, 4096 // n), (24576 // n, 4096), (4096, 12288 // n)),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", DENSE)
def test_programs_share_inputs_by_two_and_run_at_once(model: str, ranks: int):
    """Of four and more, not all clusters run at once where they have nearly all multiprocessors."""
    for (outputs, inputs), rows in product(DENSE[model](ranks), (1, MOST_WGMMA_ROWS)):
        tiles = ceil_div(outputs, fp8_rows.TILE)
        can_share = 2 * tiles <= fp8_rows.NUM_SMS and inputs >= 2048
        needs_two = rows * inputs > fp8_rows.MOST_X_BYTES
        assert fp8_rows.choose_shape(tiles, inputs, rows).splits == (2 if can_share or needs_two else 1)


@pytest.mark.parametrize(("outputs", "inputs", "height"), [
    (28672, 4096, 32), (6144, 4096, 48), (5120, 2048, 48), (4096, 4096, 64), (16384, 1024, 64), (8192, 1024, 64),
    (32768, 1024, 64), (28672, 4096 + 128, 64),
])
def test_lower_tiles_divide_rows_more_evenly(outputs: int, inputs: int, height: int):
    """Among programs that are as many as multiprocessors; whole stages of inputs, and no more memory."""
    shape = fp8_rows.choose_shape(ceil_div(outputs, fp8_rows.TILE), inputs, 1)
    divided = fp8_rows.divide_evenly(shape, outputs, inputs)
    assert divided.height == height and divided.splits == shape.splits
    assert (divided == shape) == (height == 64) and inputs % (divided.unit * 128 if height < 64 else 128) == 0
    for rows in (1, 4, 16):
        used, before = (
            fp8_rows.count_shared_bytes(rows, inputs, own, has_norm=True) for own in (divided, shape)
        )
        assert used <= before
        # what wgmma reads behind the last tile of the ring
        assert used - 1024 - divided.stages * divided.unit * height * 128 >= (64 - height) * 128
    share = ceil_div(ceil_div(outputs, height), fp8_rows.NUM_SMS) * height
    whole = ceil_div(ceil_div(outputs, 64), fp8_rows.NUM_SMS) * 64
    assert share <= 0.9 * whole or height == 64


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lower", fp8_rows.LOWER)
def test_products_by_lower_tiles(form: str, lower: fp8_rows.Shape):
    """Outputs that are no multiple of a tile, several tiles of a program, rows that fill a product or not."""
    for rows, outputs, inputs in ((1, 6144, 4096), (3, 14352, 1024), (9, 208, 2048)):
        weight = draw_weight(form, outputs, inputs, "cuda")
        plain = reference.dequantise(weight, torch.float32).double()
        x, bias = draw_rows(rows, inputs), torch.randn(outputs, device="cuda").bfloat16()
        expected = round_rows(x) @ plain.T + bias.double()
        out = x.new_empty(rows, outputs)
        assert relative_error(fp8_rows.launch(x, weight, bias, out, shape=lower), expected) < 8e-3
        gate, up = expected.chunk(2, dim=1)
        gated = x.new_empty(rows, outputs // 2)
        fp8_rows.launch(x, weight, bias, gated, shape=lower, gate=Gate("silu"))
        assert relative_error(gated, F.silu(gate) * up) < 1.2e-2


def test_what_is_taken():
    def reason(rows: int = 1, capability: tuple[int, int] = (9, 0), **other: int) -> str | None:
        query = describe_codes(draw_weight("block", 128, 256), torch.bfloat16, capability)
        shape = {**query.shape, "num_rows": rows, **other}
        return CODED_LINEAR.reason_against("cuda_fp8", KernelQuery("cuda", "bfloat16", capability, shape))

    assert reason() is None and reason(MOST_WGMMA_ROWS) is None and reason(group=256) is None
    assert f"{MOST_WGMMA_ROWS} rows" in str(reason(MOST_WGMMA_ROWS + 1))
    assert "steps of 128" in str(reason(in_features=320)) and reason(in_features=1152) is None
    assert "9.0" in str(reason(capability=(10, 0))) and "scales of 128" in str(reason(group=64))
    assert "steps of 16" in str(reason(out_features=40)) and "8-bit floats" in str(reason(is_float=0))
