"""Products with coded weights against float64: every code, odd sizes, groups smaller and larger than tiles, zeros,
activation order, strided rows, biases and splits."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES, check_rows, in_turns, relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear import (
    CODED_GATED,
    CODED_LINEAR,
    CODED_NORM_LINEAR,
    MOST_CUDA_INPUTS,
    QUANTISE_ROWS,
    choice,
    expand,
    fp8_triton,
    reference,
    scaled,
    triton,
)
from headrace.kernels.coded_linear.choice import PLAIN, ROWS, CodedChoice, Plan, Times, describe_codes, make_plan
from headrace.kernels.coded_linear.codes import TABLES, Code, CodedMatrix
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.linear import Norm
from headrace.kernels.linear.reference import gated_linear, norm_linear
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.reference import clamped_swiglu
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMlp
from headrace.layers.norm import RmsNorm
from headrace.layers.residual import Residual
from headrace.layers.spec import MlpSpec, SwigluClamp

KINDS: dict[str, dict[str, Any]] = {
    "int4-32": {"bits": 4, "group": 32, "zeros": True}, "int4-128": {"bits": 4, "group": 128},
    "int4-order": {"bits": 4, "group": 64, "zeros": True, "order": True}, "int4-channel": {"bits": 4, "group": 0},
    "int8-64": {"bits": 8, "group": 64, "zeros": True}, "int8-channel": {"bits": 8, "group": 0, "signed": True},
    "int4-halves": {"bits": 4, "group": 32, "zeros": True, "step": 1 / 64},
    "int4-words": {"bits": 4, "group": 128, "zeros": True, "step": 1 / 64, "shift": 0.25},
    "int8-words": {"bits": 8, "group": 32, "zeros": True, "step": 1 / 64},
    "mxfp4": {"code": Code.E2M1, "group": 32, "powers": True},
    "mxfp4-128": {"code": Code.E2M1, "group": 128, "powers": True},
    "e2m1": {"code": Code.E2M1, "group": 32}, "nvfp4": {"code": Code.E2M1, "group": 16},
    "nf4": {"code": Code.NF4, "group": 64}, "fp8-channel": {"code": Code.E4M3, "group": 0},
    "fp8-block": {"code": Code.E4M3, "group": 128, "rows": 128},
    "fp8-tensor": {"code": Code.E4M3, "group": 0, "rows": 0},
    "fp8-cut-block": {"code": Code.E4M3, "group": 64, "rows": 1},
}
SHAPES = [(1, 8, 96), (3, 9, 700), (16, 70, 640)]


def make(kind: str, outputs: int, inputs: int, device: str = "cpu") -> tuple[DeviceCodes, torch.Tensor]:
    """A weight of a kind and its float64 value, from a matrix of random codes."""
    own = KINDS[kind]
    rng = torch.Generator().manual_seed(outputs * inputs)
    code, bits, group, rows = own.get("code", Code.INT), own.get("bits", 4), own["group"] or inputs, own.get("rows", 1)
    rows = rows or outputs
    if code is Code.E4M3:
        codes = (torch.randn(outputs, inputs, generator=rng) * 60).to(torch.float8_e4m3fn)
        values, bits = codes.double(), 8
    else:
        codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=rng).to(torch.uint8)
        values = torch.tensor(TABLES[code]).double()[codes.int()] if code in TABLES else codes.double()
    if own.get("signed"):
        codes = codes.view(torch.int8)
        values = codes.double()
    tables = -(-outputs // rows), -(-inputs // group)
    scales = (torch.rand(tables, generator=rng) + 0.5) / 16
    if own.get("powers"):
        scales = 2.0 ** torch.randint(-20, 2, tables, generator=rng)
    if own.get("step"):  # which float16 holds
        scales = (scales / own["step"]).ceil() * own["step"]
    zeros = torch.randint(0, 1 << bits, tables, generator=rng) + own.get("shift", 0) if own.get("zeros") else None
    ids = torch.arange(inputs) // group
    if own.get("order"):
        ids = ids[torch.randperm(inputs, generator=rng)]
    matrix = CodedMatrix(code, codes, scales, group, zeros, rows, ids if own.get("order") else None, bits)
    by_row = torch.arange(outputs) // rows
    expected = values if zeros is None else values - zeros.double()[by_row][:, ids]
    packed = pack_for_device(CodedMatrix(
        code, codes.to(device), scales.to(device), group, None if zeros is None else zeros.to(device), rows,
        ids.to(device) if own.get("order") else None, bits
    ))
    assert packed is not None and matrix.dequantise(torch.float32).shape == expected.shape
    return packed, expected * scales.double()[by_row][:, ids]


def draw(rows: int, inputs: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """With rows that are not next to one another."""
    rng = torch.Generator().manual_seed(rows + inputs)
    return torch.randn(rows, inputs + 8, generator=rng).to(device, dtype)[:, :inputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_keeps_every_number(kind: str):
    for outputs, inputs in ((40, 96), (33, 700)):
        packed, expected = make(kind, outputs, inputs)
        assert relative_error(reference.dequantise(packed, torch.float32), expected) < 1e-6
        short = KINDS[kind].get("bits", 4) == 4 and KINDS[kind].get("code") is not Code.E4M3
        assert packed.codes.nbytes == outputs * (-(-inputs // 128) * 64 if short else inputs)


def test_tables_are_kept_in_words():
    """Of powers of two a byte, of scales and zero points that float16 holds two halves."""
    kinds = {name: make(name, 40, 352)[0] for name in ("mxfp4", "mxfp4-128", "int4-words", "int4-32", "e2m1")}
    forms = {name: (weight.scales.dtype, tuple(weight.scales.shape)) for name, weight in kinds.items()}
    assert forms["mxfp4"] == forms["mxfp4-128"] == (torch.uint8, (40, 12))
    assert forms["int4-words"] == (torch.int32, (40, 3)) and forms["int4-32"] == (torch.float32, (40, 11))
    assert forms["e2m1"] == (torch.float32, (40, 11)) and kinds["int4-words"].zeros is None
    assert not kinds["int4-words"].has_whole_zeros and kinds["int4-32"].has_whole_zeros


@pytest.mark.parametrize("kind,device,dtype,tolerance", in_turns(KINDS))
def test_whole_weights(kind: str, device: str, dtype: torch.dtype, tolerance: float):
    for outputs, inputs in ((40, 96), (33, 700), (150, 1300)):
        weight, plain = make(kind, outputs, inputs, device)
        assert relative_error(expand.expand(weight, dtype), plain) < tolerance


@pytest.mark.parametrize("shape,device,dtype,tolerance", in_turns(SHAPES))
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows(kind: str, shape: tuple[int, int, int], device: str, dtype: torch.dtype, tolerance: float):
    rows, outputs, inputs = shape
    weight, plain = make(kind, outputs, inputs, device)
    x = draw(rows, inputs, device, dtype)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected = x.double() @ plain.to(device).T
    for own, splits in ((None, 1), (bias, 2)):
        wanted = expected if own is None else expected + own.double()
        if rows <= 3:
            assert relative_error(triton.gemv(x, weight, own), wanted) < tolerance
        assert relative_error(triton.skinny(x, weight, own, splits), wanted) < tolerance
        assert relative_error(reference.coded_linear(x, weight, own), wanted) < tolerance
    out, sums = triton.skinny(x, weight, None), triton.skinny_sums(x, weight)
    assert torch.equal(out, triton.skinny(x, weight, None))
    assert torch.equal(sums if sums.dim() == 2 else sums.sum(0).to(dtype), out)


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("shape", [(1, 96), (5, 700), (3, 1300)])
def test_rows_are_rounded_to_fp8_as_the_reference_does(
    shape: tuple[int, int], group: int, device: str, dtype: torch.dtype, tolerance: float
):
    x = draw(*shape, device, dtype)
    x[0, : shape[1] // 2] = 0
    rows = fp8_triton.quantise_rows(x, group)
    check_rows(rows, reference.quantise_rows(x, group), device)
    assert relative_error(reference.quantise_rows(x, group).decode(torch.float64), x.double()) < 0.04


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("shape", [(1, 96), (5, 700)])
def test_norms_and_activations_that_round_to_fp8(
    shape: tuple[int, int], group: int, device: str, dtype: torch.dtype, tolerance: float
):
    """As the norm or the activation, whose output is rounded then."""
    rows, width = shape
    stream, x = draw(rows, width, device, dtype), draw(rows, 2 * width, device, dtype)
    scale = draw(1, width, device, dtype)[0]
    for gate in (Gate("silu"), Gate("gelu_tanh"), Gate("clamped", 1.5, 1.7, 1.0)):
        check_rows(fp8_triton.gate_rows(x, gate, group), reference.gate_rows(x, gate, group), device, 1e-2)
    for pending in (None, x[:, :width], torch.stack((x[:, :width], x[:, width:])).float()):
        ours, theirs = (
            norm(pending, stream.clone(), scale, 1e-6, 1.0, group=group)
            for norm in (fp8_triton.norm_rows, reference.norm_rows)
        )
        check_rows(ours[0], theirs[0], device, 1e-2)
        assert relative_error(ours[1], theirs[1].double()) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("kind", ["fp8-block", "fp8-cut-block"])
@pytest.mark.parametrize("rows,outputs,inputs", [(1, 48, 128), (18, 144, 704), (65, 272, 256)])
def test_fp8_rows_with_block_scales(
    kind: str, rows: int, outputs: int, inputs: int, device: str, dtype: torch.dtype, tolerance: float
):
    """Against the product of the rounded rows, in float64."""
    weight, plain = make(kind, outputs, inputs, device)
    x = draw(rows, inputs, device, dtype)
    rounded = fp8_triton.quantise_rows(x, weight.group).decode(torch.float64)
    out = scaled.linear_blocks(x, weight, None)
    assert relative_error(out, rounded @ plain.to(device).T) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-tensor"])
@pytest.mark.parametrize("rows,outputs,inputs", [(1, 48, 128), (18, 144, 704), (300, 272, 256)])
def test_fp8_rows_with_scales_of_outputs(kind: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype):
    weight, plain = make(kind, outputs, inputs, "cuda")
    x = draw(rows, inputs, "cuda", dtype)
    expected = reference.quantise_rows(x).decode(torch.float64) @ plain.to("cuda").T
    assert relative_error(scaled.linear_rows(x, weight, None), expected) < 1e-2


def test_solutions_state_what_they_take():
    def reasons(**shape: int) -> dict[str, str | None]:
        query = KernelQuery("cuda", "bfloat16", (9, 0), {"in_features": 256, "out_features": 256, **shape})
        return {name: CODED_LINEAR.reason_against(name, query) for name in CODED_LINEAR.names()}

    fp8 = {"bits": 8, "is_float": 1}
    able = [name for name, reason in reasons(**fp8, group=256, num_rows=1).items() if reason is None]
    own = ["cuda_fp8", "cuda", "triton_gemv_pdl", "triton_skinny_pdl"]
    assert able == [*own, "scaled_mm", "triton_expand", "reference"]
    assert reasons(**fp8, group=128, rows=128)["scaled_mm_blocks"] is None
    assert reasons(**fp8, group=128, num_rows=500)["triton_fp8_blocks"] is None
    assert "steps of 16" in reasons(**fp8, group=128, in_features=250)["triton_fp8_blocks"]
    short = reasons(bits=4, group=256)
    assert "8-bit floats" in short["scaled_mm"] and short["triton_gemv_pdl"] is None
    assert "multiples of 16" in reasons(bits=4, group=24)["triton_skinny_pdl"]
    assert "at most" in reasons(bits=4, group=32, num_rows=3)["triton_gemv_pdl"]
    assert reasons(bits=4, group=32, num_rows=8)["cuda"] is None and "8 rows" in reasons(bits=4, num_rows=9)["cuda"]
    assert "98304 inputs" in reasons(bits=8, group=64, num_rows=8, in_features=14336)["cuda"]
    assert "steps of 16" in reasons(bits=4, group=32, in_features=264)["cuda"]
    assert "multiples of 128" in reasons(bits=4, group=192)["cuda"] and "e2m1" in reasons(bits=4, looks_up=1)["cuda"]
    assert "of 32 inputs" in reasons(bits=4, group=16)["cuda"]
    old = KernelQuery("cuda", "bfloat16", (8, 0), {"is_float": 1, "group": 128, "in_features": 256})
    assert "8.9" in CODED_LINEAR.reason_against("triton_gemv", old) and QUANTISE_ROWS.reason_against("triton", old)


def times_of(*columns: dict[str, float]) -> Times:
    return dict(zip(ROWS, columns, strict=False))


def test_each_number_of_rows_gets_its_fastest_solution():
    plan = make_plan(times_of(
        {PLAIN: 4.0, "a": 1.0, "b": 2.0}, {PLAIN: 4.0, "a": 3.0, "b": 2.0}, {PLAIN: 4.0, "b": 2.0},
        {PLAIN: 4.0, "c": 8.0}
    ))
    assert [plan.find(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 10**6)] == ["a", "b", "b", "b", "c", "c", "c", "c"]
    assert plan.gain == pytest.approx((4 * 2 * 2 * 0.5) ** (1 / 4))


# microseconds by `ROWS` on an H200: of a matrix 28,672 x 4,096 in bfloat16, and in codes
PLAIN_US = (55, 56, 57, 58, 60, 64, 67, 72, 92, 145, 290, 1177)
CODED_US = {
    "int4 in groups of 128": ((23, 24, 26, 31, 75, 80, 105, 110, 130, 225, 370, 1260), 0.27, True),
    "q4_k": ((27, 29, 33, 42, 90, 110, 135, 142, 162, 215, 360, 1250), 0.31, True),
    "fp8 per channel": ((41, 42, 46, 44, 44, 32, 34, 55, 55, 90, 180, 690), 0.5, True),
    "4 bits at a third of the speed from 16 rows on": (
        (27, 29, 33, 42, *(3 * time for time in PLAIN_US[4:9]), 290, 435, 1250), 0.31, True
    ),
    "4 bits at a third of the speed everywhere": (tuple(3 * time for time in PLAIN_US), 0.31, False),
    "8 bits at 0.75": (tuple(time / 0.75 for time in PLAIN_US), 0.5, True),
    "8 bits at 0.65": (tuple(time / 0.65 for time in PLAIN_US), 0.5, False),
    "8 bits at 0.95 that save no memory": (tuple(time / 0.95 for time in PLAIN_US), 1.0, False),
}


@pytest.mark.parametrize("kind", CODED_US)
def test_codes_are_kept_unless_they_are_clearly_slower(kind: str):
    """A step of thousands of rows takes as long as a hundred of one row, and decides as little as its share."""
    coded, memory, is_kept = CODED_US[kind]
    times = times_of(*({PLAIN: plain, "a": own} for plain, own in zip(PLAIN_US, coded, strict=True)))
    assert make_plan(times, memory).keeps_codes == is_kept


def test_few_rows_weigh_most_and_prompts_least():
    shares = []
    for slow in (range(9), range(9, 65), range(65, 257), range(257, 4097)):
        plan = make_plan({rows: {PLAIN: 1.0, "a": 2.0 if rows in slow else 1.0} for rows in ROWS})
        shares.append(-math.log2(plan.gain))
    assert shares == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_rows_that_were_not_measured_plain_do_not_count():
    plan = make_plan({1: {PLAIN: 3.0, "a": 1.0}, 64: {"a": 9.0}})
    assert plan.gain == pytest.approx(3.0) and make_plan({1: {"a": 9.0}}).keeps_codes


class Clock:
    """Gives the plain weight and each solution a time of its own, and counts what it measured."""

    def __init__(self, plain: float):
        self.plain, self.calls = plain, 0

    def __call__(self, calls: list[Any]) -> float:
        self.calls += 1
        calls[0]()
        return self.plain if calls[0].func is torch.nn.functional.linear else 1.0


def test_copies_that_do_not_all_fit_leave_their_memory_to_what_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kept: list[torch.Tensor] = []

    def copy(weight: torch.Tensor, most: int) -> torch.Tensor:
        if len(kept) == most:
            raise torch.OutOfMemoryError
        kept.append(weight)
        return weight

    weight = torch.zeros(4)
    assert len(choice._repeat(weight, 16, lambda own: copy(own, 99))) == choice.MOST_COPIES
    kept.clear()
    assert len(choice._repeat(weight, 16, lambda own: copy(own, 2))) == 1 and len(kept) == 2


def test_choices_are_measured_once_per_shape_and_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    weight, _ = make("int4-32", 40, 96)
    clock, path = Clock(plain=3.0), tmp_path / "choices.json"
    choice = CodedChoice(path, clock)
    plan = choice.choose(weight, torch.float32, (0, 0))
    assert plan is not None and plan.find(7) == "reference" and plan.gain == pytest.approx(3.0)
    assert choice.choose(weight, torch.float32, (0, 0)) == plan and clock.calls == 2 * len(ROWS)
    assert "40 x 96 in int, groups of 32: reference beyond; 3.00 times as fast" in caplog.text
    assert "on the average, 23% of its memory" in caplog.text
    choice.save()
    again = CodedChoice(path, clock)
    assert again.choose(weight, torch.float32, (0, 0)) == plan and clock.calls == 2 * len(ROWS)
    assert again.choose(make("int4-32", 41, 96)[0], torch.float32, (0, 0)) is not None
    assert clock.calls == 4 * len(ROWS)


def test_where_memory_is_short_codes_are_kept_and_measured_at_the_next_start(tmp_path: Path):
    weight, _ = make("int4-32", 40, 96)
    clock, path = Clock(plain=0.5), tmp_path / "choices.json"

    def fail(calls: list[Any]) -> float:
        raise torch.OutOfMemoryError

    choice = CodedChoice(path, fail)
    plan = choice.choose(weight, torch.float32, (0, 0))
    assert plan is not None and plan.find(1) == plan.find(5000) == "reference"
    choice.save()
    assert CodedChoice(path, clock).choose(weight, torch.float32, (0, 0)) is None and clock.calls


def test_shapes_are_compiled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once for all that `choose` measures later, and not again by it."""
    compiled: list[str] = []
    monkeypatch.setattr("headrace.kernels.coded_linear.choice.precompile", lambda run, about, _: compiled.append(about))
    weights, choice = [make("int4-32", rows, 96)[0] for rows in (40, 56)], CodedChoice(tmp_path / "c.json", Clock(3.0))
    choice.prepare(weights, torch.float32, (0, 0))
    assert len(compiled) == 1
    for weight in weights:
        choice.choose(weight, torch.float32, (0, 0))
    assert len(compiled) == 1
    choice.choose(make("int4-32", 72, 96)[0], torch.float32, (0, 0))
    assert len(compiled) == 2


