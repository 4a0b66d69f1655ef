"""Products of many rows by own CUDA C++ on Hopper against float64: FP8 with scales of rows and of blocks, and MXFP4
experts; biases, activations, output in FP8, rows without an expert, sizes that are no multiples of tiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.reference import dequantise, quantise_rows
from headrace.kernels.moe import reference

NUM_EXPERTS, CHOICES = 5, 2


@pytest.fixture(scope="module", autouse=True)
def _on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def make_fp8(outputs: int, inputs: int, *, has_blocks: bool) -> DeviceCodes:
    codes = (torch.randn(outputs, inputs, device="cuda") * 60).to(torch.float8_e4m3fn)
    if not has_blocks:
        return DeviceCodes(Code.E4M3, inputs, codes, torch.rand(outputs, 1, device="cuda") * 1e-3, inputs)
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128), device="cuda") * 1e-3
    return DeviceCodes(Code.E4M3, inputs, codes, scales, 128, rows=128)


def make_mxfp4(outputs: int, inputs: int) -> DeviceCodes:
    blocks = -(-inputs // 128)
    codes = torch.randint(0, 256, (outputs, blocks, 64), dtype=torch.uint8, device="cuda")
    place, left = torch.arange(64, device="cuda"), inputs - 128 * (blocks - 1)
    codes[:, -1] &= (torch.where(place < left, 15, 0) + torch.where(place + 64 < left, 240, 0)).to(torch.uint8)
    powers = torch.randint(242, 248, (outputs, blocks * 4), dtype=torch.uint8, device="cuda")
    return DeviceCodes(Code.E2M1, inputs, codes.flatten(1), powers, 32, has_whole_zeros=True)


def gate(product: torch.Tensor) -> torch.Tensor:
    first, second = product.chunk(2, dim=1)
    return F.silu(first) * second


@pytest.mark.cuda
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("rows,outputs,inputs", [(65, 272, 272), (300, 528, 1040), (700, 768, 512)])
def test_fp8_products(rows: int, outputs: int, inputs: int, has_blocks: bool, cluster: int):
    from headrace.kernels.coded_linear import wide

    torch.manual_seed(rows)
    weight = make_fp8(outputs, inputs, has_blocks=has_blocks)
    x = quantise_rows(torch.randn(rows, inputs, device="cuda").bfloat16(), 128 if has_blocks else 0)
    bias = torch.randn(outputs, device="cuda").bfloat16()
    expected = x.decode(torch.float64) @ dequantise(weight, torch.float64).T
    silu = wide.Gated("silu")
    for tile in (wide.Tile(128, cluster), wide.Tile(256, cluster)):
        out = wide.multiply(x, weight, bias, tile)
        assert relative_error(out, expected + bias.double()) < 4e-3
        assert torch.equal(out, wide.multiply(x, weight, bias, tile))
        if not has_blocks or outputs % 256 == 0:
            assert relative_error(wide.multiply(x, weight, None, tile, gated=silu), gate(expected)) < 4e-3
    if outputs % 256 == 0:
        rounded = wide.multiply_to_rows(x, weight, None, gated=silu, cluster=cluster)
        assert rounded.scales.shape == (outputs // 256, rows)
        assert relative_error(rounded.decode(torch.float64), gate(expected)) < 4e-2


def draw_choices(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices of experts, the last few of none, as of `GROUP_PAIRS`: ends, and the expert of each row that has one."""
    ids = torch.rand(tokens, NUM_EXPERTS, device="cuda").topk(CHOICES).indices
    ids[-3:] = -1
    order, _, ends = reference.group_pairs(ids, NUM_EXPERTS)
    return ends, ids.flatten()[order.long()][: int(ends[-1])]


def multiply_each(x: torch.Tensor, weight: DeviceCodes, experts: torch.Tensor) -> torch.Tensor:
    """Each row by its expert, in float64; rows are sorted by it."""
    matrices = dequantise(weight, torch.float64).unflatten(0, (NUM_EXPERTS, -1))
    rows = x[: len(experts)].double().split(torch.bincount(experts, minlength=NUM_EXPERTS).tolist())
    return torch.cat([own @ matrix.T for own, matrix in zip(rows, matrices, strict=True)])


