"""Own CUDA C++ products of tens to hundreds of FP8 rows, against float64 for every kind of plan; which plans there are,
and which is chosen."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from headrace.kernels.coded_linear import CODED_LINEAR, FP8_GATED, FP8_LINEAR, FP8_SUMS, fp8_split
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.fp8_split import (
    MOST_STAGES,
    Plan,
    Size,
    choose_plan,
    estimate,
    find_residents,
    launch,
    list_plans,
)
from headrace.kernels.coded_linear.fp8_triton import quantise_rows
from headrace.kernels.cuda_source import MOST_BYTES
from headrace.kernels.operation import KernelQuery

ODD_ROWS = (17, 65, 100, 129, 200, 255, 256)
RESIDENTS = (132, 66, 30, 15)
"""Clusters of each size that run at once, as an H200 told."""


def draw(rows: int, outputs: int, inputs: int, *, has_tables: bool) -> tuple[Fp8Rows, DeviceCodes, torch.Tensor]:
    """Rows, a weight, and their product in float64."""
    torch.manual_seed(rows * outputs + inputs)
    groups = -(-inputs // 128)
    x, codes = ((torch.randn(n, inputs, device="cuda") * 60).to(torch.float8_e4m3fn) for n in (rows, outputs))
    if has_tables:
        x_scales, scales = torch.rand(groups, rows) + 0.5, torch.rand(-(-outputs // 128), groups) + 0.5
        weight = DeviceCodes(Code.E4M3, inputs, codes, scales.cuda() * 1e-4, 128, rows=128)
        table = weight.scales.double().repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        plain = x.double() * x_scales.cuda().double().t().repeat_interleave(128, 1)[:, :inputs]
    else:
        x_scales, scales = torch.rand(rows) + 0.5, torch.rand(outputs, 1) + 0.5
        weight = DeviceCodes(Code.E4M3, inputs, codes, scales.cuda() * 1e-4, inputs)
        table, plain = weight.scales.double(), x.double() * x_scales.cuda().double()[:, None]
    return Fp8Rows(x, x_scales.cuda()), weight, plain @ (codes.double() * table).T


@pytest.fixture
def residents() -> dict[bool, tuple[int, ...]]:
    """By whether scales are of 128 inputs."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    return {own: fp8_split.prepare(own, torch.device("cuda", torch.cuda.current_device())) for own in (False, True)}


@pytest.mark.cuda
@pytest.mark.parametrize("has_tables", [False, True], ids=["rows", "tables"])
@pytest.mark.parametrize("outputs,inputs", [(336, 640), (1536, 4096), (80, 1040), (4096, 1424), (6160, 2048)])
def test_values(outputs: int, inputs: int, has_tables: bool, residents: dict[bool, tuple[int, ...]]):
    """As chosen, and by plans of every kind; the same again gives the same."""
    chooser = random.Random(outputs)
    for rows in ODD_ROWS:
        x, weight, expected = draw(rows, outputs, inputs, has_tables=has_tables)
        bias = torch.randn(outputs, device="cuda").bfloat16()
        for own in (None, bias):
            out = FP8_LINEAR.load("cuda_split")(x, weight, own, torch.bfloat16)
            assert relative_error(out, expected if own is None else expected + own.double()) < 6e-3
        plans = list(list_plans(Size(rows, outputs, inputs, has_tables), residents[has_tables]))
        for plan in chooser.sample(plans, min(10, len(plans))):
            resident = find_residents(plan, residents[has_tables])
            for most in (resident, 1):  # of which the latter has blocks that stay for all tiles
                out = launch(x, weight, None, plan, most)
                assert relative_error(out, expected) < 6e-3, (rows, plan, most)
                assert torch.equal(out, launch(x, weight, None, plan, most))


@pytest.mark.cuda
def test_all_rows(residents: dict[bool, tuple[int, ...]]):
    for rows in range(17, 257, 3):
        x, weight, expected = draw(rows, 384, 1024, has_tables=False)
        for plan in (Plan(2, rows, 2), Plan(1, rows, 4), Plan(2, rows)):
            assert relative_error(launch(x, weight, None, plan, 3), expected) < 6e-3, (rows, plan)


