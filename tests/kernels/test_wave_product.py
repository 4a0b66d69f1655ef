"""Products of some hundred rows in one wave by own CUDA C++: values against float64 for every kind of tile, rows and
sizes that fill none, and which tile is chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import relative_error
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.forms import CodedWeight, Plan
from headrace.kernels.cuda_source import MOST_BYTES
from headrace.kernels.linear import GATED_LINEAR, LINEAR, wave_product
from headrace.kernels.linear.wave_product import Scales
from headrace.kernels.linear.waves import (
    MOST_ROWS,
    Size,
    Tile,
    choose_tile,
    count_copied_rows,
    estimate,
    estimate_library,
    find_all_fastest,
    find_tiles,
)
from headrace.kernels.operation import KernelQuery
from headrace.layers.build import Build
from headrace.layers.mlp import GatedMlp
from headrace.layers.norm import RmsNorm
from headrace.layers.residual import Residual
from headrace.layers.spec import MlpSpec
from headrace.parallel.group import Group

TILES = [
    Tile(2, 2, 224, True), Tile(4, 1, 112, True), Tile(3, 1, 224, True), Tile(2, 1, 192, True), Tile(1, 1, 256, True),
    Tile(2, 1, 224, False), Tile(2, 1, 112, False), Tile(1, 1, 160, False),
]
TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 1.2e-3, torch.float8_e4m3fn: 6e-3}


@pytest.fixture
def _on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def draw(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows within wider memory that is no number elsewhere."""
    wide = torch.full((rows + 2, inputs + 16), torch.nan, device="cuda").to(dtype)
    wide[:rows, :inputs] = torch.randn(rows, inputs, device="cuda").to(dtype)
    return wide[:rows, :inputs]