def test_all_of_a_models_shapes_are_compiled_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once for each form that its weights turn out to have."""
    compiled: list[list[Any]] = []
    monkeypatch.setattr(choice, "_compile", lambda calls, *_, **__: compiled.append([own for own, _, _ in calls]))
    chooser = CodedChoice(tmp_path / "c.json", Clock(3.0))
    chooser.expect([(40, 96), (56, 96), (24, 160)])
    for kind in ("int4-halves", "fp8-channel", "mxfp4"):
        first = make(kind, 40, 96)[0]
        chooser.choose(first, torch.float32, (0, 0))
        assert {(weight.out_features, weight.in_features) for weight in compiled[-1]} == {(40, 96), (56, 96), (24, 160)}
        for outputs, inputs in ((56, 96), (24, 160)):
            weight = make(kind, outputs, inputs)[0]
            resized = next(own for own in compiled[-1] if own.in_features == inputs and own.out_features == outputs)
            assert resized.scales.shape == weight.scales.shape and resized.codes.shape == weight.codes.shape
            assert describe_codes(resized, torch.float32, (0, 0)) == describe_codes(weight, torch.float32, (0, 0))
            chooser.choose(weight, torch.float32, (0, 0))
    assert len(compiled) == 3


def test_shapes_that_memory_does_not_hold_together_are_measured_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[set[tuple[int, int]]] = []

    def note(calls: list[choice.Call], *_: object, **__: object) -> None:
        compiled.append({(weight.out_features, weight.in_features) for weight, _, _ in calls})

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for zeros")

    monkeypatch.setattr(choice, "_compile", note)
    monkeypatch.setattr(DeviceCodes, "resize", refuse)
    clock = Clock(plain=3.0)
    chooser = CodedChoice(tmp_path / "c.json", clock)
    chooser.expect([(40, 96), (56, 96)])
    for outputs in (40, 56):
        assert chooser.judge(make("int4-32", outputs, 96)[0], torch.float32, (0, 0)).gain > 1.0
    assert compiled == [{(40, 96)}, {(56, 96)}] and clock.calls == 2 * 2 * len(ROWS)


def test_scales_of_other_forms_are_measured_by_themselves(tmp_path: Path):
    """Kernels depend on these, and one that takes pairs may not take the others."""
    clock = Clock(plain=3.0)
    chooser = CodedChoice(tmp_path / "c.json", clock)
    for count, kind in enumerate(("int4-halves", "int4-32", "mxfp4", "e2m1"), start=1):
        chooser.choose(make(kind, 40, 96)[0], torch.float32, (0, 0))
        assert clock.calls == 2 * count * len(ROWS)


def test_a_choice_that_no_longer_runs_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Drivers and libraries change under a cached choice; the start goes on."""
    weight, path = make("int4-32", 40, 96)[0], tmp_path / "c.json"
    first = CodedChoice(path, Clock(3.0))
    first.choose(weight, torch.float32, (0, 0))
    first.save()
    clock, own = Clock(3.0), CODED_LINEAR.load("reference")
    failures = iter([RuntimeError("no such kernel")])

    def fail_once(*arguments: Any) -> torch.Tensor:
        for failure in failures:
            raise failure
        return own(*arguments)

    monkeypatch.setitem(CODED_LINEAR._loaded, "reference", fail_once)
    plan = CodedChoice(path, clock).choose(weight, torch.float32, (0, 0))
    assert plan is not None and plan.find(1) == "reference" and clock.calls == 2 * len(ROWS)


