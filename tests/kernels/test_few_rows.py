"""Experts in MXFP4 with few rows each: how threads find numbers and inputs, which forms and steps there are, and values
on a GPU against float64 of the dequantised matrices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.coded_linear.codes import TABLES, Code
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.kernels.coded_linear.reference import dequantise
from headrace.kernels.cuda_source import MOST_BYTES, CudaSourceError, cache_compiled
from headrace.kernels.launch import ceil_div
from headrace.kernels.moe import CODED_EXPERTS, Gate, Stacked, coded_few, few_rows, reference

SILU, CLAMPED = Gate("silu"), Gate("clamped", 7.0, 1.702, 1.0)


def draw(outputs: int, inputs: int, device: str) -> DeviceCodes:
    """Any codes, and powers of two around 2**-6."""
    units = ceil_div(inputs, BLOCK)
    codes = torch.randint(0, 256, (outputs, units * HALF), dtype=torch.uint8, device=device)
    scales = torch.randint(246, 250, (outputs, units * 4), dtype=torch.uint8, device=device)
    return DeviceCodes(Code.E2M1, inputs, codes, scales, 32, values=torch.tensor(TABLES[Code.E2M1], device=device))


def to_bfloat16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).double()


def multiply_by_threads(codes: DeviceCodes, x: torch.Tensor) -> torch.Tensor:
    """The product of a row x [I] with all rows, [O], as threads hold both operands: the arithmetic of the kernel."""
    units = ceil_div(codes.in_features, BLOCK)
    lifted = torch.zeros(units * BLOCK, dtype=torch.float64)
    lifted[: len(x)] = x.double() * 2.0**64
    words, total = codes.codes.view(torch.int32).long(), torch.zeros(codes.out_features, dtype=torch.float64)
    tables = codes.scales.view(torch.int32).long()
    for unit, part, half, plane, j in itertools.product(range(units), range(4), *[range(2)] * 3):
        word = words[:, unit * 16 + half * 8 + part * 2 + j]
        at = unit * BLOCK + (2 * plane + half) * 32 + part * 8 + 4 * j  # of 8 inputs in a row
        group = plane * 2 + half
        table = tables[:, unit]
        power = ((table >> 1 if group == 3 else table << (23 - 8 * group)) & 0x7F800000).to(torch.int32)
        for odd, end in itertools.product(range(2), range(2)):  # the operands' second register; halves of one
            spread = word >> 8 * odd
            bits = ((spread & 0x00F000F0) * 0x0104 if plane else (spread & 0x000F000F) * 0x1040) & 0x81C081C0
            number = to_bfloat16(bits >> 16 * end & 0xFFFF)
            total += number * power.view(torch.float32).double() * lifted[at + 2 * end + odd]
    return total * 2.0**-64


@pytest.mark.parametrize("inputs", [256, 352])
def test_threads_hold_the_same_inputs_of_both_operands(inputs: int):
    torch.manual_seed(0)
    weight = pack_for_device(quantise_fp4(torch.randn(16, inputs) * torch.logspace(-3, 0, inputs)))
    assert weight is not None and few_rows.takes(weight) and len(weight.scales.unique()) > 8
    x = torch.randn(inputs).bfloat16()
    assert torch.allclose(
        multiply_by_threads(weight, x), dequantise(weight, torch.float64) @ x.double(), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    ("inputs", "warps", "units", "is_whole", "tiles"),
    [(4096, 16, 2, True, 1), (2048, 16, 1, True, 2), (2880, 12, 2, False, 1), (7168, 16, 4, False, 1),
     (1032, 8, 2, False, 1)],
)
def test_warps_share_the_inputs_of_a_weight(inputs: int, warps: int, units: int, is_whole: bool, tiles: int):
    form, all_units = few_rows.choose_form(inputs, "silu", 256), ceil_div(inputs, BLOCK)
    assert form == few_rows.Form("silu", warps, units, is_whole, tiles, 256)
    shares = [all_units * (warp + 1) // warps - all_units * warp // warps for warp in range(warps)]
    assert max(shares) == units and (min(shares) == units) == is_whole
    stages, shared_bytes = form.plan_ring(all_units)
    assert 2 <= stages <= few_rows.MOST_STAGES and shared_bytes <= MOST_BYTES


def test_sizes_and_codes_that_are_not_taken():
    forms = {inputs: few_rows.choose_form(inputs, "", 8) for inputs in (896, 904, 8192, 8200)}
    assert [inputs for inputs, form in forms.items() if form is None] == [896, 8200]
    plain = torch.randn(16, 256)
    matrices = quantise_fp4(plain), quantise_float(plain), quantise_integer(plain, 4, 32)
    packed = [pack_for_device(matrix) for matrix in matrices]
    assert [codes is not None and few_rows.takes(codes) for codes in packed] == [True, False, False]
    assert not few_rows.takes(replace(draw(16, 256, "cpu"), in_features=252)), "rows of x in steps of 16 bytes"


@pytest.mark.parametrize(
    ("shape", "is_faster"),
    [((8, 4, 32), True), ((16, 4, 32), True), ((17, 4, 32), False), ((64, 6, 256), True), ((32, 6, 128), True),
     ((64, 6, 128), False), ((few_rows.LEAST_TOKENS, 2, 64), True), ((few_rows.LEAST_TOKENS - 1, 2, 64), False)],
)
def test_steps_with_few_rows_of_each_expert(
    shape: tuple[int, int, int], is_faster: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of tokens, choices and experts; others are passed on as before."""
    num_tokens, top_k, num_experts = shape
    calls: list[str] = []

    def run(name: str) -> Any:
        return lambda x, *_: calls.append(name) or x

    monkeypatch.setattr(coded_few, "_find_capability", lambda _: (9, 0))
    monkeypatch.setattr(few_rows, "run_experts", run("few rows"))
    monkeypatch.setattr(coded_few, "plan", lambda *_: None)
    monkeypatch.setitem(CODED_EXPERTS._loaded, "gluon_pdl", run("others"))
    gate_up, down = draw(num_experts * 16, 16, "cpu"), draw(num_experts * 16, 8, "cpu")
    x, ids = torch.zeros(num_tokens, 16).bfloat16(), torch.zeros(num_tokens, top_k, dtype=torch.int64)
    coded_few.run_experts(x, ids, torch.ones(num_tokens, top_k), (gate_up, None), (down, None), SILU)
    assert calls == ["few rows" if is_faster else "others"]


