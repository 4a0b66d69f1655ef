"""Packed products on values: every format and instruction set, odd sizes, against plain products and a fake-quant
oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import native
from headrace.kernels.native.toolchain import machine_isas
from headrace.kernels.packed_linear import PACKED_GATED, PACKED_LINEAR, PACKED_ROWS
from headrace.kernels.packed_linear.layout import (
    TABLES,
    Format,
    PackedMatrix,
    allocate,
    gather_rows,
    pack_floats,
    put_codes,
    put_groups,
    unpack,
)
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups

SHAPES = [(16, 64), (17, 33), (50, 100), (33, 576), (129, 1400)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 70]


@pytest.fixture(scope="module", params=[isa.name for isa in machine_isas()])
def isa(request: pytest.FixtureRequest):
    state = native.build()
    if state.status != "ready":
        pytest.skip(f"no native library: {state.detail}")
    if native.select_isa(request.param) != request.param:
        pytest.skip(f"the library lacks {request.param}")
    yield request.param
    native.select_isa()


def draw(out_features: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features * in_features)
    return torch.randn(out_features, in_features, generator=generator) * 0.05


def draw_inputs(rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, with outliers in some groups: of all rows in the second, of some rows in others."""
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    x = torch.randn(rows, in_features, generator=generator)
    x[:, 32:33] += 30.0  # no such input, no outlier
    x[torch.rand(rows, in_features, generator=generator) < 0.003] *= 20.0
    return x


def pack_int8_groups(weight: torch.Tensor) -> PackedMatrix:
    """8 bits with a scale and a min per 32 inputs; what some GGUF types become."""
    packed = allocate(Format.INT8_GROUP, *weight.shape)
    groups = F.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    middle = (groups.amin(2, keepdim=True) + groups.amax(2, keepdim=True)).div(2).half().float()
    scales = ((groups - middle).abs().amax(2, keepdim=True) / 127).half().float()
    codes = ((groups - middle) / scales.clamp_min(1e-9)).round().clamp(-127, 127)
    put_codes(packed, 0, codes.flatten(1)[:, : weight.shape[1]].to(torch.int8))
    put_groups(packed, 0, scales.squeeze(2), middle.squeeze(2))
    return packed


def pack_looked_up(weight: torch.Tensor, form: Format) -> PackedMatrix:
    """Nibbles at random, all of them; the scales are what the weight's largest magnitude takes."""
    packed, groups = (
        allocate(form, *weight.shape, has_mins=False), F.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    )
    nibbles = torch.randint(
        0, 16, weight.shape, generator=torch.Generator().manual_seed(weight.numel()), dtype=torch.uint8
    )
    put_codes(packed, 0, nibbles)
    put_groups(packed, 0, groups.abs().amax(2) / TABLES[form].abs().max(), None)
    return packed


def fake_quantise(values: torch.Tensor, group: int, fine_from: float = float("inf")) -> torch.Tensor:
    """Independent oracle of what is done to activations: steps of largest magnitude / 127 per group, in float64; a
    128th of that in groups whose largest is above ``fine_from`` times the mean of those of the row."""
    width = values.shape[1]
    groups = F.pad(values.double(), (0, -width % group)).unflatten(1, (-1, group))
    tops = groups.abs().amax(2, keepdim=True).clamp_min(1e-300)
    steps = tops / 127 * torch.where(tops > fine_from * tops.mean(1, keepdim=True), 1 / 128, 1.0)
    return ((groups / steps).round() * steps).flatten(1)[:, :width]


FORMS = {
    "float32": pack_floats,
    "bfloat16": lambda w: pack_floats(w.bfloat16()),
    "int8": quantise_int8,
    "int4_group": quantise_int4,
    "int8_group": pack_int8_groups,
    "int8_group_symmetric": quantise_int8_groups,
    "e2m1_group": lambda w: pack_looked_up(w, Format.E2M1_GROUP),
    "iq4_group": lambda w: pack_looked_up(w, Format.IQ4_GROUP),
}


LEAST_TILE_ROWS = 24
"""From which AMX multiplies group formats as bfloat16 tiles, with inputs that are not in steps."""