def compare(sizes: tuple[int, int, int], tile: Tile, dtype: torch.dtype, activation: str) -> None:
    """A product of ``sizes`` (M, N, K) with float64's."""
    rows, width, inputs = sizes
    torch.manual_seed(sum(sizes))
    x, weight, scales = draw(rows, inputs, dtype), draw(width, inputs, dtype), None
    if dtype != torch.float8_e4m3fn:
        weight *= inputs**-0.5
    expected = x.double() @ weight.double().T
    if dtype == torch.float8_e4m3fn:
        scales = Scales(torch.rand(rows, device="cuda") + 0.5, (torch.rand(width, 1, device="cuda") + 0.5) * 0.05)
        expected *= scales.rows.double()[:, None] * scales.weight.double().T
    if activation:
        gate, up = expected.chunk(2, dim=1)
        expected = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    out = wave_product.multiply(x, weight, tile, activation, scales)
    assert out is not None and out.shape == expected.shape
    assert relative_error(out, expected) < TOLERANCES[dtype], (sizes, tile, dtype, activation)
    assert torch.equal(out, wave_product.multiply(x, weight, tile, activation, scales))


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values(tile: Tile, dtype: torch.dtype):
    most = tile.rows if tile.shares_x else 2 * tile.rows
    for rows, width, inputs, activation in (
        (most, 2 * tile.width, 512, "silu"), (most - 1, 3 * tile.width + 48, 1040, "silu"),
        (max(1, most - 61), tile.width - 16, 4112, "gelu_tanh"), (most - 6, 5 * tile.width + 24, 272, ""),
        (1, 16, 16, ""),
    ):
        compare((rows, width, inputs), tile, dtype, activation)


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
def test_all_rows():
    for rows in range(1, 257, 5):
        for tile in find_tiles(Size(rows, 7168, 2 * 256, True)):
            compare((rows, 7168, 256), tile, torch.bfloat16, "silu")


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [129, 192, 250])
def test_large_weight(rows: int, dtype: torch.dtype):
    for tile in find_tiles(Size(rows, 28672, 4096 * dtype.itemsize, True)):
        compare((rows, 28672, 4096), tile, dtype, "silu")


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("rows", [129, 200, 256])
def test_large_weight_without_an_activation(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Gate and up with factors of eight adapters behind them."""
    multiply, tiles = wave_product.multiply, list[Tile]()
    monkeypatch.setattr(wave_product, "multiply", lambda x, w, tile: tiles.append(tile) or multiply(x, w, tile))
    x, weight = draw(rows, 4096, torch.bfloat16), torch.randn(28928, 4096, device="cuda").bfloat16() / 64
    out = LINEAR.choose(KernelQuery("cuda", "bfloat16", (9, 0), {"in_features": 4096, "out_features": 28672}))(
        x, weight, None
    )
    assert len(tiles) == (rows > 192)
    assert relative_error(out, x.double() @ weight.double().T) < TOLERANCES[torch.bfloat16]


SIZES = st.builds(
    Size, st.integers(1, MOST_ROWS + 8), st.integers(1, 2500).map(lambda n: 16 * n),
    st.integers(1, 1024).map(lambda n: 16 * n), st.booleans(), st.sampled_from([132, 114]),
)


@given(SIZES)
def test_tiles_are_one_wave_and_hold_all_rows(size: Size):
    for tile in find_tiles(size):
        assert tile.count_blocks(size) <= size.num_sms and tile.count_blocks(size) % 2 == 0
        tiles = tile.count_blocks(size) // (1 if tile.shares_x else 2)
        assert tiles * tile.width >= size.width > (tiles - 2) * tile.width
        blocks = 1 if tile.shares_x else 2
        assert blocks * tile.rows >= size.rows > blocks * (tile.rows - 64)
        assert size.rows <= 2 * count_copied_rows(size.rows) <= blocks * tile.rows
        assert tile.stages >= 3 and tile.shared_bytes <= MOST_BYTES
        # sums of a thread, beside what the compiler keeps for addresses; a quarter of a multiprocessor has 2^14
        # registers
        assert tile.high * tile.width // 2 + 26 <= min(255, 2**14 // (32 * tile.warpgroups) // 8 * 8)


@given(SIZES)
def test_chosen_tile_is_the_fastest_and_faster_than_the_library(size: Size):
    chosen, tiles = choose_tile(size), find_tiles(size)
    times = [estimate(size, tile) for tile in tiles]
    assert all(time > 0 for time in times)
    assert (chosen is not None) == bool(times and min(times) < estimate_library(size))
    assert chosen is None or (chosen in tiles and estimate(size, chosen) == min(times))
    prepared = find_all_fastest(size._replace(rows=1))
    assert (chosen is None or chosen in prepared) and len(prepared) <= 6, "few to compile ahead"


@given(SIZES, st.integers(0, 100))
def test_estimates_grow_with_rows(size: Size, more: int):
    larger = size._replace(rows=min(size.rows + more, MOST_ROWS))
    times = [
        [estimate(own, tile) for own in (size, larger) for tile in find_tiles(own) if tile.shares_x is shares_x]
        for shares_x in (True, False)
    ]
    assert size.rows > MOST_ROWS or all(len(own) < 2 or own[0] <= own[1] for own in times)


MEASURED = {
    (129, 28672, 2): (67.1, Tile(3, 1, 224, True), 69.1), (192, 28672, 2): (70.0, Tile(3, 1, 224, True), 81.3),
    (256, 28672, 2): (84.9, Tile(2, 2, 224, True), 101.8), (129, 14336, 2): (37.1, Tile(3, 1, 112, True), 38.0),
    (192, 14336, 2): (38.7, Tile(3, 1, 112, True), 39.8), (256, 14336, 2): (41.9, Tile(2, 1, 224, False), 46.6),
    (129, 14336, 1): (None, Tile(3, 1, 112, True), None), (192, 14336, 1): (None, Tile(3, 1, 112, True), None),
    (256, 14336, 1): (None, Tile(2, 1, 224, False), None),
}
"""On an H200, of 4,096 inputs, by rows, rows of the weight and bytes of a number: microseconds with silu, the fastest
tile, and microseconds of torch's GEMM and the activation's kernel. FP8 was measured with a kernel more."""


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_estimates_are_near_measured_times(case: tuple[int, int, int]):
    rows, width, itemsize = case
    size, (time, tile, library) = Size(rows, width, 4096 * itemsize, True), MEASURED[case]
    assert choose_tile(size) == tile
    assert time is None or abs(estimate(size, tile) * 1e6 / time - 1) < 0.05
    assert library is None or abs(estimate_library(size) * 1e6 / library - 1) < 0.15


def test_choice():
    chosen = choose_tile(Size(256, 28672, 8192, True))
    assert chosen == Tile(2, 2, 224, True) and chosen.count_blocks(Size(256, 28672, 8192, True)) == 128
    assert choose_tile(Size(257, 28672, 8192, True)) is None, "more rows than tiles have"
    assert choose_tile(Size(256, 37888, 7168, True)) is None, "sums of one wave do not fit into registers"
    assert choose_tile(Size(256, 4096, 28672, False)) is None, "tiles would be narrow, and read rows of x too often"
    for width, inputs in ((24576, 4096), (12288, 4096), (18944, 3584), (28672, 8192)):
        for itemsize in (1, 2):
            assert all(choose_tile(Size(rows, width, inputs * itemsize, True)) for rows in (129, 200, 256))
    assert choose_tile(Size(256, 57344, 16384, True)) is None and choose_tile(Size(256, 7168, 16384, True)) is None
    assert find_all_fastest(Size(129, 28672, 8192, True)) == (Tile(3, 1, 224, True), Tile(2, 2, 224, True))
    assert find_all_fastest(Size(129, 37888, 7168, True)) == ()


def test_first_product_compiles_for_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.linear import gated_product

    found: list[tuple[Tile, torch.dtype, str]] = []
    monkeypatch.setattr(wave_product, "find_kernel", lambda *asked: found.append(asked[:3]))
    monkeypatch.setattr(wave_product, "count_sms", lambda device: 132)
    monkeypatch.setattr(gated_product, "takes", lambda *_: False)
    monkeypatch.setattr(gated_product.hopper, "gated_linear", lambda *_: None)
    x, weight = (torch.empty(own, 1024, dtype=torch.float16, device="meta") for own in (3, 28672))
    for _ in range(2):
        assert gated_product.gated_linear(x, weight, None, "silu") is None
    assert found == [(tile, torch.float16, "silu") for tile in (Tile(3, 1, 224, True), Tile(2, 2, 224, True))]
    assert gated_product.gated_linear(x, weight[:8192], None, "silu") is None
    assert len(found) == 2, "the Gluon kernel takes all rows of a small weight"


class FirstOfTwo(Group):
    """A rank without the other."""

    rank, size = 0, 2

    def reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, residual


def test_half_of_two_ranks_reaches_it(monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.linear import gated_product

    found: list[Tile] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, tile: Tile, activation: str) -> torch.Tensor:
        assert activation == "silu" and weight.shape == (14336, 4096)
        found.append(tile)
        return x.new_empty(len(x), 7168)

    monkeypatch.setattr(wave_product, "multiply", multiply)
    monkeypatch.setattr(wave_product, "find_kernel", lambda *_: None)
    monkeypatch.setattr(wave_product, "count_sms", lambda _: 132)
    monkeypatch.setattr(gated_product, "count_clusters", lambda _: 66)
    group, shape = FirstOfTwo(), {"in_features": 4096, "out_features": 14336}
    assert GATED_LINEAR.reason_against("cuda", KernelQuery("cuda", "bfloat16", (9, 0), shape)) is None
    build = Build(torch.device("meta"), torch.bfloat16, tensor=group)
    mlp, norm = GatedMlp(MlpSpec(14336, "silu"), 4096, build), RmsNorm(build, 4096, 1e-5)
    mlp.gate_up._gated_linear = gated_product.gated_linear
    for rows in (129, 192, 200, 256, 257):
        stream, pending = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
        residual = Residual(stream, pending)
        residual.group = group
        mlp.add(norm, residual)
    assert found == 2 * [Tile(3, 1, 112, True)] + 2 * [Tile(2, 1, 224, False)], "257 rows are torch's"


@pytest.mark.parametrize("rows", [129, 256, 257])
def test_half_of_two_ranks_in_fp8_reaches_it(rows: int, monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.coded_linear import scaled

    found: list[tuple[Tile, str]] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, tile: Tile, activation: str, scales: Scales) -> torch.Tensor:
        assert x.dtype == weight.dtype == torch.float8_e4m3fn and scales.rows.shape == (rows,)
        found.append((tile, activation))
        return torch.ones(rows, 7168, dtype=torch.bfloat16, device="meta")

    monkeypatch.setattr(wave_product, "multiply", multiply)
    monkeypatch.setattr(wave_product, "find_kernel", lambda *_: None)
    monkeypatch.setattr(wave_product, "count_sms", lambda _: 132)
    monkeypatch.setattr(scaled, "quantise_rows", lambda x, group: Fp8Rows(
        x.to(torch.float8_e4m3fn), torch.empty(len(x), device="meta")
    ))
    group = FirstOfTwo()
    build = Build(torch.device("meta"), torch.bfloat16, tensor=group)
    mlp, norm = GatedMlp(MlpSpec(14336, "silu"), 4096, build), RmsNorm(build, 4096, 1e-5)
    codes = torch.empty(14336, 4096, dtype=torch.float8_e4m3fn, device="meta")
    weight = DeviceCodes(Code.E4M3, 4096, codes, torch.empty(14336, 1, device="meta"), 4096)
    mlp.gate_up.stored = CodedWeight(weight, Plan(((256, "cuda_wave"), (1 << 62, "scaled_mm")), 2.0))
    del mlp.gate_up.weight
    stream, pending = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    residual = Residual(stream, pending)
    residual.group = group
    mlp.add(norm, residual)
    tile = Tile(3, 1, 112, True) if rows == 129 else Tile(2, 1, 224, False)
    assert found == ([(tile, "silu")] if rows <= 256 else [])


def reason_against_fp8(outputs: int, num_rows: int, capability: tuple[int, int] = (9, 0), **shape: int) -> str | None:
    from headrace.kernels.coded_linear import CODED_LINEAR

    shape = {
        "in_features": 4096, "out_features": outputs, "bits": 8, "is_float": 1, "group": 4096, "rows": 1,
        "num_rows": num_rows, **shape,
    }
    return CODED_LINEAR.reason_against("cuda_wave", KernelQuery("cuda", "bfloat16", capability, shape))


def test_offered_for_fp8_weights_that_fill_the_device():
    assert reason_against_fp8(28672, 256) is None and reason_against_fp8(28672, 129) is None
    assert reason_against_fp8(28672, 64) and reason_against_fp8(28672, 257) and reason_against_fp8(4096, 256)
    assert reason_against_fp8(28672, 256, group=128) and reason_against_fp8(28672, 256, rows=128)
    assert reason_against_fp8(28672, 256, (8, 9)) and reason_against_fp8(28672, 256, (10, 0))


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
def test_chosen_for_large_weights():
    from headrace.kernels.linear import gated_product

    weight = draw(28672, 1024, torch.bfloat16).contiguous() / 32
    for rows, is_fused in ((200, True), (300, False)):
        x = draw(rows, 1024, torch.bfloat16)
        out = gated_product.gated_linear(x, weight, None, "silu")
        assert (out is not None) == is_fused
        if out is not None:
            gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
            assert relative_error(out, F.silu(gate) * up) < 6e-3
    bias = torch.zeros(28672, device="cuda", dtype=torch.bfloat16)
    assert gated_product.gated_linear(draw(200, 1024, torch.bfloat16), weight, bias, "silu") is None


@pytest.mark.cuda
@pytest.mark.usefixtures("_on_hopper")
def test_fp8_solutions():
    from headrace.kernels.coded_linear import CODED_LINEAR, FP8_GATED, FP8_LINEAR
    from headrace.kernels.coded_linear.codes import Code
    from headrace.kernels.coded_linear.device_codes import DeviceCodes
    from headrace.kernels.coded_linear.reference import dequantise, quantise_rows

    torch.manual_seed(0)
    codes = (torch.randn(7168, 1024, device="cuda") * 60).to(torch.float8_e4m3fn)
    weight = DeviceCodes(Code.E4M3, 1024, codes, torch.rand(7168, 1, device="cuda") * 1e-3, 1024)
    bias = torch.randn(7168, device="cuda").bfloat16()
    for num_rows in (129, 256, 300):  # the last are torch's
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
        rows = quantise_rows(x, 0)
        product = rows.decode(torch.float64) @ dequantise(weight, torch.float64).T
        for own in (None, bias):
            expected = product if own is None else product + own.double()
            gate, up = expected.chunk(2, dim=1)
            out = FP8_LINEAR.load("cuda_wave")(rows, weight, own, torch.bfloat16)
            gated = FP8_GATED.load("cuda_wave")(rows, weight, own, torch.bfloat16, "silu")
            assert relative_error(out, expected) < 6e-3 and relative_error(gated, F.silu(gate) * up) < 8e-3
            assert relative_error(CODED_LINEAR.load("cuda_wave")(x, weight, own), expected) < 2e-2


@pytest.mark.parametrize("width, rows, is_chosen", [
    (28928, 250, True), (28928, 193, True), (28928, 129, False), (28928, 64, False), (28928, 257, False),
    (30720, 250, False), (6528, 250, False),
])
def test_products_alone_with_weights_of_a_wave(
    width: int, rows: int, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
):
    """Gate and up with factors of eight adapters behind them fit into one wave, with those of 64 not."""
    found, compiled = [], list[Tile]()
    monkeypatch.setattr(wave_product, "count_sms", lambda _: 132)
    monkeypatch.setattr(wave_product, "find_kernel", lambda tile, *_: compiled.append(tile))
    monkeypatch.setattr(wave_product, "multiply", lambda x, weight, tile: found.append(tile) or x)
    x, weight = (torch.empty(n, 4096, device="meta", dtype=torch.bfloat16) for n in (rows, width))
    monkeypatch.setattr(wave_product, "can_describe", lambda *_, **__: True)
    out = wave_product.linear(x, weight, None)
    assert (out is not None) == is_chosen == bool(found)
    assert wave_product.linear(x, weight, torch.empty(width, device="meta")) is None, "takes no bias"