@pytest.mark.cuda
@pytest.mark.parametrize("has_blocks", [False, True])
def test_fp8_experts(has_blocks: bool):
    from headrace.kernels.coded_linear import wide

    torch.manual_seed(0)
    tokens, inputs, outputs = 250, 384, 256
    ends, experts = draw_choices(tokens)
    weight = make_fp8(NUM_EXPERTS * outputs, inputs, has_blocks=has_blocks)
    x = quantise_rows(torch.randn(tokens * CHOICES, inputs, device="cuda").bfloat16(), 128 if has_blocks else 0)
    expected, there = multiply_each(x.decode(torch.float64), weight, experts), len(experts)
    silu = wide.Gated("silu")
    for tile in (wide.Tile(128), wide.Tile(256)):
        assert relative_error(wide.multiply(x, weight, None, tile, ends=ends)[:there], expected) < 4e-3
        gated = wide.multiply(x, weight, None, tile, ends=ends, gated=silu)
        assert relative_error(gated[:there], gate(expected)) < 4e-3


def put_evens_first(x: torch.Tensor) -> torch.Tensor:
    """Of each 16 columns, the even ones and then the odd ones."""
    return x.unflatten(1, (-1, 8, 2)).transpose(2, 3).flatten(1)


def compare_mxfp4(
    tile: tuple[int, int], ends: torch.Tensor, experts: torch.Tensor, sizes: tuple[int, int, int], *, is_clamped: bool
) -> None:
    """Products of ``sizes`` (rows, inputs, outputs), of which the first rows have ``experts``: alone and with an
    activation, twice the same."""
    from headrace.kernels.moe import sorted_rows

    num_rows, inputs, outputs = sizes
    weight, there = make_mxfp4(NUM_EXPERTS * 2 * outputs, inputs), len(experts)
    x = torch.randn(num_rows, inputs, device="cuda").bfloat16()
    bias = torch.randn(NUM_EXPERTS, 2 * outputs, device="cuda").bfloat16()
    expected = multiply_each(x, weight, experts) + bias.double()[experts]
    if is_clamped:
        gated, (first, second) = sorted_rows.Gated("clamped", 2.0, 1.702, 1.0), expected.chunk(2, dim=1)
        first, second = first.clamp(max=2.0), second.clamp(-2.0, 2.0)
        activated = first * (1.702 * first).sigmoid() * (second + 1.0)
    else:
        gated, activated = sorted_rows.Gated("silu"), gate(expected)
    operands = (put_evens_first(x), weight, bias, ends, sorted_rows.Tile(*tile))
    for own, values in ((sorted_rows.NOT_GATED, expected), (gated, put_evens_first(activated))):
        out = sorted_rows.multiply(*operands, own)[:there]
        assert relative_error(out, values) < 4e-3
        assert torch.equal(out, sorted_rows.multiply(*operands, own)[:there])


TILES = [(16, 4), (32, 4), (48, 4), (64, 4), (96, 4), (128, 2), (256, 2)]


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("tokens,inputs,outputs", [(40, 400, 144), (300, 256, 272), (70, 128, 64)])
def test_mxfp4_experts(tokens: int, inputs: int, outputs: int, tile: tuple[int, int]):
    torch.manual_seed(0)
    ends, experts = draw_choices(tokens)
    compare_mxfp4(tile, ends, experts, (tokens * CHOICES, inputs, outputs), is_clamped=False)


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", [
    (0, 1, 16, 0, 17), (31, 0, 33, 48, 49), (65, 15, 0, 130, 64), (0, 0, 0, 0, 300), (160, 161, 193, 224, 256),
    (96, 97, 129, 257, 0),
])
def test_mxfp4_experts_with_uneven_rows(counts: tuple[int, ...], tile: tuple[int, int]):
    """As many rows as a product of some width takes, one more, and none; the sizes of gpt-oss."""
    torch.manual_seed(0)
    given = torch.tensor(counts, device="cuda")
    experts = torch.arange(NUM_EXPERTS, device="cuda").repeat_interleave(given)
    compare_mxfp4(tile, given.cumsum(0).int(), experts, (len(experts) + 7, 2880, 720), is_clamped=True)