def check(packed: PackedMatrix, x: torch.Tensor, *, name: str, uses_half: bool) -> None:
    bias = torch.linspace(-1, 1, packed.out_features)
    out = PACKED_LINEAR.load(name)(x, packed, bias, torch.float32)
    values = x.double()
    uses_half = uses_half and len(x) >= LEAST_TILE_ROWS
    if not packed.format.is_exact and not uses_half:
        values = (
            fake_quantise(values, packed.in_features) if packed.format is Format.INT8
            else fake_quantise(values, 32, 2.0 if packed.format is Format.INT8_GROUP else 4.0)
        )
    dense = unpack(packed, torch.float32).double()
    expected = F.linear(values, dense, bias.double())
    size = values.abs() @ dense.abs().t() + 1  # sums of magnitudes, by which rounding grows
    # codes of activations that lie halfway may go either way: half a step of one input in some dozen
    share = 2e-6 if packed.format.is_exact else 2e-3
    # both operands are rounded to bfloat16, by up to 2**-8 each: all of it where one product outweighs the others
    most = 2**-7 if uses_half else share
    assert ((out - expected).abs() / size).max() < most


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_products_match_the_oracle(form: str, dtype: torch.dtype, isa: str):
    for out_features, in_features in SHAPES:
        packed = FORMS[form](draw(out_features, in_features))
        for rows in ROWS:
            x = draw_inputs(rows, in_features).to(dtype)
            check(packed, x, name="native", uses_half=isa == "amx" and "group" in form)


@pytest.mark.parametrize("form", FORMS)
def test_reference_products_match_the_oracle(form: str):
    check(FORMS[form](draw(33, 100)), draw_inputs(5, 100), name="reference", uses_half=False)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4_group", "e2m1_group"])
def test_several_threads_and_row_blocks_give_what_one_gives(form: str, isa: str):
    packed = FORMS[form](draw(530, 320))
    before = torch.get_num_threads()
    outs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        outs.append(
            [
                PACKED_LINEAR.load("native")(torch.linspace(-1, 1, rows * 320).view(rows, 320), packed, None)
                for rows in (1, 40, 600)
            ]
        )
    torch.set_num_threads(before)
    for one, three in zip(*outs, strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_alone_and_in_any_batch(form: str, dtype: torch.dtype, isa: str):
    if isa == "amx":
        pytest.skip("takes many rows by other instructions")
    multiply, gated = PACKED_LINEAR.load("native"), PACKED_GATED.load("native")
    before = torch.get_num_threads()
    sizes = [(301, 50, 100), (131, 544, 576), (131, 96, 1400)]
    if isa == "scalar":  # it has no tiles of rows and outputs to fill, and takes fifty times as long
        sizes = [(101, 50, 100), (67, 96, 576), (67, 32, 1400)]
    for rows, out_features, in_features in sizes:
        packed = FORMS[form](draw(out_features, in_features))
        x = draw_inputs(rows, in_features).to(dtype)
        torch.set_num_threads(1)
        alone = torch.cat([multiply(x[row : row + 1], packed, None) for row in range(len(x))])
        for number, count in enumerate((2, 3, 5, 7, 8, 16, 19, 33, 64, rows, rows)):
            torch.set_num_threads(3 if number % 2 else 1)
            together = torch.cat([multiply(part, packed, None) for part in x.split(count)])
            assert torch.equal(together, alone), (out_features, in_features, torch.get_num_threads(), count)
        for threads in (1, 3) if out_features % 32 == 0 else ():
            torch.set_num_threads(threads)
            one, all_rows = gated(x[7:8], packed, None, "silu"), gated(x, packed, None, "silu")
            assert torch.equal(one, all_rows[7:8]), (out_features, in_features, threads)
        torch.set_num_threads(before)


@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9, 45])
def test_outputs_of_half_the_size_are_those_of_all_rounded(rows: int, bias_dtype: torch.dtype | None, isa: str):
    multiply = PACKED_LINEAR.load("native")
    for out_features in (1, 15, 32, 33, 200):
        packed, bias = (
            FORMS["bfloat16"](draw(out_features, 96)),
            torch.linspace(-1, 1, out_features).to(bias_dtype) if bias_dtype else None
        )
        x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert torch.equal(multiply(x, packed, bias), multiply(x, packed, bias, torch.float32).bfloat16())


@pytest.mark.parametrize("rows", [1, 20])
def test_threads_share_the_parts_of_a_vocabulary(rows: int, isa: str):
    weight, x = draw(16_400, 64), torch.randn(rows, 64)
    packed = FORMS["float32"](weight)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    out = PACKED_LINEAR.load("native")(x, packed, None)
    torch.set_num_threads(before)
    torch.testing.assert_close(out, x @ weight.T, atol=1e-5, rtol=1e-5)


def test_strided_rows_and_no_rows(isa: str):
    packed = FORMS["bfloat16"](draw(20, 64))
    wide = torch.randn(3, 200)
    multiply = PACKED_LINEAR.load("native")
    assert torch.allclose(
        multiply(wide[:, 50:114], packed, None), F.linear(wide[:, 50:114], unpack(packed, torch.float32)), atol=1e-5
    )
    assert multiply(wide[:0, :64], packed, None).shape == (0, 20)


