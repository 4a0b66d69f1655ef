"""Block-scaled 8-bit and 4-bit floats, against tables and arithmetic written out."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.base.errors import WeightError
from headrace.kernels.block_scaled import dequantise_mxfp4, quantise_groups, quantise_mxfp4
from headrace.kernels.rowwise import CLAMPED_SWIGLU
from headrace.layers.quantization import default_chain

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [0, 1, 127, 254])
def test_every_code_of_mxfp4_under_extreme_scales(exponent: int, dtype: torch.dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).repeat(1, 2)  # low half first
    values = dequantise_mxfp4(packed, torch.tensor([[exponent]], dtype=torch.uint8), dtype)
    exact = torch.tensor(
        [sign * m for sign in (1, -1) for m in MAGNITUDES], dtype=torch.float64
    ) * 2.0 ** (exponent - 127)
    expected = torch.cat((exact, exact))[None].to(dtype)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("exponent", [112, 127, 252])
def test_every_code_of_mxfp4_round_trips(exponent: int):
    """All 16 codes but minus zero, which becomes zero; from the least scale that is made, for 1e-4, to the largest of
    finite values."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).repeat(1, 2)
    scales = torch.tensor([[exponent]], dtype=torch.uint8)
    again, scales_again = quantise_mxfp4(dequantise_mxfp4(packed, scales, torch.float32))
    assert torch.equal(scales_again, scales)
    assert torch.equal(again, torch.where(packed == (8 | 9 << 4), 0 | 9 << 4, packed))


@pytest.mark.parametrize("sign", [1, -1])
def test_halfway_goes_down(sign: int):
    """Strictly above a threshold is the next magnitude; on it, the one nearer to 0."""
    thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above = torch.nextafter(thresholds, torch.tensor(10.0))
    x = sign * torch.cat((thresholds, above, torch.tensor([6.0]), torch.zeros(17)))[None]
    codes, scales = quantise_mxfp4(x)
    assert int(scales) == 127
    values = dequantise_mxfp4(codes, scales, torch.float32)[0]
    assert (
        values[:7].tolist() == [sign * m for m in MAGNITUDES[:7]]
        and values[7:15].tolist() == [sign * m for m in (*MAGNITUDES[1:], 6.0)]
    )
    both = torch.stack((codes & 15, codes >> 4))
    assert (both != 8).all(), "never minus zero"


def test_scale_255_is_no_number():
    values = dequantise_mxfp4(
        torch.full((1, 16), 0x11, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8), torch.float32
    )
    assert values.isnan().all()


@pytest.mark.parametrize("is_scale_first", [False, True])
def test_weights_meet_their_scales_in_any_order(is_scale_first: bool):
    values, scales = torch.ones(4, 130).to(torch.float8_e4m3fn), torch.tensor([[2.0, 8.0]])
    codes, exponents = (
        torch.full((3, 32), 0x2A, dtype=torch.int8),
        torch.full((3, 2), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    )
    plain = torch.arange(6.0).bfloat16().view(2, 3)
    pairs = [
        ("a.weight", values), ("b.w1.weight", codes), ("b.w1.scale", exponents), ("c.weight", plain),
        ("a.weight_scale_inv", scales)
    ]
    joined = dict(default_chain().read(reversed(pairs) if is_scale_first else pairs))
    assert set(joined) == {"a.weight", "b.w1.weight", "c.weight"}
    assert torch.equal(joined["a.weight"], torch.cat((torch.full((4, 128), 2.0), torch.full((4, 2), 8.0)), dim=1))
    assert torch.equal(joined["b.w1.weight"], torch.tensor([[-2.0, 2.0]], dtype=torch.bfloat16).repeat(3, 32))
    assert joined["c.weight"] is plain


@pytest.mark.parametrize("tensors", [
    [("a.weight", torch.ones(4, 4).to(torch.float8_e4m3fn))],
    [("a.weight", torch.ones(4, 16, dtype=torch.int8)), ("b.scale", torch.ones(4, 1))],
    [("a.weight", torch.ones(4, 4).to(torch.float8_e4m3fn)), ("a.scale", torch.ones(4, 4))],
])
def test_what_does_not_fit_is_named(tensors: list[tuple[str, torch.Tensor]]):
    with pytest.raises(WeightError, match="a"):
        list(default_chain().read(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_activations_in_eight_bits(group: int, dtype: torch.dtype):
    """Clamp, gate, and quantise by group: scales exactly the least powers of two that hold, values the nearest code or
    the one beside it. In float64 and by the definition."""
    x = (
        torch.randn(7, 512, generator=torch.Generator().manual_seed(group)) * torch.logspace(-4, 2, 7)[:, None]
    ).to(dtype)
    gated = CLAMPED_SWIGLU.load("reference")(x, limit=10.0, alpha=1.0, up_offset=0.0)
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
    torch.testing.assert_close(
        gated.double(), gate / (1 + (-gate).exp()) * up, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    codes, exponents = quantise_groups(gated, group)
    assert codes.shape == (7, 256) and exponents.shape == (7, 256 // group)
    for row in range(7):
        for g in range(256 // group):
            values = gated[row, g * group : (g + 1) * group].double()
            power = math.ceil(math.log2(max(float(values.abs().max()), 1e-4) / 448))
            assert int(exponents[row, g]) == power + 127
            scaled = values / 2.0**power
            step = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)  # of e4m3 with 3 bits of mantissa
            assert ((codes[row, g * group : (g + 1) * group].double() - scaled).abs() <= step).all()
