"""Experts in MXFP4 times rows in two parts of e4m3: the parts themselves, products against float64, whole steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import DEVICES, relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.hopper import NOT_GATED, Gated
from headrace.kernels.coded_linear.reference import dequantise
from headrace.kernels.cuda_source import MOST_BYTES, CudaSourceError, cache_compiled
from headrace.kernels.launch import count_tiles
from headrace.kernels.moe import many, parts, reference
from headrace.kernels.rowwise import Gate

EVERY_TILE = [*parts.TILES, parts.Tile(16, 2, False)]
NUM_EXPERTS = 5
CLAMPED = Gated("clamped", 2.0, 1.702, 1.0)


@pytest.fixture
def _on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def make_codes(outputs: int, inputs: int, device: str) -> DeviceCodes:
    """Codes and scales of inputs that are not there are zeros."""
    blocks = -(-inputs // 128)
    codes = torch.randint(0, 256, (outputs, blocks, 64), dtype=torch.uint8, device=device)
    place, left = torch.arange(64, device=device), inputs - 128 * (blocks - 1)
    codes[:, -1] &= (torch.where(place < left, 15, 0) + torch.where(place + 64 < left, 240, 0)).to(torch.uint8)
    powers = torch.randint(238, 250, (outputs, blocks * 4), dtype=torch.uint8, device=device)
    powers[:, -(-inputs // 32) :] = 0
    return DeviceCodes(Code.E2M1, inputs, codes.flatten(1), powers, 32, has_whole_zeros=True)


def add_parts(rows: parts.Parts) -> torch.Tensor:
    """Rows [M, K] in float64."""
    return rows.codes.double().sum(0) * rows.scales.double()[:, None]


@pytest.mark.parametrize("device,dtype,_", DEVICES)
@pytest.mark.parametrize("width", [48, 1104])
def test_parts_add_up_to_rows(width: int, device: str, dtype: torch.dtype, _: float):
    """Of numbers of 8 bits exactly, but for the smallest; in the order of pairs, or as they are."""
    torch.manual_seed(width)
    x = torch.randn(5, width).bfloat16()
    x[0, 0], x[1], x[2, :4], x[4] = 448.0, 0.0, torch.tensor([450.0, -1e-3, 1e-6, 2.0]), x[4] * 2.0**-10
    x = x.to(device, dtype)
    ids = torch.tensor([[1, 0], [2, -1], [-1, -1], [0, 2], [2, 1]], device=device)
    order, _place, ends = reference.group_pairs(ids, 3)
    for gathers in (True, False):
        if gathers:
            rows = parts.take_apart(x, ends, order, 2, pdl=False)
        else:
            rows = parts.take_apart(x, torch.tensor([1, 4], dtype=torch.int32, device=device), pdl=False)
        given = (x[order[: int(ends[-1])].long() // 2] if gathers else x[:4]).double()
        there = parts.Parts(rows.codes[:, : len(given)], rows.scales[: len(given)])
        assert rows.codes.dtype == torch.float8_e4m3fn and rows.codes.shape == (2, 10 if gathers else 5, width)
        error, largest = (add_parts(there) - given).abs(), given.abs().amax(1, keepdim=True)
        assert (error <= largest * 2.0 ** (-17 if device == "cuda" else -16)).all(), "Triton's interpreter truncates"
        assert (error[given.abs() >= largest * 2.0**-9] == 0).all()
        mantissa, _exponent = torch.frexp(there.scales)
        assert (mantissa == 0.5).all() and (largest[:, 0] <= 448 * there.scales.double()).all()


def activate(product: torch.Tensor, gated: Gated) -> torch.Tensor:
    if not gated.kind:
        return product
    first, second = product.chunk(2, dim=1)
    first, second = first.clamp(max=gated.limit), second.clamp(-gated.limit, gated.limit)
    return first * (gated.alpha * first).sigmoid() * (second + gated.up_offset)


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("tile", EVERY_TILE)
@pytest.mark.parametrize(
    ("counts", "inputs", "outputs"),
    [
        ((3, 0, 8, 9, 1), 400, 136), ((0, 0, 0, 0, 101), 128, 72), ((0, 1, 16, 0, 17), 2880, 720),
        ((31, 0, 33, 48, 49), 2880, 720), ((65, 15, 0, 130, 64), 1024, 512), ((0, 0, 0, 0, 0), 64, 64),
        ((1, 1, 1, 1, 1), 4096, 2048),
    ],
)
def test_products(counts: tuple[int, ...], inputs: int, outputs: int, tile: parts.Tile):
    """As many rows as a tile has, one more, and none; a row of the last expert is not there. Twice the same."""
    torch.manual_seed(0)
    given = torch.tensor(counts, device="cuda")
    experts = torch.arange(NUM_EXPERTS, device="cuda").repeat_interleave(given)
    ends, there = given.cumsum(0).int(), len(experts)
    x = torch.randn(there + 1, inputs, device="cuda").bfloat16()
    for gated, has_bias in ((NOT_GATED, True), (NOT_GATED, False), (CLAMPED, True)):
        own = outputs * (2 if gated.kind else 1)
        weight = make_codes(NUM_EXPERTS * own, inputs, "cuda")
        bias = torch.randn(NUM_EXPERTS, own, device="cuda").bfloat16() if has_bias else None
        plain = dequantise(weight, torch.float64).unflatten(0, (NUM_EXPERTS, -1))
        expected = torch.cat([x[:there][experts == e].double() @ plain[e].T for e in range(NUM_EXPERTS)])
        if bias is not None:
            expected += bias.double()[experts]
        expected = activate(expected, gated)
        taken = parts.take_apart(x, ends, pdl=False)
        out = parts.multiply(taken, weight, bias, ends, tile, gated)
        assert not there or relative_error(out[:there], expected) < 4e-3
        again = parts.multiply(taken, weight, bias, ends, tile, gated)
        assert torch.equal(out[:there], again[:there])


def draw_step(
    num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, device: str
) -> tuple[Any, ...]:
    """What `CODED_EXPERTS` takes, but for the activation: choices among twice as many experts, others have -1."""
    ids = torch.stack([torch.randperm(2 * num_experts, device=device)[:top_k] for _ in range(num_tokens)])
    ids = torch.where(ids < num_experts, ids, -1)
    gate_up, down = (make_codes(num_experts * o, i, device) for o, i in ((2 * inner, width), (width, inner)))
    for codes in (gate_up, down):  # numbers about 1 / sqrt(inputs)
        codes.scales.copy_(torch.where(codes.scales > 0, codes.scales // 4 + 186, 0))
    biases = [torch.randn(num_experts, n, device=device).bfloat16() for n in (2 * inner, width)]
    x, weights = torch.randn(num_tokens, width, device=device).bfloat16(), torch.rand(ids.shape, device=device)
    return x, ids, weights, (gate_up, biases[0]), (down, biases[1])


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "inner"),
    [
        *((tokens, 32, 4, 2880, 2880) for tokens in (5, 64, 128, 170)),
        *((tokens, 128, 6, 1024, 512) for tokens in (5, 64, 300)),
        (5, NUM_EXPERTS, 2, 128, 64), (24, NUM_EXPERTS, 2, 128, 64),
    ],
)
def test_steps(num_tokens: int, num_experts: int, top_k: int, width: int, inner: int):
    """In a captured chain of two layers with dependent launch, beside plain experts in float64; experts without rows,
    and choices of other ranks."""
    torch.manual_seed(num_tokens)
    step = draw_step(num_tokens, num_experts, top_k, width, inner, "cuda")
    gate, x = Gate("clamped", 7.0, 1.702, 1.0), step[0]
    plain = [
        (dequantise(codes, torch.float64).unflatten(0, (num_experts, -1)), bias.double()) for codes, bias in step[3:]
    ]
    own = parts.run_experts(*step, gate)
    assert own is not None, "these products take it"
    many.run_experts_pdl(*step, gate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = many.run_experts_pdl(*step, gate)
        second = many.run_experts_pdl(first, *step[1:], gate)
    for _ in range(3):
        graph.replay()
    assert torch.equal(first, own)
    for given, out in ((x, first), (first, second)):
        expected = reference.run_experts(given.double(), *step[1:3], *plain, gate)
        assert relative_error(out, expected) < 1e-2


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("tile", EVERY_TILE)
def test_all_tokens_choose_one_expert(tile: parts.Tile):
    torch.manual_seed(1)
    x, ids, weights, *stacks = draw_step(70, NUM_EXPERTS, 1, 512, 256, "cuda")
    ids = torch.full_like(ids, 3)
    plain = [
        (dequantise(codes, torch.float64).unflatten(0, (NUM_EXPERTS, -1)), bias.double()) for codes, bias in stacks
    ]
    out = parts.run_experts(x, ids, weights, *stacks, Gate("silu"), tile=tile)
    assert out is not None
    assert relative_error(out, reference.run_experts(x.double(), ids, weights, *plain, Gate("silu"))) < 1e-2
    ids = torch.full_like(ids, -1)
    none = parts.run_experts(x, ids, weights, *stacks, Gate("silu"), tile=tile)
    assert none is not None and not none.any()


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("tile", EVERY_TILE)
def test_a_row_does_not_depend_on_those_beside_it(tile: parts.Tile):
    torch.manual_seed(2)
    weight = make_codes(NUM_EXPERTS * 256, 384, "cuda")
    x = torch.randn(60, 384, device="cuda").bfloat16()
    whole, few = (torch.tensor([0, last, last, last, last], dtype=torch.int32, device="cuda") for last in (60, 5))
    expected = parts.multiply(parts.take_apart(x, whole, pdl=False), weight, None, whole, tile)
    out = parts.multiply(parts.take_apart(x[:5], few, pdl=False), weight, None, few, tile)
    assert torch.equal(out, expected[:5])


def test_tiles_have_rows_for_nearly_every_expert():
    chosen = {
        (tokens, experts): parts.choose_tile(tokens, top_k, experts)
        for tokens, top_k, experts in (
            (8, 4, 32), (32, 4, 32), (64, 4, 32), (128, 4, 32), (250, 4, 32), (400, 4, 32), (64, 6, 256), (64, 6, 128)
        )
    }
    assert [tile and tile.rows for tile in chosen.values()] == [8, 8, 16, 32, None, None, 8, 8]
    assert parts.choose_tile(8192, 8, 8192) is None, "more tiles than a launch has room for"
    for tile in EVERY_TILE:
        stage = tile.rows * 256 + tile.groups * 4096
        assert tile.stages >= 8 and tile.stages * (stage + 16) + 1024 + 8 * (parts.MOST_TILES + 1) <= MOST_BYTES


def test_a_launch_has_room_for_all_tiles():
    """Of any sorting."""
    torch.manual_seed(0)
    for _ in range(100):
        ids = torch.randint(0, 12, (40,))
        tiles = sum(-(-count // 8) for count in torch.bincount(ids).tolist())
        assert tiles <= count_tiles(40, 8, 12)


def test_takes_mxfp4_in_steps_of_16_inputs():
    codes = make_codes(256, 192, "cpu")
    assert parts.takes(codes, codes) and not parts.takes(codes, replace(codes, in_features=184))
    fp8 = DeviceCodes(
        Code.E4M3, 192, torch.zeros(256, 192).to(torch.float8_e4m3fn), torch.ones(256, 1), 192
    )
    assert not parts.takes(fp8, codes)


@pytest.mark.usefixtures("breaks_kernels")
def test_other_products_run_where_it_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise CudaSourceError("cuFuncSetAttribute: invalid argument")

    monkeypatch.setattr(parts, "find_kernel", fail)
    uncached = parts._can_compile.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(parts, "_can_compile", cache_compiled(uncached))
    monkeypatch.setattr(many.hopper, "run_experts_pdl", lambda x, *_: x)
    step = draw_step(6, 4, 2, 128, 64, "cpu")
    for _ in range(2):
        assert many.run_experts_pdl(*step, Gate("silu")) is step[0]
    assert caplog.text.count("invalid argument") == 1


def test_few_tokens_are_left_to_others(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr(parts, "run_experts", lambda x, *_: taken.append(len(x)) or x)
    monkeypatch.setattr(many.hopper, "run_experts_pdl", lambda x, *_: x)
    for num_tokens in (1, 4, 5, 60):
        many.run_experts_pdl(*draw_step(num_tokens, 4, 2, 128, 64, "cpu"), Gate("silu"))
    assert taken == [5, 60]