def test_a_choice_by_an_older_rule_is_made_again(tmp_path: Path):
    weight, path = make("int4-32", 40, 96)[0], tmp_path / "c.json"
    first = CodedChoice(path, Clock(3.0))
    first.choose(weight, torch.float32, (0, 0))
    first.save()
    (key,) = found = json.loads(path.read_text())
    del found[key]["memory"]
    path.write_text(json.dumps(found))
    clock = Clock(3.0)
    assert CodedChoice(path, clock).choose(weight, torch.float32, (0, 0)) is not None and clock.calls


def test_a_weight_that_is_slower_coded_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    weight, _ = make("int4-32", 40, 96)
    assert CodedChoice(tmp_path / "choices.json", Clock(plain=0.5)).choose(weight, torch.float32, (0, 0)) is None
    assert "slower here (0.50 times as fast)" in caplog.text


def test_a_solution_that_does_not_run_here_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A kernel that does not compile, or wants more shared memory than there is, ends no start."""
    from triton.errors import TritonError

    for name in ("_entries", "_loaded", "_failures"):
        monkeypatch.setattr(CODED_LINEAR, name, dict(getattr(CODED_LINEAR, name)))
    CODED_LINEAR.add("huge", "kernels.test_coded_linear:run_out", priority=99)

    def run_out(*_: Any) -> None:
        raise TritonError("out of resource: shared memory")

    monkeypatch.setitem(CODED_LINEAR._loaded, "huge", run_out)
    plan = CodedChoice(tmp_path / "c.json", Clock(plain=3.0)).choose(make("int4-32", 40, 96)[0], torch.float32, (0, 0))
    assert plan is not None and plan.find(1) == "reference" and "shared memory" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", '{"KEY": 3}', '{"KEY": {"steps": [[9, "gone"]], "gain": 2}}'])
def test_a_file_that_says_nothing_is_measured_again(tmp_path: Path, text: str):
    weight, _ = make("int4-32", 40, 96)
    clock, path = Clock(plain=3.0), tmp_path / "choices.json"
    CodedChoice(path, clock).choose(weight, torch.float32, (0, 0))
    first = CodedChoice(path, clock)
    first.choose(weight, torch.float32, (0, 0))
    first.save()
    (key,) = json.loads(path.read_text())
    path.write_text(text.replace("KEY", key))
    before = clock.calls
    assert CodedChoice(path, clock).choose(weight, torch.float32, (0, 0)) is not None and clock.calls > before


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_with_coded_weights(kind: str):
    """As it does with the plain weight; rows can be looked up, the weight moved and given back."""
    weight, plain = make(kind, 40, 96)
    stored = CodedWeight(weight, make_plan(times_of({"reference": 1.0})))
    layer = Linear(Build(torch.device("cpu"), torch.float32), 96, 40, bias=True)
    torch.nn.init.normal_(layer.bias)
    layer.stored = stored
    del layer.weight
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    assert relative_error(layer(x), x.double() @ plain.T + layer.bias.double()) < 1e-5
    ids = torch.tensor([39, 0, 7])
    assert relative_error(stored.rows(ids, torch.float32), plain[ids]) < 1e-6
    stored.move(torch.device("cpu"))
    assert relative_error(stored.unpack(torch.float32), plain) < 1e-6
    assert stored.num_bytes < plain.nbytes / 4


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_the_next_norm_adds_what_a_coded_product_leaves(
    device: str, dtype: torch.dtype, tolerance: float, has_bias: bool
):
    inputs, outputs = 1400, 40
    weight, plain = make("int4-128", outputs, inputs, device)
    layer = Linear(Build(torch.device(device), dtype), inputs, outputs, bias=has_bias)
    layer.stored = CodedWeight(weight, make_plan(times_of({"triton_skinny": 1.0, PLAIN: 2.0})))
    del layer.weight
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if layer.bias is not None:
        layer.bias.data.copy_(bias)
    x, stream = draw(3, inputs, device, dtype), draw(3, outputs, device, dtype)
    residual = Residual(stream.clone())
    layer.add_to(residual, x)
    assert residual.pending is not None and (residual.pending.dim() == 3) == (not has_bias)
    expected = stream.double() + x.double() @ plain.to(device).T + (bias.double() if has_bias else 0.0)
    assert relative_error(residual.add_pending(), expected) < tolerance


def takes_cuda(weight: DeviceCodes, rows: int) -> bool:
    query = describe_codes(weight, torch.bfloat16, (9, 0))
    asked = KernelQuery("cuda", "bfloat16", (9, 0), {**query.shape, "num_rows": rows})
    return CODED_LINEAR.reason_against("cuda", asked) is None


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_own_cuda_products(kind: str):
    """Alone, with a bias and the activation, and after the norm; of sizes that are no multiples of tiles."""
    from headrace.kernels.coded_linear import cuda

    taken = 0
    for rows, outputs, inputs in ((1, 40, 96), (3, 34, 704), (8, 150, 1312), (2, 66, 2880)):
        weight, plain = make(kind, outputs, inputs, "cuda")
        if not takes_cuda(weight, rows):
            continue
        taken += 1
        plain = plain.cuda()
        x, residual = (draw(rows, inputs, "cuda", torch.bfloat16) for _ in range(2))
        bias, norm = torch.randn(outputs, device="cuda").bfloat16(), torch.rand(inputs, device="cuda").bfloat16()
        expected = x.double() @ plain.T + bias.double()
        assert relative_error(cuda.multiply(x, weight, bias), expected) < 5e-3
        assert torch.equal(cuda.multiply(x, weight, bias), cuda.multiply(x, weight, bias))
        gate, up = expected.chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate) * up
        assert relative_error(cuda.multiply_gated(x, weight, bias, Gate("silu")), silu) < 1e-2
        clamp = Gate("clamped", limit=float(gate.abs().median()), alpha=1.7, up_offset=0.5)
        clamped = clamped_swiglu(expected, limit=clamp.limit, alpha=clamp.alpha, up_offset=clamp.up_offset)
        assert relative_error(cuda.multiply_gated(x, weight, bias, clamp), clamped) < 1e-2
        if weight.order is not None:
            continue
        out, total = cuda.multiply_normalised(x, residual, Norm(norm, 1e-5, 1.0), weight, None)
        added = (x + residual).double()
        normal = added / (added.square().mean(1, keepdim=True) + 1e-5).sqrt() * (norm.double() + 1)
        assert torch.equal(total, x + residual) and relative_error(out, normal @ plain.T) < 1e-2
    assert taken or kind in ("nvfp4", "nf4")


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["int4-128", "int4-order", "mxfp4", "nf4"])
def test_expanded_products_of_many_rows_are_fused_with_the_activation(kind: str):
    """On Hopper; few rows, a bias and other GPUs take separate kernels, for which nothing is expanded."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper's tensor cores")
    weight, plain = make(kind, 4096, 512, "cuda")
    x = draw(4800, 512, "cuda", torch.bfloat16)  # nearly fills the last wave of tiles
    gated = expand.expand_and_gate(x, weight, None, Gate("silu"))
    assert gated is not None
    gate, up = (x.double() @ plain.cuda().T).chunk(2, dim=1)
    assert relative_error(gated, torch.nn.functional.silu(gate) * up) < 1e-2
    assert expand.expand_and_gate(x[:8], weight, None, Gate("silu")) is None
    assert expand.expand_and_gate(x, weight, torch.zeros(4096, device="cuda").bfloat16(), Gate("silu")) is None
    assert expand.expand_and_gate(x, weight, None, Gate("clamped", 1.0, 1.0, 0.0)) is None