@pytest.mark.cuda
@pytest.mark.parametrize("groups,each,inputs", [(8, 1024, 4096), (3, 64, 256), (2, 192, 384)])
def test_groups(groups: int, each: int, inputs: int, residents: dict[bool, tuple[int, ...]]):
    """Each has inputs of its own."""
    for rows in (17, 40, 64, 200):
        torch.manual_seed(rows)
        _, weight, _ = draw(1, groups * each, inputs, has_tables=True)
        x = torch.randn(rows, groups, inputs, device="cuda").bfloat16()
        coded = quantise_rows(x.flatten(1), 128)
        plain = (coded.codes.double().view(rows, -1, 128) * coded.scales.double().t()[:, :, None]).view_as(x)
        table = weight.scales.double().repeat_interleave(128, 0)[: groups * each].repeat_interleave(128, 1)
        matrices = (weight.codes.double() * table).view(groups, each, inputs)
        expected = torch.einsum("tgi,goi->tgo", plain, matrices).flatten(1)
        assert relative_error(fp8_split.multiply_groups(x, weight), expected) < 6e-3
        size = Size(rows, groups * each, inputs, True, groups)
        for plan in random.Random(rows).sample(list(list_plans(size, residents[True])), 4):
            out = launch(coded, weight, None, plan, find_residents(plan, residents[True]))
            assert relative_error(out, expected) < 6e-3, (rows, plan)


@pytest.mark.cuda
@pytest.mark.usefixtures("residents")
def test_solution():
    for has_tables in (False, True):
        _, weight, _ = draw(1, 4096, 1024, has_tables=has_tables)
        x = torch.randn(100, 1024, device="cuda").bfloat16()
        expected = CODED_LINEAR.load("reference")(x, weight, None)
        assert relative_error(CODED_LINEAR.load("cuda_split")(x, weight, None), expected) < 4e-2
        for rows in (60, 100):
            x, weight, expected = draw(rows, 512, 1024, has_tables=has_tables)
            gate, up = expected.chunk(2, dim=1)
            out = FP8_GATED.load("cuda_split")(x, weight, None, torch.bfloat16, "silu")
            assert relative_error(out, F.silu(gate) * up) < 1e-2


SIZES = st.builds(
    Size, st.integers(17, 256), st.integers(1, 2048).map(lambda n: 16 * n), st.integers(8, 1024).map(lambda n: 16 * n),
    st.booleans(), st.just(1),
)


