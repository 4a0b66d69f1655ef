"""Experts in MXFP4 times rows rounded to e4m3: rows as they are stored, numbers as threads decode them, the oracle's
error, products and whole steps on Hopper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from devices import DEVICES, relative_error
from test_mxfp4_parts import CLAMPED, NUM_EXPERTS, activate, draw_step, make_codes

pytest.importorskip("triton")

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.hopper import NOT_GATED
from headrace.kernels.coded_linear.reference import dequantise, quantise_rows
from headrace.kernels.cuda_source import MOST_BYTES, CudaSourceError, cache_compiled
from headrace.kernels.moe import coded_few, many, reference, rounded, sorted_rows
from headrace.kernels.rowwise import Gate


@pytest.fixture
def _on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


@pytest.mark.parametrize("device,dtype,_", DEVICES)
@pytest.mark.parametrize("width", [48, 1104])
def test_a_row_is_rounded_for_each_of_its_pairs(width: int, device: str, dtype: torch.dtype, _: float):
    """Those of pairs without an expert are not written; nor are rows behind the last end."""
    torch.manual_seed(width)
    x = torch.randn(5, width).bfloat16()
    x[1], x[4] = 0.0, x[4] * 2.0**-10
    x = x.to(device, dtype)
    ids = torch.tensor([[1, 0], [2, -1], [-1, -1], [0, 2], [2, 1]], device=device)
    order, place, ends = reference.group_pairs(ids, 3)
    there = int(ends[-1])
    for rows, given in (
        (rounded.round_pairs(x, ids, place, ends, pdl=False), x[order[:there].long() // 2]),
        (rounded.round_rows(x, torch.tensor([1, 4], dtype=torch.int32, device=device), pdl=False), x[:4]),
    ):
        expected = quantise_rows(given)
        assert torch.allclose(rows.scales[: len(given)], expected.scales, rtol=1e-6)
        found = Fp8Rows(rows.codes[: len(given)], rows.scales[: len(given)]).decode(torch.float32)
        error = (found - given.float()).abs()
        # Triton's interpreter loses the carry of numbers that round up to a power of two, and those below 2**-6
        relative, least = (2.0**-4, 2.0**-10) if device == "cuda" else (0.5, 2.0**-6)
        assert (error <= given.float().abs() * relative * 1.001 + expected.scales[:, None] * least).all()


def decode_by_threads(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Numbers [16, 128] of a warp's rows of bytes [16, 64] and words of four scales [16], as its operands have them."""
    lane, out = torch.arange(32), torch.zeros(16, 128, dtype=torch.float64)
    group, quad = lane // 4, lane % 4
    mask = (1 << 32) - 1
    for high, nth, half in itertools.product(range(2), range(2), range(2)):
        row = group + 8 * half
        first, second = (
            sum(codes[row, 32 * nth + 16 * piece + 4 * quad + byte].long() << 8 * byte for byte in range(4))
            for piece in range(2)
        )
        power = (words[row] >> 8 * (2 * high + nth) & 255).clamp(min=227)
        few = (power * 0x04040400 + 0x06040000 - 227 * 0x04040400) & mask
        numbers = (power * 0x04040404 + 0x0E0C0A08 - 227 * 0x04040404) & mask
        table = few | numbers << 32
        low, other = (first >> 4, second) if high else (first, second << 4 & mask)
        selected = (low & 0x07070707) | (other & 0x70707070)
        picked = [table >> 8 * (selected >> 4 * i & 7) & 255 for i in range(8)]
        for byte, piece in itertools.product(range(4), range(2)):
            sign = (second if piece else first) >> 8 * byte + (7 if high else 3) & 1
            bits = (picked[2 * byte + piece] | sign << 7).to(torch.uint8).view(torch.float8_e5m2)
            out[row, 64 * high + 32 * nth + 16 * piece + 4 * quad + byte] = bits.double() / 4096
    return out


@pytest.mark.parametrize(("least", "most"), [(228, 254), (227, 227)])
def test_threads_find_mxfp4_numbers_in_e5m2(least: int, most: int):
    """Of powers from 2**-25 to 2 exactly; of 2**-26 but for the code of 0.5."""
    codes = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    powers = torch.randint(least, most + 1, (16, 4), dtype=torch.uint8)
    plain = dequantise(DeviceCodes(Code.E2M1, 128, codes, powers, 32, has_whole_zeros=True), torch.float64)
    found = decode_by_threads(codes, powers.view(torch.int32).flatten().long() & 0xFFFFFFFF)
    if least == 227:
        plain[plain.abs() == 2.0**-27] = 0
    assert torch.equal(found, plain)


def draw_heavy(x: torch.Tensor) -> torch.Tensor:
    """The same shape from Student's t with three degrees of freedom."""
    return torch.distributions.StudentT(3.0).sample(x.shape).to(x)


@pytest.mark.parametrize("is_heavy", [False, True])
def test_rounding_costs_some_percent(is_heavy: bool):
    """Of a layer's output, beside exact activations: e4m3 has three bits behind the point, 2.6 % of a number on the
    average, and both products' inputs are rounded."""
    torch.manual_seed(0)
    x, ids, weights, *stacks = draw_step(24, 4, 2, 512, 256, "cpu")
    x = draw_heavy(x) if is_heavy else x
    plain = [(codes, bias.float()) for codes, bias in stacks]
    exact = reference.coded_experts(x.float(), ids, weights, *plain, Gate("silu"))
    out = reference.rounded_experts(x, ids, weights, *stacks, Gate("silu"))
    assert 1e-2 < relative_error(out, exact.double()) < 6e-2