def test_few_rows_run_as_before_where_own_cuda_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise CudaSourceError("no kernel image")

    monkeypatch.setattr(coded_few, "_find_capability", lambda _: (9, 0))
    monkeypatch.setattr(few_rows, "find_kernel", fail)
    uncached = few_rows._can_compile.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(few_rows, "_can_compile", cache_compiled(uncached))
    monkeypatch.setitem(CODED_EXPERTS._loaded, "gluon_pdl", lambda x, *_: x)
    gate_up, down = draw(8 * 2048, 1024, "cpu"), draw(8 * 1024, 1024, "cpu")
    x, ids = torch.zeros(6, 1024).bfloat16(), torch.zeros(6, 2, dtype=torch.int64)
    for _ in range(2):
        assert coded_few.run_experts(x, ids, torch.ones(6, 2), (gate_up, None), (down, None), SILU) is x
    assert caplog.text.count("no kernel image") == 1


def choose(kind: str, num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """``random``; ``part``: half of all experts are another rank's; ``none``; ``uneven``: one has all tokens, one none,
    one nearly all, and every fifth token has no expert."""
    if kind == "none":
        return torch.full((num_tokens, top_k), -1, device="cuda")
    score = torch.rand(num_tokens, num_experts * (2 if kind == "part" else 1), device="cuda")
    if kind == "uneven":
        score[:, 0], score[:, 1] = 9, -9
        score[1:, 2] = 8
    ids = score.topk(top_k).indices
    if kind == "uneven":
        ids[4::5] = -1
    return torch.where(ids < num_experts, ids, -1)


def multiply_plainly(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: tuple[DeviceCodes, Any],
    down: tuple[DeviceCodes, Any], gate: Gate
) -> torch.Tensor:
    """In float64, an expert at a time: all of them at once would not fit."""
    width, inner, out = x.shape[1], down[0].in_features, torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        rows, choice = torch.where(ids == expert)
        stacks: list[Stacked] = []
        for (codes, bias), outputs in ((gate_up, 2 * inner), (down, width)):
            at = slice(expert * outputs, (expert + 1) * outputs)
            one = replace(codes, codes=codes.codes[at], scales=codes.scales[at])
            plain = dequantise(one, torch.float32).double()[None]
            stacks.append((plain, None if bias is None else bias[expert][None].double()))
        zeros = torch.zeros(len(rows), 1, dtype=torch.int64, device=x.device)
        first, second = stacks
        own = reference.run_experts(x[rows].double(), zeros, weights[rows, choice, None], first, second, gate)
        out.index_add_(0, rows, own)
    return out


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "inner", "gate", "has_bias", "num_tokens", "kind"),
    [
        (64, 6, 4096, 2048, Gate("clamped", 10.0, 1.0, 0.0), False, 20, "random"),
        (32, 6, 4096, 2048, SILU, False, 64, "part"),
        (32, 4, 2880, 2880, CLAMPED, True, 8, "random"),
        (32, 4, 2880, 2880, CLAMPED, True, 64, "random"),
        (8, 4, 2880, 2880, CLAMPED, True, 29, "uneven"),
        (12, 6, 4096, 2048, SILU, False, 29, "uneven"),
        (16, 4, 2880, 2880, Gate("gelu_tanh"), True, 1, "random"),
        (16, 4, 2880, 2880, SILU, True, 3, "none"),
        (10, 2, 1032, 1096, SILU, True, 30, "random"),
        (4, 2, 7168, 2048, SILU, False, 9, "random"),
    ],
)
def test_experts_with_few_rows(
    num_experts: int, top_k: int, width: int, inner: int, gate: Gate, has_bias: bool, num_tokens: int, kind: str
):
    """More rows than eight of an expert, too; twice the same bits, also of a captured graph with other choices."""
    torch.manual_seed(1)
    gate_up, down = draw(num_experts * 2 * inner, width, "cuda"), draw(num_experts * width, inner, "cuda")
    biases = [
        torch.randn(num_experts, outputs, device="cuda").bfloat16() if has_bias else None
        for outputs in (2 * inner, width)
    ]
    x, weights = torch.randn(num_tokens, width, device="cuda").bfloat16(), torch.rand(num_tokens, top_k, device="cuda")
    ids = choose(kind, num_tokens, num_experts, top_k)
    step = (x, ids, weights, (gate_up, biases[0]), (down, biases[1]), gate)
    graph, captured = torch.cuda.CUDAGraph(), few_rows.run_experts(*step)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = few_rows.run_experts(*step)
    assert captured is not None
    for _ in range(2):
        out, expected = few_rows.run_experts(*step), multiply_plainly(*step)
        assert out is not None and torch.equal(out, few_rows.run_experts(*step))
        assert float((out.double() - expected).norm()) <= 4e-3 * float(expected.norm())
        graph.replay()
        assert torch.equal(out, captured)
        ids.copy_(choose(kind, num_tokens, num_experts, top_k))