@given(SIZES)
def test_plans_fit(size: Size):
    plans = list(list_plans(size, RESIDENTS))
    for plan in plans:
        stage = plan.count_stage_bytes(has_tables=size.has_tables)
        stages, rows = plan.count_stages(size), -(-plan.rows // 16) * 16
        assert 1 <= stages <= MOST_STAGES and plan.count_shared_bytes(size) <= MOST_BYTES
        assert stages * stage >= plan.sum_bytes and stage % 1024 == 0
        assert stages >= 3 or stages * plan.splits >= size.steps, "a ring that is no ring"
        assert plan.rows <= 256
        assert stage >= 128 * (plan.width + rows) and (plan.rows % 8 == 0 or plan.rows == size.rows)
        # what a barrier waits for is counted in 20 bits
        assert stage < 1 << 20 and plan.sum_bytes < 1 << 20
        tiles = -(-size.rows // plan.rows)
        assert plan.count_clusters(size) * plan.width * plan.rows >= size.outputs * size.rows
        assert tiles == 1 or plan.rows <= size.rows
    chosen = choose_plan(size, RESIDENTS)
    times = [estimate(size, plan, find_residents(plan, RESIDENTS)) for plan in plans]
    assert chosen in plans and estimate(size, chosen, find_residents(chosen, RESIDENTS)) == min(times) > 0


@pytest.mark.parametrize("each,widths", [(1024, {64, 128}), (192, {64})])
def test_tiles_have_outputs_of_one_group(each: int, widths: set[int]):
    plans = list(list_plans(Size(64, 8 * each, 4096, True, 8), RESIDENTS))
    assert {plan.width for plan in plans} == widths


def test_plans_without_large_clusters():
    """As on a share of a GPU; and in a dry run, where nothing is known of them."""
    size = Size(250, 4096, 14336, False)
    assert {plan.splits for plan in list_plans(size, (16, 8, 0, 0))} == {1, 2}
    assert choose_plan(size, (1, 1, 1, 1)) in list_plans(size, (1, 1, 1, 1))


def test_clusters_that_do_not_run_at_once_count():
    """Of 32 clusters of four blocks an H200 may run 30."""
    size, plan = Size(250, 4096, 14336, False), Plan(2, 250, 4)
    assert plan.count_clusters(size) == 32
    assert estimate(size, plan, 30) > 1.5 * estimate(size, plan, 32)


def test_gate_and_up_of_many_rows_take_two_kernels(monkeypatch: pytest.MonkeyPatch):
    """In blocks of 128 x 128, of which Gluon's kernel is slow with the activation."""
    ran = list[str]()
    monkeypatch.setattr(fp8_split.hopper, "multiply_gated_rows", lambda *_: ran.append("gluon"))
    monkeypatch.setattr(fp8_split, "multiply_rows", lambda *_: ran.append("product"))
    monkeypatch.setitem(fp8_split.ACTIVATIONS, "silu", lambda _: ran.append("silu"))
    for rows in (64, 65):
        x = Fp8Rows(torch.empty(rows, 128, device="meta"), torch.empty(1, rows, device="meta"))
        FP8_GATED.load("cuda_split")(x, None, None, torch.bfloat16, "silu")
    assert ran == ["gluon", "product", "silu"]


MEASURED: dict[Size, dict[Plan, float]] = {
    Size(64, 6144, 4096, False): {Plan(1, 64): 9.92, Plan(2, 32): 11.02},
    Size(128, 6144, 4096, False): {Plan(1, 128): 10.89, Plan(2, 64): 11.40},
    Size(192, 6144, 4096, False): {Plan(2, 96): 12.66, Plan(1, 192): 12.88},
    Size(250, 6144, 4096, False): {Plan(2, 128): 14.40, Plan(1, 250): 15.17},
    Size(128, 4096, 4096, False): {
        Plan(1, 64): 9.25, Plan(1, 128, 2): 9.61, Plan(2, 32): 10.30, Plan(2, 64, 2): 10.65,
    },
    Size(250, 4096, 4096, False): {
        Plan(1, 128): 10.68, Plan(2, 64): 11.04, Plan(2, 128, 2): 12.51, Plan(1, 250, 2): 13.08,
    },
    Size(64, 4096, 14336, False): {
        Plan(1, 64, 2): 18.97, Plan(2, 64, 2): 20.98, Plan(2, 32, 2): 22.63, Plan(1, 32): 23.05,
    },
    Size(128, 4096, 14336, False): {
        Plan(1, 128, 2): 20.90, Plan(2, 64, 2): 23.91, Plan(1, 64): 25.21, Plan(1, 64, 2): 32.43,
    },
    Size(250, 4096, 14336, False): {
        Plan(2, 128, 2): 29.21, Plan(1, 128): 29.69, Plan(1, 250, 2): 30.55, Plan(2, 64): 32.03,
    },
    Size(64, 1536, 4096, True): {Plan(1, 64, 4): 6.52, Plan(2, 32, 4): 7.07, Plan(1, 32, 2): 7.59},
    Size(128, 32768, 1024, True): {Plan(2, 128): 16.80, Plan(2, 64): 20.32, Plan(1, 128): 21.32},
    Size(64, 8192, 4096, True): {Plan(1, 64): 13.86, Plan(2, 32): 13.92, Plan(2, 64): 15.59},
}
"""Microseconds on an H200."""


@pytest.mark.parametrize("size", MEASURED, ids=str)
def test_estimates_are_near_measured_times(size: Size):
    """And what is chosen by them takes hardly longer than the best."""
    times = MEASURED[size]
    estimates = {plan: 1e6 * estimate(size, plan, find_residents(plan, RESIDENTS)) for plan in times}
    assert all(abs(estimates[plan] / time - 1) < 0.2 for plan, time in times.items())
    assert times[min(estimates, key=estimates.__getitem__)] < 1.1 * min(times.values())


def reason_against(
    num_rows: int, outputs: int = 4096, capability: tuple[int, int] = (9, 0), **shape: int
) -> str | None:
    shape = {
        "in_features": 4096, "out_features": outputs, "bits": 8, "is_float": 1, "group": 4096, "rows": 1,
        "num_rows": num_rows, **shape,
    }
    return CODED_LINEAR.reason_against("cuda_split", KernelQuery("cuda", "bfloat16", capability, shape))


def test_offered_on_hopper_beside_tiles_of_a_wave():
    assert all(reason_against(rows) is None for rows in (17, 64, 256)) and reason_against(16) and reason_against(257)
    assert reason_against(64, group=128, rows=128) is None and reason_against(64, group=128)
    assert reason_against(64, rows=128) and reason_against(64, group=64, rows=128)
    assert reason_against(64, 28672) is None and reason_against(250, 28672), "gate and up of one wave"
    assert reason_against(64, capability=(8, 9)) and reason_against(64, capability=(10, 0))
    assert reason_against(64, in_features=4100, group=4100) and reason_against(64, 4104)
    assert "cuda_split" in FP8_GATED.names() and "cuda_split" not in FP8_SUMS.names()
