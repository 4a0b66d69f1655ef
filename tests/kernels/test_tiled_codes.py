"""Integers in tiles: the layout, every product that takes it, and the choice of it, against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from devices import DEVICES, relative_error

pytest.importorskip("triton")

from headrace.kernels.coded_linear import CODED_FLOAT, CODED_LINEAR, expand, reference, triton
from headrace.kernels.coded_linear.choice import describe_codes, find_solutions, pack_weight
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.forms import CodedWeight, Plan
from headrace.kernels.linear import Norm
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import Gate

KINDS: dict[str, dict[str, Any]] = {
    "int4-32": {"group": 32, "zeros": 7.25}, "int4-64": {"group": 64, "zeros": 8.0}, "int4-128": {"group": 128},
    "int4-order": {"group": 128, "zeros": 8.0, "order": True}, "int4-256": {"group": 256, "zeros": 3.0},
    "int4-32-whole": {"group": 32, "zeros": 7.0}, "int4-all": {"group": 0, "zeros": 8.0},
    "int8-32": {"group": 32, "bits": 8, "signed": True},
    "int8-128": {"group": 128, "bits": 8, "zeros": 128.0}, "int8-all": {"group": 0, "bits": 8, "signed": True},
}


def make(kind: str, outputs: int, inputs: int, device: str = "cpu") -> tuple[DeviceCodes, torch.Tensor]:
    """A weight in tiles and its float64 value. Scales and zero points are numbers that float16 holds."""
    own = KINDS[kind]
    rng = torch.Generator().manual_seed(outputs + inputs)
    bits, group = own.get("bits", 4), own["group"] or inputs
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=rng).to(torch.uint8)
    codes = codes.view(torch.int8) if own.get("signed") else codes
    scales = torch.randint(512, 1536, (outputs, -(-inputs // group)), generator=rng).float() / 4096
    zeros = torch.full_like(scales, own["zeros"]) if "zeros" in own else None
    if zeros is not None:
        zeros[::3] += 1.0
    ids = torch.arange(inputs) // group
    if own.get("order"):
        ids = ids[torch.randperm(inputs, generator=rng)]
    expected = (codes.double() - (0.0 if zeros is None else zeros.double()[:, ids])) * scales.double()[:, ids]
    matrix = CodedMatrix(Code.INT, codes, scales, group, zeros, 1, ids if own.get("order") else None, bits)
    weight = pack_for_device(matrix.to(torch.device(device)))
    assert weight is not None and weight.fault_of_tiles is None
    return weight.tile(), expected


def draw(rows: int, inputs: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """With rows that are not next to one another."""
    return torch.randn(rows, inputs + 8, generator=torch.Generator().manual_seed(rows)).to(device, dtype)[:, :inputs]


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_hold_the_same_numbers(kind: str):
    weight, plain = make(kind, 48, 512)
    assert relative_error(reference.dequantise(weight, torch.float32), plain) < 1e-6
    by_row = weight.untile()
    again = by_row.tile()
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)
    assert not torch.equal(by_row.codes, weight.codes)
    # eight rows' first 64 bytes, then the next
    assert torch.equal(weight.codes.flatten()[64:128], by_row.codes[1, :64])
    assert torch.equal(weight.codes.flatten()[512:576], by_row.codes[0, 64:128])
    stored = CodedWeight(weight, Plan(((1 << 62, "reference"),), 2.0))
    ids = torch.tensor([47, 0, 9])
    assert relative_error(stored.rows(ids, torch.float32), plain[ids]) < 1e-6


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_tiles(kind: str, device: str, dtype: torch.dtype, tolerance: float):
    weight, plain = make(kind, 80, 512, device)
    assert relative_error(expand.expand(weight, dtype), plain) < tolerance
    for rows, splits in ((3, 1), (17, 2)):
        x = draw(rows, 512, device, dtype)
        expected = x.double() @ plain.to(device).T
        assert relative_error(triton.skinny(x, weight, None, splits), expected) < tolerance
        for multiply in (triton.skinny_float, expand.expand_and_multiply_float, reference.coded_float):
            out = multiply(x, weight)
            assert out.dtype == torch.float32 and relative_error(out, expected) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_products_in_float_expand_some_outputs_at_a_time(
    device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
):
    """The shares are whole tiles and multiply alike; each is expanded by itself."""
    weight, plain = make("int4-32", 80, 512, device)
    expanded: list[int] = []
    expand_all = expand.expand

    def note(share: DeviceCodes, into: torch.dtype) -> torch.Tensor:
        expanded.append(share.out_features)
        return expand_all(share, into)

    monkeypatch.setattr(expand, "expand", note)
    monkeypatch.setattr(expand, "MOST_EXPANDED", 39 * 512)
    x = draw(3, 512, device, dtype)
    out = expand.expand_and_multiply_float(x, weight)
    assert expanded == [32, 32, 16] and out.dtype == torch.float32
    assert relative_error(out, x.double() @ plain.to(device).T) < tolerance
    monkeypatch.setattr(reference, "CHUNK_WEIGHTS", 39 * 512)
    assert relative_error(reference.dequantise(weight, torch.float32), plain) < 1e-6
    blocks = DeviceCodes(Code.INT, 64, torch.ones(300, 64, dtype=torch.int8), torch.rand(3, 1), 64, rows=128)
    shares = blocks.split(64 * 130)
    assert [(len(own.codes), len(own.scales)) for own in shares] == [(128, 1), (128, 1), (44, 1)]
    assert torch.equal(torch.cat([reference.dequantise(own, torch.float32) for own in shares]),
                       reference.dequantise(blocks, torch.float32))


def query(weight: DeviceCodes, rows: int = 1, capability: tuple[int, int] = (9, 0)) -> KernelQuery:
    shape = {**describe_codes(weight, torch.bfloat16, capability).shape, "num_rows": rows}
    return KernelQuery("cuda", "bfloat16", capability, shape)


@pytest.mark.parametrize("rows", [1, 9, 64, 300, 4096])
def test_products_in_float_have_a_solution_for_any_number_of_rows(rows: int):
    """For heads of checkpoints: in tiles, row by row, and in FP8."""
    tiled, other = make("int8-32", 48, 512)[0], make("int4-32", 48, 512)[0].untile()
    codes = torch.zeros(48, 512).to(torch.float8_e4m3fn)
    for weight in (tiled, other, DeviceCodes(Code.E4M3, 512, codes, torch.ones(48, 1), 512)):
        asked = describe_codes(weight, torch.bfloat16, (9, 0), in_float=True)
        asked = KernelQuery("cuda", "bfloat16", (9, 0), asked.shape)
        found = find_solutions(asked, rows)
        assert "triton_expand" in found and set(found) <= set(CODED_FLOAT.names())
        assert ("cuda_tiles" in found) == (weight is tiled and rows == 1)


def test_who_takes_tiles():
    weight, _ = make("int4-128", 32, 256)
    for own, takes, refuses in (
        (weight, "cuda_tiles", ("cuda", "triton_gemv_pdl")), (weight.untile(), "cuda", ("cuda_tiles",)),
    ):
        able = [name for name in CODED_LINEAR.names() if CODED_LINEAR.reason_against(name, query(own)) is None]
        assert takes in able and not set(refuses) & set(able)
        assert {"triton_skinny_pdl", "triton_expand", "reference"} <= set(able)
    reason = CODED_LINEAR.reason_against("cuda_tiles", query(weight, rows=9))
    assert reason is not None and "8 rows" in reason
    assert {name for rows in (5, 64) for name in find_solutions(query(weight), rows)} >= {"cuda_tile_block"}
    assert not {name for rows in (4, 65) for name in find_solutions(query(weight), rows)} & {"cuda_tile_block"}
    able = {rows: set(find_solutions(query(weight), rows)) for rows in (32, 33, 1024, 1025)}
    assert [rows for rows, names in able.items() if "cuda_tile_many" in names] == [33, 1024]
    bytes_each, _ = make("int8-128", 32, 256)
    assert not {"cuda_tile_many"} & set(find_solutions(query(bytes_each), 256))
    wide = KernelQuery("cuda", "bfloat16", (9, 0), {"tiled": 1, "in_features": 14336, "num_rows": 8})
    assert "81920 inputs" in str(CODED_LINEAR.reason_against("cuda_tiles", wide))


@pytest.mark.parametrize("outputs,inputs,own,fault", [
    (40, 256, {}, "steps of 16"), (32, 200, {}, "steps of 128"), (32, 384, {"group": 96}, "scales of 32 or 64"),
    (32, 256, {"rows": 2}, "single outputs"), (32, 256, {"zeros": 1 / 3}, "float16"),
    (32, 256, {"code": Code.NF4}, "integers"), (32, 3840, {"group": 1920}, "power of two"),
])
def test_what_tiles_cannot_hold(outputs: int, inputs: int, own: dict[str, Any], fault: str):
    rows, group = own.get("rows", 1), own.get("group", 128)
    scales = torch.full((outputs // rows, -(-inputs // group)), 0.5)
    zeros = torch.full_like(scales, own["zeros"]) if "zeros" in own else None
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
    matrix = CodedMatrix(own.get("code", Code.INT), codes, scales, group, zeros, rows, bits=4)
    weight = pack_for_device(matrix)
    assert weight is not None and fault in str(weight.fault_of_tiles)
    packed = pack_weight(matrix, torch.bfloat16, (9, 0))
    assert packed is not None and not packed.is_tiled


def test_weights_are_tiled_where_kernels_take_tiles(monkeypatch: pytest.MonkeyPatch):
    codes, scales = torch.zeros(32, 256, dtype=torch.uint8), torch.full((32, 2), 0.5)
    matrix = CodedMatrix(Code.INT, codes, scales, 128, bits=4)
    on_cpu = pack_weight(matrix, torch.bfloat16, (9, 0))
    assert on_cpu is not None and not on_cpu.is_tiled
    monkeypatch.setattr(
        "headrace.kernels.coded_linear.choice.describe_codes",
        lambda weight, dtype, capability: query(weight, capability=capability),
    )
    for capability, is_tiled in (((9, 0), True), ((8, 0), False)):
        packed = pack_weight(matrix, torch.bfloat16, capability)
        assert packed is not None and packed.is_tiled == is_tiled
    tiled = pack_weight(matrix, torch.bfloat16, (9, 0))
    assert tiled is not None and tiled.resize(64, 384).is_tiled and not tiled.resize(40, 384).is_tiled


@pytest.mark.parametrize("kind", KINDS)
def test_own_tiled_products_fit_shared_memory(kind: str):
    """Whatever they say that they take."""
    from headrace.kernels.coded_linear import tiles

    for rows in range(1, 9):
        weight = make(kind, 16, 81920 // rows // 1024 * 1024)[0]
        assert "cuda_tiles" in find_solutions(query(weight), rows)
        form = tiles.describe_form(weight)
        shape = tiles.choose_shape(form, rows, weight.in_features)
        fixed = tiles.count_fixed_bytes(form, rows, weight.in_features, shape)
        stages, stage = tiles.count_stages(form, fixed, shape, 1 << 30)
        assert rows * weight.in_features * 2 < fixed + stages * stage <= tiles.MOST_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_own_blocks_of_tiles_fit_shared_memory_and_cover_all_inputs(kind: str):
    from headrace.kernels.coded_linear import tiled_block

    form = tiled_block.describe_form(make(kind, 16, 1024)[0])
    for rows in (5, 16, 17, 32, 33, 64):
        block = tiled_block.choose_block(form, rows)
        used = block.count_bytes(form) + tiled_block.STATIC_BYTES
        assert 8 * block.columns >= rows and used <= tiled_block.MOST_BYTES
        assert block.room * (used + (1 << 10)) <= 228 << 10 and block.stages >= 2
        assert 2 * 4 * 8 * block.columns * block.chunk * form.groups <= tiled_block.STATIC_BYTES
        for units, tiles in ((8, 1), (32, 32), (112, 32), (32, 224), (7, 5)):
            splits = tiled_block.choose_splits(units, tiles, block, 132)
            assert 1 <= splits <= max(1, units // block.chunk) and (splits == 1 or splits * tiles <= 132 * block.room)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_own_blocks_of_tiles(kind: str):
    """As sums and whole, with a bias; outputs and inputs that are no multiples of a block, several tiles of rows."""
    from headrace.kernels.coded_linear import tiled_block

    for rows, outputs, inputs in ((5, 48, 768), (16, 400, 2304), (32, 4096, 4096), (33, 1040, 1280), (64, 256, 14336)):
        weight, plain = make(kind, outputs, inputs, "cuda")
        x, bias = draw(rows, inputs, "cuda", torch.bfloat16), torch.randn(outputs, device="cuda").bfloat16()
        expected = x.double() @ plain.cuda().T
        assert relative_error(tiled_block.multiply(x, weight, bias), expected + bias.double()) < 5e-3
        assert torch.equal(tiled_block.multiply(x, weight, bias), tiled_block.multiply(x, weight, bias))
        sums = tiled_block.multiply_sums(x, weight)
        assert relative_error(sums if sums.dim() == 2 else sums.sum(0), expected) < 5e-3
        wide = tiled_block.multiply_float(x, weight)
        assert wide.dtype == torch.float32 and relative_error(wide, expected) < 5e-4
        if weight.order is None:
            assert relative_error(tiled_block.launch(x, weight, bias, splits=1), expected + bias.double()) < 5e-3
            block = tiled_block.choose_block(tiled_block.describe_form(weight), 16)
            few = tiled_block.launch(x, weight, None, block=block, splits=2)
            assert few.shape == (2, rows, outputs) and relative_error(few.sum(0), expected) < 5e-3


SHORT_KINDS = [kind for kind, own in KINDS.items() if own.get("bits", 4) == 4]


@pytest.mark.parametrize("kind", SHORT_KINDS)
def test_plans_for_many_rows_fit_shared_memory_and_cover_all_inputs(kind: str):
    from headrace.kernels.coded_linear import tiled_many

    form = tiled_many.describe_form(make(kind, 16, 1024)[0])
    for tile in tiled_many.TILES:
        stages, code_stages = tile.count_stages(form)
        assert stages >= 3 and not code_stages and tile.groups * tile.rows <= 512
        assert tile.count_bytes(form) <= tiled_many.MOST_BYTES
    for rows, outputs, inputs in ((33, 16, 128), (65, 48, 640), (256, 4096, 14336), (1000, 6144, 4096)):
        size = tiled_many.Size(rows, outputs, inputs, 132)
        for can_split in (False, True):
            plan = tiled_many.choose_plan(size, can_split=can_split, adds=True)
            units = inputs // 128
            last = units - (plan.splits - 1) * plan.units
            assert 1 <= last <= plan.units and (plan.splits == 1 or can_split)


def fill_stage(boxes: tuple[Any, Any], unit: int, words: int, pair: int) -> torch.Tensor:
    """The bytes of a stage after rows of x, as copies leave them: codes, swizzled by 64 bytes, then scales."""
    parts = []
    for (tensor, box), first in zip(boxes, (unit, words), strict=True):
        part = torch.zeros(box, dtype=torch.uint8)
        inside = tensor[pair : pair + box[0], :, first : first + box[2]]
        part[: len(inside)] = inside
        parts.append(part.flatten())
    place = torch.arange(len(parts[0]))
    parts[0][place ^ (place >> 7 & 3) << 4] = parts[0].clone()
    return torch.cat(parts)


def decode_stage(stage: torch.Tensor, weight: DeviceCodes, groups: int) -> torch.Tensor:
    """The numbers [64 * groups, 128] in bfloat16 that threads of the kernel get, by the addresses that they read."""
    from headrace.kernels.coded_linear import tiled_many

    def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
        return (a.double() * b + c.double()).float().bfloat16()

    form, out = tiled_many.describe_form(weight), torch.empty(64 * groups, 128, dtype=torch.bfloat16)
    thread = torch.arange(128 * groups)
    lane, row = thread % 32, thread // 32 * 16 + thread % 32 // 4
    at, turned, words = row * 64 + lane % 4 * 2, row // 2 % 4 * 16, stage.view(torch.int32)
    table = 64 * groups * 64 + row // 8 * (form.groups * 32) + lane // 4 * 4
    for half, piece, h, high, byte in product(range(2), range(4), range(2), range(2), range(2)):
        place = at + (piece * 16 ^ turned) + half * 512 + h * 8 + byte
        code = stage[place].int() >> 4 if high else stage[place].int() & 15
        word = {1: 0, 2: high, 4: 2 * high + piece // 2}[form.groups]
        own = words[(table + (half * form.groups + word) * 32) // 4]
        pair = own.view(torch.float16).float().view(-1, 2)
        scale, zero = (pair[:, 0], pair[:, 1]) if weight.has_pairs else (own.view(torch.float32), torch.zeros(len(own)))
        if weight.has_whole_zeros:
            first = (scale * 64).bfloat16()
            rest = (scale * 64 - first.float()).bfloat16()
            bits = (code << 4 if high else code).to(torch.int16).view(torch.bfloat16)
            number = fma(bits, 2.0**123 if high else 2.0**127, (zero / -64).bfloat16())
            value = fma(number, first.double(), number * rest)
        else:
            value = ((code + 2048.0) * scale.double() - ((2048 + zero) * scale)).float().bfloat16()
        out[row + 8 * half, 64 * high + 16 * piece + 8 * h + lane % 4 * 2 + byte] = value
    return out


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", SHORT_KINDS)
def test_threads_for_many_rows_find_the_numbers_of_their_rows(kind: str, is_gated: bool):
    """Those rounded once; beyond the last outputs zeros. A stage has the bytes that its barrier waits for."""
    from headrace.kernels.coded_linear import tiled_many

    outputs, inputs = 352, 512
    weight, plain = make(kind, outputs, inputs)
    plain = plain if weight.order is None else plain[:, weight.order]
    form, is_exact = tiled_many.describe_form(weight), weight.has_whole_zeros
    for tile in {tile.groups: tile for tile in tiled_many.TILES}.values():
        boxes = tiled_many.find_boxes(weight, tile, is_gated=is_gated)
        rows = torch.arange(tile.width)
        for pair, unit in product((0, tile.width // 16), range(inputs // 128)):
            word = 0 if form.group == 0 else unit * form.groups // max(1, form.group // 128)
            stage = fill_stage(boxes, unit, word, pair)
            assert len(stage) == tile.count_code_bytes(form)
            eights = pair + rows // 16 + rows // 8 % 2 * (outputs // 16) if is_gated else 2 * pair + rows // 8
            inside = (pair + rows // 16) * 16 < outputs
            found = decode_stage(stage, weight, tile.groups)
            expected = plain[(eights * 8 + rows % 8)[inside], unit * 128 : unit * 128 + 128].float().bfloat16()
            assert not found[~inside].any() and inside.any()
            assert torch.equal(found[inside], expected) if is_exact else relative_error(found[inside], expected) < 2e-4


def test_numbers_of_any_scale_are_rounded_once():
    """But for one in hundreds, whose neighbour is as near: scales of 24 bits, zero points to 127."""
    from headrace.kernels.coded_linear import tiled_many

    rng = torch.Generator().manual_seed(5)
    scales = torch.randn(64, 4, generator=rng).abs() * 0.01
    codes = torch.randint(0, 16, (64, 512), generator=rng, dtype=torch.uint8)
    for zero in (None, 0.0, 127.0):
        zeros = None if zero is None else torch.full_like(scales, zero)
        own = scales if zeros is None else scales.half().float()
        matrix = CodedMatrix(Code.INT, codes, own, 128, zeros, bits=4)
        weight = pack_for_device(matrix)
        assert weight is not None and weight.has_pairs == (zeros is not None)
        boxes = tiled_many.find_boxes(weight.tile(), tiled_many.Tile(128, 1, 4), is_gated=False)
        found = torch.cat([decode_stage(fill_stage(boxes, unit, unit, 0), weight, 1) for unit in range(4)], dim=1)
        plain = (codes.double() - (zero or 0.0)) * own.double().repeat_interleave(128, 1)
        differ = found != plain.float().bfloat16()
        assert differ.double().mean() < 4e-3
        assert ((found.double() - plain).abs() <= plain.abs() * (2.0**-8 + 2.0**-15)).all()


def test_kernels_for_many_rows_are_all_compiled_with_the_first_product(monkeypatch):
    from headrace.kernels.coded_linear import tiled_many

    found = []
    monkeypatch.setattr(tiled_many, "find_kernel", lambda form, is_whole, tile, gate, _: found.append((tile, gate)))
    monkeypatch.setattr(tiled_many, "launch", lambda x, weight, bias, plan, gate=0, **_: (plan.tile, gate))
    monkeypatch.setattr(tiled_many, "count_sms", lambda device: 132)
    weight, gate = make("int4-128", 8192, 1024)[0], tiled_many.GATES["gelu_tanh"]
    for rows in (33, 65, 150, 1024):
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        found.append(tiled_many.multiply_gated(x, weight, None, Gate("gelu_tanh")))
    first, later = found[: len(tiled_many.TILES)], found[len(tiled_many.TILES) :]
    assert set(first) == {(tile, gate) for tile in tiled_many.TILES}
    assert len(later) == 4 and set(later) <= set(first) and len(set(later)) > 1


MANY_SHAPES = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096)}
MANY_TIMES: dict[str, dict[int, dict[tuple[int, int], float]]] = {
    "gate_up": {
        33: {(64, 1): 39.4, (96, 1): 44.0},
        64: {(64, 1): 39.7, (96, 1): 44.2},
        96: {(96, 1): 45.3, (128, 1): 50.1, (64, 1): 73.5},
        128: {(128, 1): 51.0, (192, 1): 72.4, (64, 1): 73.0},
        192: {(192, 1): 68.3, (96, 1): 84.5, (256, 1): 84.8},
        256: {(256, 1): 88.2, (128, 1): 99.3, (96, 1): 125.1},
        512: {(128, 1): 171.5, (256, 1): 174.4, (192, 1): 201.1},
        1024: {(256, 1): 305.1, (128, 1): 374.4, (96, 1): 430.9},
    },
    "down": {
        33: {(64, 8): 22.1, (96, 8): 24.6, (128, 8): 25.1},
        64: {(64, 8): 21.7, (96, 8): 23.3, (128, 4): 24.0},
        96: {(96, 8): 24.4, (128, 4): 24.6, (128, 8): 25.8},
        128: {(128, 4): 25.3, (128, 8): 26.9, (64, 4): 35.5},
        192: {(192, 4): 33.3, (192, 8): 36.2, (96, 4): 40.7},
        256: {(256, 4): 43.1, (128, 2): 45.5, (128, 4): 47.6},
        512: {(256, 2): 77.5, (256, 4): 82.5, (128, 1): 87.1},
        1024: {(256, 2): 159.7, (256, 4): 165.7, (256, 1): 170.3},
    },
    "qkv": {
        33: {(64, 8): 13.0, (64, 4): 14.4, (128, 8): 14.8},
        64: {(64, 8): 13.5, (64, 4): 13.6, (96, 4): 14.6},
        96: {(128, 2): 15.2, (96, 4): 15.5, (128, 8): 15.7},
        128: {(128, 2): 15.6, (128, 4): 16.6, (128, 8): 16.6},
        192: {(192, 2): 20.0, (192, 8): 22.5, (96, 2): 24.5},
        256: {(128, 4): 24.8, (256, 2): 25.8, (128, 1): 28.1},
        512: {(128, 2): 41.4, (256, 4): 42.7, (128, 4): 46.3},
        1024: {(256, 2): 73.4, (128, 1): 78.1, (96, 1): 94.3},
    },
    "o": {
        33: {(64, 8): 9.2, (96, 8): 10.6, (128, 4): 12.3},
        64: {(64, 8): 9.9, (96, 8): 10.6, (128, 4): 10.9},
        96: {(128, 4): 10.8, (128, 8): 11.7, (96, 8): 11.7},
        128: {(128, 4): 10.9, (128, 8): 12.0, (64, 4): 14.2},
        192: {(192, 4): 13.5, (192, 8): 15.8, (96, 4): 16.3},
        256: {(128, 2): 16.2, (256, 4): 16.8, (128, 4): 17.6},
        512: {(256, 2): 26.6, (128, 2): 28.5, (128, 1): 29.1},
        1024: {(256, 2): 50.2, (256, 1): 50.4, (128, 1): 54.5},
    },
}
"""Microseconds of partial sums, of gate and up with SiLU, on an H200, by number of rows and by rows of the tile and
splits: the fastest that were measured."""


@pytest.mark.parametrize("rows", MANY_TIMES["gate_up"])
def test_plans_for_many_rows_are_among_the_fastest_that_were_measured(rows: int):
    """Together; times of the shortest alone differ by as much from one number of rows to the next."""
    from headrace.kernels.coded_linear import tiled_many

    total = least = 0.0
    for shape, times in ((name, found[rows]) for name, found in MANY_TIMES.items()):
        size = tiled_many.Size(rows, *MANY_SHAPES[shape], 132)
        plan = tiled_many.choose_plan(size, can_split=shape != "gate_up", adds=False)
        chosen = times.get((plan.tile.rows, plan.splits))
        assert chosen is not None and chosen <= 1.12 * min(times.values()), (shape, plan)
        assert abs(tiled_many.estimate(size, plan, adds=False) / 1700 - chosen) < 0.13 * chosen, (shape, plan)
        total, least = total + chosen, least + min(times.values())
    assert total <= 1.02 * least


@pytest.mark.cuda
@pytest.mark.parametrize("kind", SHORT_KINDS)
def test_own_products_of_many_rows(kind: str):
    """By every tile, alone or with a bias, as sums and with the activation: outputs that are no multiples of a tile,
    or fewer than a cluster's, rows that fill no tile or some and a part, and shares of inputs of unequal size."""
    from headrace.kernels.coded_linear import tiled_many

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    for rows, outputs, inputs in ((33, 16, 256), (100, 528, 1280), (257, 400, 768), (192, 4096, 4096)):
        weight, plain = make(kind, outputs, inputs, "cuda")
        plain = plain.cuda().bfloat16().double()  # each number is rounded once
        x, bias = draw(rows, inputs, "cuda", torch.bfloat16), torch.randn(outputs, device="cuda").bfloat16()
        product = x.double() @ plain.T
        gate, up = (product + bias.double()).chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate) * up
        assert relative_error(tiled_many.multiply(x, weight, bias), product + bias.double()) < 3e-3
        assert torch.equal(tiled_many.multiply(x, weight, bias), tiled_many.multiply(x, weight, bias))
        sums = tiled_many.multiply_sums(x, weight)
        assert relative_error(sums if sums.dim() == 2 else sums.sum(0), product) < 3e-3
        wide = tiled_many.multiply_float(x, weight)
        assert wide.dtype == torch.float32 and relative_error(wide, product) < 1e-4
        assert relative_error(tiled_many.multiply_gated(x, weight, bias, Gate("silu")), silu) < 5e-3
        if weight.order is not None:
            continue
        for tile in tiled_many.TILES:
            whole, halves = (tiled_many.split_units(tile, inputs // 128, splits) for splits in (1, 2))
            assert whole is not None
            assert relative_error(tiled_many.launch(x, weight, bias, whole), product + bias.double()) < 3e-3
            assert relative_error(tiled_many.launch(x, weight, bias, whole, gate=1), silu) < 5e-3
            if halves is None:
                continue
            parts, half = tiled_many.launch(x, weight, None, halves), halves.units * 128
            assert parts.shape == (2, rows, outputs)
            assert relative_error(parts[0], x[:, :half].double() @ plain[:, :half].T) < 1e-4
            assert relative_error(parts.sum(0), product) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_own_products_with_tiles(kind: str):
    """Alone, with a bias and the activation, and after the norm; several rounds of blocks, and parts of chunks."""
    from headrace.kernels.coded_linear import tiles

    for rows, outputs, inputs in ((1, 48, 256), (3, 160, 1280), (8, 4608, 2304), (5, 4096, 14336)):
        weight, plain = make(kind, outputs, inputs, "cuda")
        plain = plain.cuda()
        x, residual = (draw(rows, inputs, "cuda", torch.bfloat16) for _ in range(2))
        bias, norm = torch.randn(outputs, device="cuda").bfloat16(), torch.rand(inputs, device="cuda").bfloat16()
        expected = x.double() @ plain.T + bias.double()
        assert relative_error(tiles.multiply(x, weight, bias), expected) < 5e-3
        assert torch.equal(tiles.multiply(x, weight, bias), tiles.multiply(x, weight, bias))
        wide = tiles.multiply_float(x, weight)  # bfloat16 would be wrong by 1.6e-3
        assert wide.dtype == torch.float32 and relative_error(wide, x.double() @ plain.T) < 5e-4
        gate, up = expected.chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate) * up
        assert relative_error(tiles.multiply_gated(x, weight, bias, Gate("silu")), silu) < 1e-2
        if weight.order is not None:
            continue
        out, total = tiles.multiply_normalised(x, residual, Norm(norm, 1e-5, 1.0), weight, None)
        added = (x + residual).double()
        normal = added / (added.square().mean(1, keepdim=True) + 1e-5).sqrt() * (norm.double() + 1)
        assert torch.equal(total, x + residual) and relative_error(out, normal @ plain.T) < 1e-2