TILES = [*rounded.TILES, sorted_rows.Tile(48, 4, is_fp8=True)]


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("counts", "inputs", "outputs"),
    [
        ((0, 1, 33, 192, 300), 2880, 2880), ((192, 0, 193, 224, 225), 4096, 2048), ((300, 33, 1, 0, 129), 2048, 288),
        ((96, 97, 128, 1, 0), 288, 512), ((0, 0, 0, 0, 0), 128, 64), ((5, 40, 0, 16, 500), 400, 136),
    ],
)
def test_products(counts: tuple[int, ...], inputs: int, outputs: int, tile: sorted_rows.Tile):
    """Beside float64 of the same rounded rows; sums of tensor cores keep some 14 bits. Twice the same."""
    torch.manual_seed(0)
    given = torch.tensor(counts, device="cuda")
    experts = torch.arange(NUM_EXPERTS, device="cuda").repeat_interleave(given)
    ends, there = given.cumsum(0).int(), len(experts)
    x = torch.randn(there + 1, inputs, device="cuda").bfloat16()
    rows = rounded.round_rows(x, ends, pdl=False)
    plain_rows = quantise_rows(x[:there]).decode(torch.float64)
    for gated, has_bias in ((NOT_GATED, True), (NOT_GATED, False), (CLAMPED, True)):
        own = outputs * (2 if gated.kind else 1)
        weight = make_codes(NUM_EXPERTS * own, inputs, "cuda")
        bias = torch.randn(NUM_EXPERTS, own, device="cuda").bfloat16() if has_bias else None
        plain = dequantise(weight, torch.float64).unflatten(0, (NUM_EXPERTS, -1))
        expected = torch.cat([plain_rows[experts == e] @ plain[e].T for e in range(NUM_EXPERTS)])
        if bias is not None:
            expected += bias.double()[experts]
        out = sorted_rows.multiply(rows, weight, bias, ends, tile, gated)
        assert not there or relative_error(out[:there], activate(expected, gated)) < 6e-3
        assert torch.equal(out[:there], sorted_rows.multiply(rows, weight, bias, ends, tile, gated)[:there])


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "inner"),
    [(2048, 32, 4, 2880, 2880), (1500, 16, 6, 4096, 2048), (700, 8, 2, 512, 288), (40, 8, 2, 512, 288)],
)
def test_steps(num_tokens: int, num_experts: int, top_k: int, width: int, inner: int):
    """In a captured chain of two layers with dependent launch; half of the choices are of other ranks. Steps of few
    pairs are not rounded."""
    torch.manual_seed(num_tokens)
    step, gate = draw_step(num_tokens, num_experts, top_k, width, inner, "cuda"), Gate("clamped", 7.0, 1.702, 1.0)
    rounded.run_experts(*step, gate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = rounded.run_experts(*step, gate)
        second = rounded.run_experts(first, *step[1:], gate)
    for _ in range(3):
        graph.replay()
    is_rounded = num_tokens * top_k > rounded.LEAST_EACH * num_experts
    oracle = reference.rounded_experts if is_rounded else reference.coded_experts
    for given, out in ((step[0], first), (first, second)):
        assert relative_error(out, oracle(given, *step[1:], gate).double()) < 1e-2


def test_tiles_have_rows_for_nearly_every_expert():
    chosen = [rounded.choose_tile(tokens, top_k, x).rows for tokens, top_k, x in (
        (576, 4, 32), (800, 4, 32), (1024, 4, 32), (8192, 6, 256), (8192, 4, 32)
    )]
    assert chosen == [96, 128, 224, 224, 256]
    for tile in (*TILES, *(many._tile_of(rows) for rows in many.MXFP4_ROWS)):
        assert tile.rows % tile.box == 0 and tile.stages >= (5 if tile.is_fp8 else 3)
        row = 128 if tile.is_fp8 else 256
        assert tile.stages * (tile.rows * row + tile.groups * 4096 + 48) + 1024 <= MOST_BYTES


@pytest.mark.usefixtures("breaks_kernels")
def test_activations_are_exact_where_it_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise CudaSourceError("cuFuncSetAttribute: invalid argument")

    monkeypatch.setattr(sorted_rows, "find_kernel", fail)
    uncached = rounded._can_compile.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(rounded, "_can_compile", cache_compiled(uncached))
    monkeypatch.setattr(coded_few, "run_experts", lambda x, *_: x)
    step = draw_step(130, 2, 2, 128, 64, "cpu")
    for _ in range(2):
        assert rounded.run_experts(*step, Gate("silu")) is step[0]
    assert caplog.text.count("invalid argument") == 1


def test_few_pairs_are_left_to_others(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr(rounded, "run_many", lambda x, *_: taken.append(len(x)) or x)
    monkeypatch.setattr(coded_few, "run_experts", lambda x, *_: x)
    for num_tokens in (1, 60, 128, 129, 500):  # two choices of four experts
        rounded.run_experts(*draw_step(num_tokens, 4, 2, 128, 64, "cpu"), Gate("silu"))
    assert taken == [129, 500]