def test_own_cuda_launches_nothing_for_no_rows():
    from headrace.kernels.coded_linear import cuda

    weight = make("int4-32", 32, 128)[0]
    x = torch.empty(0, 128)
    assert cuda.multiply(x, weight, None).shape == (0, 32)
    assert cuda.multiply_gated(x, weight, None, Gate("silu")).shape == (0, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_own_cuda_products_fit_shared_memory(kind: str):
    """Whatever they say that they take."""
    from headrace.kernels.coded_linear import cuda

    for rows in (1, 3, 8):
        weight = make(kind, 32, MOST_CUDA_INPUTS // rows // 16 * 16)[0]
        for shape in cuda.SHAPES if takes_cuda(weight, rows) else ():
            used = cuda.count_shared_bytes(cuda.describe_form(weight), rows, weight.in_features, shape)
            assert rows * weight.in_features * 2 < used <= cuda.MOST_BYTES


def test_a_layer_normalises_and_gates_with_codes_in_one_kernel(monkeypatch: pytest.MonkeyPatch):
    """Where the plan's product for so many rows has such forms; what is pending then joins the stream there."""
    inputs, outputs, calls = 96, 40, []
    weight, plain = make("int4-32", outputs, inputs)

    def normalise(
        x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: DeviceCodes, bias: None, activation: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(activation)
        return norm_linear(x, residual, norm, reference.dequantise(weight, x.dtype), bias, activation)

    def gate(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor:
        calls.append(gate.kind)
        first, second = reference.coded_linear(x, weight, bias).chunk(2, dim=1)
        return torch.nn.functional.silu(first) * second

    monkeypatch.setitem(CODED_LINEAR._loaded, "cuda", reference.coded_linear)
    monkeypatch.setitem(CODED_NORM_LINEAR._loaded, "cuda", normalise)
    monkeypatch.setitem(CODED_GATED._loaded, "cuda", gate)
    build = Build(torch.device("cpu"), torch.float32)
    layer, norm = Linear(build, inputs, {"gate": outputs // 2, "up": outputs // 2}), RmsNorm(build, inputs, 1e-5)
    layer.stored = CodedWeight(weight, Plan(((4, "cuda"), (1 << 62, "reference")), 2.0))
    del layer.weight
    torch.nn.init.ones_(norm.weight)
    for rows, is_fused in ((3, True), (5, False)):
        x, stream = draw(rows, inputs, "cpu", torch.float32), draw(rows, inputs, "cpu", torch.float32)
        residual = Residual(stream.clone(), x.clone())
        out = layer.read(norm, residual, "silu")
        assert (out is not None) == is_fused and (residual.pending is None) == is_fused
        if out is None:
            continue
        added = (x + stream).double()
        normal = added / (added.square().mean(1, keepdim=True) + 1e-5).sqrt()
        first, second = (normal @ plain.T).chunk(2, dim=1)
        assert relative_error(out, torch.nn.functional.silu(first) * second) < 1e-5
        assert torch.equal(residual.stream, x + stream)
        first, second = (x.double() @ plain.T).chunk(2, dim=1)
        assert relative_error(layer.gate(x, Gate("silu")), torch.nn.functional.silu(first) * second) < 1e-5
    assert calls == ["silu", "silu"] and layer.gate(x, Gate("silu")) is None


@pytest.mark.parametrize("rows", [1, 5])
def test_an_mlp_with_a_clamp_asks_its_product_for_it(rows: int, monkeypatch: pytest.MonkeyPatch):
    """One kernel where the plan's product for so many rows has such a form, the product and the activation elsewhere:
    both give the same."""
    width, inner, calls = 96, 40, []
    clamp = SwigluClamp(limit=0.6, alpha=1.7, up_offset=0.5)
    mlp = GatedMlp(MlpSpec(inner, clamp=clamp), width, Build(torch.device("cpu"), torch.float32))
    torch.nn.init.normal_(mlp.down.weight, generator=torch.Generator().manual_seed(0))
    weight, plain = make("int4-32", 2 * inner, width)
    mlp.gate_up.stored = CodedWeight(weight, Plan(((4, "cuda"), (1 << 62, "reference")), 2.0))
    del mlp.gate_up.weight

    def gate(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor:
        calls.append(gate)
        product = reference.coded_linear(x, weight, bias)
        return clamped_swiglu(product, limit=gate.limit, alpha=gate.alpha, up_offset=gate.up_offset)

    monkeypatch.setitem(CODED_LINEAR._loaded, "cuda", reference.coded_linear)
    monkeypatch.setitem(CODED_GATED._loaded, "cuda", gate)
    mlp.gate_up.stored = CodedWeight(weight, mlp.gate_up.stored.plan)
    x = draw(rows, width, "cpu", torch.float32)
    first, second = (x.double() @ plain.T).chunk(2, dim=1)
    first = first.clamp(max=0.6)
    inside = first * torch.sigmoid(1.7 * first) * (second.clamp(-0.6, 0.6) + 0.5)
    assert relative_error(mlp.compute_share(x), inside @ mlp.down.weight.double().T) < 1e-5
    assert calls == ([Gate("clamped", 0.6, 1.7, 0.5)] if rows == 1 else [])


@pytest.mark.parametrize("name", ["cuda_tiles", "cuda_tile_many", "triton_expand"])
def test_products_without_a_clamp_leave_it_to_another_kernel(name: str):
    weight, _ = make("int4-128", 256, 128)
    gate = CODED_GATED.load(name)
    assert gate(torch.zeros(1, 128), weight, None, Gate("clamped", 7.0, 1.7, 1.0)) is None


def test_plain_weights_have_no_clamp_fused():
    layer = Linear(Build(torch.device("cpu"), torch.float32), 64, {"gate": 32, "up": 32})
    layer._gated_linear = gated_linear
    x = torch.ones(2, 64)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    assert layer.gate(x, Gate("clamped", 7.0, 1.7, 1.0)) is None
    assert torch.equal(layer.gate(x, Gate("silu")), gated_linear(x, layer.weight, None, "silu"))


@pytest.mark.interpreted
def test_an_mlp_rounds_its_rows_in_the_norm_and_the_activation(monkeypatch: pytest.MonkeyPatch):
    """And nowhere else; it says what the plain one says, but for the rounding."""
    width, inner = 256, 384
    mlp = GatedMlp(MlpSpec(inner), width, Build(torch.device("cpu"), torch.float32))
    norm = RmsNorm(Build(torch.device("cpu"), torch.float32), width, 1e-6)
    torch.nn.init.ones_(norm.weight)
    plain = []
    for layer, (outputs, inputs) in ((mlp.gate_up, (2 * inner, width)), (mlp.down, (width, inner))):
        weight, values = make("fp8-block", outputs, inputs)
        layer.stored = CodedWeight(weight, Plan(((1 << 62, "triton_fp8_blocks"),), 2.0))
        del layer.weight
        plain.append(values)
    monkeypatch.setattr(scaled, "quantise_rows", None)  # what a product calls for rows that nothing has rounded
    stream, pending = (draw(5, width, "cpu", torch.float32) for _ in range(2))
    pending = pending.flip(0)
    residual = Residual(stream.clone(), pending)
    mlp.add(norm, residual)
    total = stream.double() + pending.double()
    gate, up = (F.rms_norm(total, (width,), eps=1e-6) @ plain[0].T).chunk(2, dim=1)
    expected = total + (F.silu(gate) * up) @ plain[1].T
    assert relative_error(residual.add_pending(), expected) < 0.06


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_solution_whose_fused_form_is_wrong_is_left_out(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """What a product is fused with is checked when a model is loaded, like the product alone."""
    weight, _ = make("int4-32", 40, 96)

    def gate(x: torch.Tensor, weight: DeviceCodes, bias: None, kind: Gate) -> torch.Tensor:
        gate, up = reference.coded_linear(x, weight, bias).chunk(2, dim=1)
        return torch.nn.functional.silu(up if is_wrong else gate) * up

    monkeypatch.setattr(CODED_GATED, "names", lambda: ["first"])
    monkeypatch.setitem(CODED_GATED._loaded, "first", gate)
    monkeypatch.setattr(choice, "find_solutions", lambda query, rows: ["first", "also"])
    for name in ("first", "also"):
        monkeypatch.setitem(CODED_LINEAR._loaded, name, reference.coded_linear)
    times = choice.measure(weight, describe_codes(weight, torch.float32, (0, 0)), Clock(plain=3.0))
    assert all(("first" in found) != is_wrong and "also" in found for found in times.values())
    assert ("left out from 1 rows on: its results are wrong" in caplog.text) == is_wrong


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("kind", "rows"), [
    ("fp8-block", 1), ("fp8-block", 20), ("fp8-channel", 3), ("fp8-tensor", 70),
])
def test_block_diagonal_products(
    kind: str, rows: int, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
):
    """Each group of inputs has its own matrix; many rows multiply the expanded weight."""
    from headrace.kernels.coded_linear import forms, fp8_rows, grouped

    weight, exact = make(kind, 3 * 128, 256, device)
    x = torch.randn(rows, 3, 264, generator=torch.Generator().manual_seed(rows)).to(device, dtype)[:, :, :256]
    wanted = torch.einsum("tgi,goi->tgo", x.cpu().double(), exact.view(3, 128, 256)).flatten(1)
    assert relative_error(grouped.multiply(x, weight), wanted) < tolerance
    if device == "cuda" and dtype == torch.bfloat16:  # few rows are rounded to FP8
        assert relative_error(fp8_rows.multiply_groups(x, weight), wanted) < 4e-2
    monkeypatch.setattr(forms, "_choose_groups", lambda *_: grouped.multiply)
    stored = CodedWeight(weight, Plan(((1 << 62, "reference"),), 1.0))
    assert relative_error(forms.multiply_in_groups(x, stored), wanted) < 2 * tolerance