@pytest.mark.parametrize(("form", "code"), [
    (Format.INT8, 127), (Format.INT8, -127), (Format.INT8_GROUP, 127), (Format.INT8_GROUP, -127),
    (Format.INT4_GROUP, 15),
    (Format.E2M1_GROUP, 7), (Format.E2M1_GROUP, 15), (Format.IQ4_GROUP, 0), (Format.IQ4_GROUP, 15),
])
def test_sums_of_the_largest_codes_fit(form: Format, code: int, isa: str):
    packed = allocate(form, 32, 128, has_mins=False)
    put_codes(packed, 0, torch.full((32, 128), code, dtype=torch.uint8 if form.has_nibbles else torch.int8))
    packed.scales.fill_(1)
    value = TABLES[form][code].item() if form in TABLES else code
    for rows in (1, 4, 9, 40):
        for x in (1.0, -1.0):
            out = PACKED_LINEAR.load("native")(torch.full((rows, 128), x), packed, None)
            assert torch.allclose(out, torch.full((rows, 32), 128.0 * value * x), rtol=1e-5), (rows, x)


def test_what_is_not_finite_stays_visible(isa: str):
    for form in FORMS:
        packed = FORMS[form](draw(20, 64))
        for bad in (float("nan"), float("inf")):
            x = torch.ones(2, 64)
            x[1, 7] = bad
            out = PACKED_LINEAR.load("native")(x, packed, None)
            assert out[0].isfinite().all() and not out[1].isfinite().any(), (form, bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_floats_are_packed_without_loss_and_rows_gathered(dtype: torch.dtype, shape: tuple[int, int]):
    weight = draw(*shape).to(dtype)
    packed = pack_floats(weight)
    assert torch.equal(unpack(packed, dtype), weight)
    rows = torch.tensor([shape[0] - 1, 0, 3, 3])
    assert torch.equal(gather_rows(packed, rows, dtype), weight[rows])
    assert packed.num_bytes <= (shape[0] + 15) * (shape[1] + 63) * dtype.itemsize


@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_weights_are_within_half_a_step(shape: tuple[int, int]):
    weight = draw(*shape)
    kept = weight.clone()
    steps = weight.abs().amax(1, keepdim=True) / 127
    for quantise in (quantise_int8, quantise_int8_groups):
        assert ((unpack(quantise(weight), torch.float32) - weight).abs() <= steps * 0.52).all()
    groups = F.pad(weight, (0, -shape[1] % 32)).unflatten(1, (-1, 32))
    coarse = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, 1)[:, : shape[1]] / 15
    error = (unpack(quantise_int4(weight), torch.float32) - weight).abs()
    assert (error <= coarse * 1.8).all()  # ends of a range may be cut off
    assert error.square().mean() <= (coarse.square() / 12).mean() * 1.02
    assert torch.equal(weight, kept)


def test_constant_and_zero_weights_have_no_steps():
    for weight in (torch.zeros(20, 64), torch.full((20, 64), 0.25)):
        for quantise in (quantise_int8, quantise_int8_groups, quantise_int4):
            assert torch.allclose(unpack(quantise(weight), torch.float32), weight, rtol=2e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_as_the_reference_does(form: str, dtype: torch.dtype, isa: str):
    for out_features, in_features in SHAPES:
        packed, rows = FORMS[form](draw(out_features, in_features)), torch.tensor([out_features - 1, 0, 5, 5])
        out, expected = (PACKED_ROWS.load(name)(packed, rows, dtype) for name in ("native", "reference"))
        assert out.dtype == dtype and out.shape == expected.shape
        assert torch.allclose(out, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)
    assert PACKED_ROWS.load("native")(packed, rows[:0], dtype).shape == (0, in_features)
    for wrong in (-1, packed.out_features):
        with pytest.raises(RuntimeError, match="no such row"):
            PACKED_ROWS.load("native")(packed, torch.tensor([wrong]), dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("pack", [pack_floats, quantise_int8, quantise_int4])
@pytest.mark.parametrize("width", [16, 24, 1040])
def test_products_are_gated_where_they_are_made(width, pack, dtype, tolerance, activation):
    rows = 530 if width == 1040 else 20
    x, bias = draw(rows, 72).to(dtype) * 20, draw(1, 2 * width)[0]
    weight = pack(draw(2 * width, 72) * 4)
    gate, up = F.linear(x.double(), unpack(weight, torch.float64), bias.double()).chunk(2, dim=1)
    gated = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    out = PACKED_GATED.load("native")(x, weight, bias, activation)
    assert out.dtype == dtype and out.shape == (rows, width)
    assert (out.double() - gated).norm() < (tolerance if pack is pack_floats else 3e-2) * gated.norm()
