"""Experts in codes against plain torch on the dequantised matrices: every form of scales, with and without sorting,
more pairs than a tile has rows, sizes that are no multiples of tiles, choices without an expert."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import DEVICES, in_turns, relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.kernels.coded_linear.reference import dequantise
from headrace.kernels.cuda_source import RESERVED_BYTES, SM_BYTES, CudaSourceError, cache_compiled
from headrace.kernels.launch import ceil_div
from headrace.kernels.moe import CODED_EXPERTS, coded_few, fp8_few, reference
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate

SILU, CLAMPED = Gate("silu"), Gate("clamped", 2.0, 1.702, 1.0)


def with_wide_scales(weight: torch.Tensor) -> CodedMatrix:
    """INT4 whose scales float16 does not hold."""
    matrix = quantise_integer(weight, 4, 32)
    return CodedMatrix(Code.INT, matrix.codes, matrix.scales * 1.0001, 32, matrix.zeros, bits=4)


FORMS: dict[str, Any] = {
    "mxfp4": quantise_fp4, "fp8 block": lambda weight: quantise_float(weight, 32, 128),
    "fp8 channel": quantise_float, "int4": lambda weight: quantise_integer(weight, 4, 128),
    "int4 wide": with_wide_scales, "int8": lambda weight: quantise_integer(weight, 8, 32),
}


def stack(form: str, matrices: torch.Tensor, device: str) -> DeviceCodes:
    """Matrices [X, O, I] in codes."""
    packed = pack_for_device(FORMS[form](matrices.flatten(0, 1)).to(torch.device(device)))
    assert packed is not None and packed.fault_of_stack(matrices.shape[1]) is None
    return packed


def compare(
    form: str, sizes: tuple[int, int, int, int, int], gate: Gate, device: str, dtype: torch.dtype, *, has_bias: bool,
    run: Any = None
) -> float:
    """The error against float64 of the same numbers."""
    from headrace.kernels.moe.coded import run_experts

    num_tokens, num_experts, top_k, width, inner = sizes
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    if num_tokens > 2:
        ids[2], ids[1, 0] = -1, -1
    x = torch.randn(num_tokens, width, generator=generator).to(dtype)
    weights = torch.rand(ids.shape, generator=generator)
    gate_up, down = (
        stack(form, torch.randn(num_experts, *shape, generator=generator) * shape[1] ** -0.5, device)
        for shape in ((2 * inner, width), (width, inner))
    )
    biases = [
        torch.randn(num_experts, outputs, generator=generator).to(dtype) if has_bias else None
        for outputs in (2 * inner, width)
    ]
    plain = [
        dequantise(codes, torch.float32).double().cpu().unflatten(0, (num_experts, -1)) for codes in (gate_up, down)
    ]
    double = [(matrix, None if b is None else b.double()) for matrix, b in zip(plain, biases, strict=True)]
    expected = reference.run_experts(x.double(), ids, weights, *double, gate)
    there = [None if b is None else b.to(device) for b in biases]
    operands = (x.to(device), ids.to(device), weights.to(device), (gate_up, there[0]), (down, there[1]), gate)
    out = (run or run_experts)(*operands)
    assert torch.equal(out, (run or run_experts)(*operands))
    assert relative_error(reference.coded_experts(*operands), expected) < 2e-2
    return relative_error(out, expected)


@pytest.mark.parametrize("case,device,dtype,tolerance", in_turns([
    ((1, 4, 2), SILU, False), ((3, 4, 3), CLAMPED, True), ((70, 2, 1), Gate("gelu_tanh"), True)
]))
@pytest.mark.parametrize("form", FORMS)
def test_experts(
    form: str, case: tuple[tuple[int, int, int], Gate, bool], device: str, dtype: torch.dtype, tolerance: float
):
    """Of so many tokens, experts, and experts of a token."""
    sizes, gate, has_bias = case
    assert compare(form, (*sizes, 160, 96), gate, device, dtype, has_bias=has_bias) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 16, 64, 300, 1024])
@pytest.mark.parametrize("form", ["mxfp4", "fp8 block", "int4"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "inner"), [(16, 8, 2048, 768), (8, 4, 2880, 2880), (8, 6, 4096, 2048)]
)
def test_experts_of_real_shapes(form: str, num_tokens: int, num_experts: int, top_k: int, width: int, inner: int):
    """As `auto` has it, with dependent launch; twice the same."""
    run = CODED_EXPERTS.choose(KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability()))
    sizes = (num_tokens, num_experts, top_k, width, inner)
    tolerance = 6e-2 if form == "fp8 block" and num_tokens > 16 else 1e-2  # many rows are rounded to FP8
    assert compare(form, sizes, CLAMPED, "cuda", torch.bfloat16, has_bias=True, run=run) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["mxfp4", "fp8 block", "fp8 channel"])
@pytest.mark.parametrize("missing", [(1,), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_a_token_whose_experts_are_elsewhere(form: str, missing: tuple[int, ...]):
    """As of a rank with expert parallelism, in a chain of layers with dependent launch: work that was planned for all
    choices is of fewer. More choices than biases that a thread keeps."""
    run = CODED_EXPERTS.choose(KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability()))
    num_experts, top_k, width = 8, 6, 1024
    generator = torch.Generator().manual_seed(4)
    shapes = ((2 * 384, width), (width, 384))
    stacks = [stack(form, torch.randn(num_experts, *s, generator=generator) * s[1] ** -0.5, "cuda") for s in shapes]
    biases = [torch.randn(num_experts, s[0], generator=generator).bfloat16().cuda() for s in shapes]
    operands = list(zip(stacks, biases, strict=True))
    weights = torch.rand(1, top_k, generator=generator).cuda()
    ids = torch.randperm(num_experts, generator=generator)[None, :top_k].clone()
    ids[0, list(missing)] = -1
    ids = ids.cuda()
    x = torch.randn(1, width, generator=generator).bfloat16().cuda()
    ran = []
    for _ in range(4):  # each takes what the one before has written
        ran.append((x, run(x, ids, weights, *operands, CLAMPED)))
        x = ran[-1][1] + 1
    plain = [
        (dequantise(codes, torch.float32).double().unflatten(0, (num_experts, -1)), bias.double())
        for codes, bias in operands
    ]
    for given, out in ran:
        expected = reference.run_experts(given.double(), ids, weights, *plain, CLAMPED)
        if len(missing) == top_k:
            assert not out.any()
        else:
            assert relative_error(out, expected) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("width,inner", [(512, 288), (128, 64), (768, 1024)])
def test_experts_of_small_shapes(num_tokens: int, width: int, inner: int):
    """Where blocks have fewer steps than warps, or nothing to do."""
    run = CODED_EXPERTS.choose(KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability()))
    sizes = (num_tokens, 4, 2, width, inner)
    assert compare("mxfp4", sizes, CLAMPED, "cuda", torch.bfloat16, has_bias=True, run=run) < 1e-2


@pytest.mark.usefixtures("breaks_kernels")
def test_few_tokens_run_in_triton_where_own_cuda_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise CudaSourceError("cuFuncSetAttribute: invalid argument")

    monkeypatch.setattr(coded_few, "find_kernel", fail)
    monkeypatch.setitem(CODED_EXPERTS._loaded, "triton_pdl", lambda x, *_: x)
    uncached = coded_few._can_compile.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(coded_few, "_can_compile", cache_compiled(uncached))
    gate_up, down = (stack("mxfp4", torch.randn(2, *shape), "cpu") for shape in ((128, 128), (128, 64)))
    x, ids = torch.randn(1, 128).bfloat16(), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(2):
        assert coded_few.run_experts(x, ids, torch.ones(1, 1), (gate_up, None), (down, None), SILU) is x
    assert caplog.text.count("invalid argument") == 1


def test_few_tokens_take_codes_without_zero_points():
    codes = {form: stack(form, torch.randn(2, 128, 256), "cpu") for form in FORMS}
    assert [form for form in FORMS if coded_few.takes(codes[form])] == ["mxfp4"]
    assert [form for form in FORMS if fp8_few.takes(codes[form])] == ["fp8 block", "fp8 channel"]
    assert not fp8_few.takes(stack("fp8 block", torch.randn(2, 128, 192), "cpu")), "blocks of 128 inputs"


@pytest.mark.parametrize("form", ["fp8 block", "fp8 channel"])
def test_fp8_stages_hold_gate_beside_up_of_each_expert(form: str):
    gate_up, down = (stack(form, torch.randn(3, *shape), "cpu") for shape in ((256, 256), (256, 128)))
    products = fp8_few.plan((gate_up, None), (down, None), torch.ones(1, 2), 132)
    assert products is not None
    rows = gate_up.codes.view(torch.uint8).unflatten(0, (3, 2, 128))
    view, box = products[0].view_weight()
    assert box == (products[0].form.shape.unit, 2, 32, 128)
    for expert, tile, block in ((0, 0, 0), (2, 1, 1)):  # the last one's rows of up end with the stack
        start = expert * products[0].rows_each + tile * 32
        assert torch.equal(
            view[block, :, start : start + 32], rows[expert, :, tile * 32 : tile * 32 + 32, block * 128 :][..., :128]
        )
    assert torch.equal(products[1].view_weight()[0][0, 576:640], down.codes.view(torch.uint8)[576:640])
    assert all(product.shared_bytes <= fp8_few.MOST_SHARED_BYTES for product in products)
    assert fp8_few.plan((gate_up, None), (down, None), torch.ones(2, 2), 132) is None


def test_down_of_fp8_experts_fits_beside_gate_and_up():
    """The shape of Qwen3-30B-A3B; blocks of gate and up do not fit beside each other."""
    shapes = ((2 * 768, 2048), (2048, 768))
    number = torch.zeros(1).to(torch.float8_e4m3fn)
    codes = [
        DeviceCodes(
            Code.E4M3, inputs, number.expand(128 * rows, inputs), torch.ones(rows, inputs // 128), 128, rows=128
        )
        for rows, inputs in shapes
    ]
    products = fp8_few.plan((codes[0], None), (codes[1], None), torch.ones(1, 8), 132)
    assert products is not None
    gate_up, down = (product.asked_bytes + RESERVED_BYTES for product in products)
    assert gate_up + down <= SM_BYTES < 2 * gate_up
    few = fp8_few.plan((codes[0], None), (codes[1], None), torch.ones(1, 2), 132)
    assert few is not None and 2 * (few[1].asked_bytes + RESERVED_BYTES) > SM_BYTES, "multiprocessors without gate"


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 4), (3, 4), (4, 16), (4, 17), (5, 4)])
def test_few_tokens_fit_in_shared_memory(num_tokens: int, top_k: int):
    """A warp has a sum for each tile that its run of steps touches."""
    gate_up, down = (stack("mxfp4", torch.zeros(16, *shape), "cpu") for shape in ((512, 384), (384, 256)))
    products = coded_few.plan((gate_up, None), (down, None), torch.ones(num_tokens, top_k), 7)
    assert (products is not None) == (num_tokens <= 4 and num_tokens * top_k <= 64)
    for product in products or ():
        assert product.shared_bytes <= coded_few.MOST_BYTES and product.x_pitch % 32 == 16
        units = ceil_div(ceil_div(product.weight.in_features, coded_few.UNIT), product.form.shape.step)
        chosen = min(num_tokens * top_k, 16)
        if product.form.is_down:
            tiles, steps = ceil_div(ceil_div(product.outputs, product.sms), 8), units * ceil_div(chosen, 2)
        else:
            tiles, steps = ceil_div(chosen * product.outputs // 8, product.sms), units
        warps = product.form.shape.warps
        runs = [(tiles * steps * warp // warps, tiles * steps * (warp + 1) // warps) for warp in range(warps)]
        assert max((end - 1) // steps - begin // steps + 1 for begin, end in runs) <= product.slots


def test_hopper_takes_rows_that_begin_at_multiples_of_16_bytes():
    from headrace.kernels.moe.hopper import takes

    codes = stack("mxfp4", torch.randn(2, 16, 192), "cpu")
    assert [takes(replace(codes, in_features=inputs)) for inputs in (192, 184, 180)] == [True, True, False]


def put_evens_first(x: torch.Tensor) -> torch.Tensor:
    """Of each 16 columns, the even ones and then the odd ones."""
    return x.unflatten(1, (-1, 8, 2)).transpose(2, 3).flatten(1)


@pytest.mark.parametrize("device,dtype,_", DEVICES)
@pytest.mark.parametrize("width", [48, 1104])
def test_gathered_rows_have_even_columns_first(width: int, device: str, dtype: torch.dtype, _: float):
    """And those of pairs without an expert are not written."""
    from headrace.kernels.moe.hopper import GATHER_BLOCK, _gather_kernel

    x = torch.randn(5, width).to(device, dtype)
    ids = torch.tensor([[1, 0], [2, -1], [-1, -1], [0, 2], [2, 1]], device=device)
    order, _place, ends = reference.group_pairs(ids, 3)
    for evens_first, at_once in itertools.product((False, True), (1, 4)):
        out = torch.full((10, width), 7.0, device=device, dtype=dtype)
        _gather_kernel[(ceil_div(10, at_once), ceil_div(width, GATHER_BLOCK))](
            x, order, ends, out, out, width, 10, D=width, TOP_K=2, X=3, ROWS=at_once, BLOCK=GATHER_BLOCK, GROUP=0,
            EVENS_FIRST=evens_first, PDL=False,
        )
        rows = x[order[: int(ends[-1])].long() // 2]
        assert torch.equal(out[: len(rows)], put_evens_first(rows) if evens_first else rows)
        assert len(rows) == 7 and (out[7:] == 7.0).all()


def decode_by_threads(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Numbers [16, 128] of a warp's rows of bytes [16, 64] and words of four scales [16], as its operands have them: a
    stage swizzled by 64 bytes, read by `ldmatrix`, then the arithmetic of the kernel."""
    place, lane, out = torch.arange(16 * 64), torch.arange(32), torch.zeros(16, 128, dtype=torch.float64)
    stage = torch.zeros(16 * 64, dtype=torch.uint8)
    stage[place ^ (place >> 7 & 3) << 4] = codes.flatten()
    group, quad = lane // 4, lane % 4
    for pair, matrix in itertools.product(range(2), range(4)):
        at = (matrix % 2 * 8 + group) * 64 + ((matrix // 2 * 16 + 32 * pair) ^ group // 2 * 16) + 4 * quad
        word = sum(stage[at + byte].long() << 8 * byte for byte in range(4))
        piece, row = 2 * pair + matrix // 2, matrix % 2 * 8 + group
        for high, odd, end in itertools.product(range(2), range(2), range(2)):
            spread = word >> 8 * odd & (0x00F000F0 if high else 0x000F000F)
            bits = spread * (0x0104 if high else 0x1040) & 0x81C081C0
            number = (bits >> 16 * end & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
            pairs = words[row] << 7 if piece < 2 else words[row] >> 1  # of inputs 0 and 64 on, or 32 and 96 on
            power = (pairs >> 16 * high & 0x7F80).to(torch.int16).view(torch.bfloat16)
            out[row, 64 * high + 16 * piece + 8 * odd + 2 * quad + end] = number.double() * power.double()
    return out


def test_threads_find_mxfp4_numbers_with_even_inputs_first():
    codes = stack("mxfp4", torch.randn(1, 32, 320) * torch.logspace(-3, 0, 320), "cpu")
    plain = torch.zeros(32, 384, dtype=torch.float64)
    plain[:, :320] = dequantise(codes, torch.float64)
    words = codes.scales.view(torch.int32).long()
    assert words.shape == (32, 3) and len(codes.scales.unique()) > 4
    for step, row in itertools.product(range(3), (0, 16)):
        own = slice(row, row + 16)
        found = decode_by_threads(codes.codes[own, 64 * step : 64 * step + 64], words[own, step])
        assert torch.equal(found, put_evens_first(plain[own, 128 * step : 128 * step + 128]))


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(193, 48), (250, 48), (288, 48), (320, 64), (512, 96), (1024, 256)]
)
def test_tiles_of_mxfp4_have_rows_for_nearly_every_expert(num_tokens: int, rows: int):
    from headrace.kernels.moe import many

    tile = many.choose_tile(num_tokens, 4, 32)
    assert tile.rows == rows and tile.groups == (4 if rows <= 96 else 2)
    assert tile.stages >= 3 and tile.rows * tile.groups <= 512
