"""K types with their scales in two levels: the layout, every product that takes it, and the choice of it, against the
numbers that the gguf package says."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from devices import DEVICES, relative_error
from kernels.test_packed_blocks import draw_blocks, expected_of
from kernels.test_tiled_codes import draw, fill_stage, query

pytest.importorskip("triton")

from headrace.kernels.coded_linear import CODED_FLOAT, CODED_LINEAR, choice, expand, reference, tiled_block, tiles
from headrace.kernels.coded_linear.choice import find_solutions, pack_parts
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Supers
from headrace.kernels.coded_linear.forms import CodedWeight, Plan
from headrace.kernels.coded_linear.super_blocks import SUPERS, pack_supers
from headrace.kernels.linear import Norm
from headrace.kernels.packed_linear.blocks import WeightBlocks
from headrace.kernels.rowwise import Gate
from headrace.layers.quantization.blocks import BlockTensor
from headrace.parallel.cut import Cut
from headrace.parallel.share import Share

BITS = {"Q3_K": 4.5625, "Q4_K": 4.5, "Q5_K": 6.5, "Q6_K": 6.5625}
"""A weight, on a GPU."""
MIXTURES = {
    **{kind: ((kind, 48),) for kind in BITS}, "Q4_K_M": (("Q4_K", 64), ("Q4_K", 16), ("Q6_K", 32)),
    "Q6_K, Q5_K": (("Q6_K", 32), ("Q5_K", 48)),
}
"""Types and outputs of parts, as a stacked weight has them."""


def make(name: str, inputs: int, device: str = "cpu") -> tuple[DeviceCodes, torch.Tensor]:
    """A weight in tiles, and its numbers as the gguf package says, float32."""
    blocks = [draw_blocks(kind, rows, inputs) for kind, rows in MIXTURES[name]]
    weight = pack_supers(blocks, torch.device(device))
    assert weight is not None and weight.fault_of_tiles is None
    return weight.tile(), torch.cat([expected_of(part) for part in blocks])


@pytest.mark.parametrize("name", MIXTURES)
def test_numbers_are_those_of_the_file(name: str):
    """All of them exactly, in tiles and row by row, whole and in shares."""
    weight, expected = make(name, 1024)
    assert torch.equal(reference.dequantise(weight, torch.float32), expected)
    by_row = weight.untile()
    assert torch.equal(reference.dequantise(by_row, torch.float32), expected)
    again = by_row.tile()
    for own, other in zip(weight.parts, again.parts, strict=True):
        assert torch.equal(own.codes, other.codes) and torch.equal(own.scales, other.scales)
    shares = weight.split(33 * 1024)
    assert len(shares) > 1 and all(share.tail is None for share in shares)
    assert torch.equal(torch.cat([reference.dequantise(share, torch.float32) for share in shares]), expected)
    bits = sum(BITS[kind] * rows for kind, rows in MIXTURES[name]) / len(expected)
    assert weight.num_bytes * 8 == bits * expected.numel() and weight.out_features == len(expected)
    copy = weight.copy()
    assert copy.codes.data_ptr() != weight.codes.data_ptr() and copy.num_bytes == weight.num_bytes
    assert torch.equal(reference.dequantise(copy, torch.float32), expected)
    stored = CodedWeight(weight, Plan(((1 << 62, "reference"),), 2.0))
    ids = torch.tensor([len(expected) - 1, 0, 33, 47])
    assert torch.equal(stored.rows(ids, torch.float32), expected[ids])
    stored.move(torch.device("cpu"))
    assert torch.equal(stored.unpack(torch.float32), expected)


def read_bits(table: bytes, first: int, count: int) -> int:
    return int.from_bytes(table, "little") >> first & (1 << count) - 1


@pytest.mark.parametrize("kind", BITS)
def test_each_byte_lies_where_kernels_read_it(kind: str):
    """One weight at a time, by the addresses that the layout states."""
    weight, expected = make(kind, 512)
    supers = SUPERS[kind]
    codes, scales = (bytes(table.flatten().tolist()) for table in (weight.codes, weight.scales))
    unit_bytes, table_bytes = (768, 512)[supers.bits == 4], (144, 128)[supers.has_mins]
    for row, column in ((0, 0), (7, 63), (8, 64), (21, 127), (30, 128), (47, 255), (13, 300), (46, 511), (5, 206)):
        eight, r = divmod(row, 8)
        unit, at = divmod(column, 128)
        plane, piece, place = at // 64, at % 64 // 16, at % 16
        base = (eight * 4 + unit) * unit_bytes
        near, far = base + r * 64 + piece * 16, base + 512 + r * 32 + piece * 8
        if supers.bits == 4:
            code = codes[near + place] >> 4 * plane & 15
        else:
            words = [near, near + 4, near + 8] if plane == 0 else [near + 12, far, far + 4]
            word, byte = divmod(place, 4)
            three = [codes[first + byte] for first in words]
            code = three[word] >> 2 if word < 3 else (three[0] & 3) << 4 | (three[1] & 3) << 2 | three[2] & 3
        table = scales[(eight * 2 + column // 256) * table_bytes :][:table_bytes]
        if supers.has_mins:
            own = table[r * 16 : r * 16 + 16]
            factor, least = torch.frombuffer(bytearray(own[:4]), dtype=torch.float16).float()
            first = 24 * (unit % 2 * 2 + piece // 2) + 6 * plane
            scale, low = read_bits(own[4:], first, 6), read_bits(own[4:], first + 12, 6)
            value = factor * scale * code - least * low
        else:
            code -= (1 << supers.bits) * (code >> supers.bits - 1)
            scale = table[r * 16 + unit % 2 * 8 + piece * 2 + plane]
            factor = torch.frombuffer(bytearray(table[128 + 2 * r : 130 + 2 * r]), dtype=torch.float16).float()[0]
            value = factor * (scale - 256 * (scale >> 7)) * code
        assert value == expected[row, column], (row, column)


def test_which_weights_are_kept_so(monkeypatch: pytest.MonkeyPatch):
    """Where a kernel takes them; otherwise in one level, as all other types."""
    cpu = torch.device("cpu")
    blocks = {kind: draw_blocks(kind, 32, 512) for kind in (*SUPERS, "Q2_K", "Q8_0")}
    assert pack_supers([blocks["Q4_K"], blocks["Q2_K"]], cpu) is None
    assert pack_supers([blocks["Q4_K"], blocks["Q6_K"], blocks["Q4_K"]], cpu) is None
    monkeypatch.setattr(choice, "describe_codes", lambda weight, dtype, capability: query(weight, 1, capability))

    def pack(*kinds: str, rows: int = 32, capability: tuple[int, int] = (9, 0)) -> DeviceCodes:
        parts = [WeightBlocks(kind, blocks[kind].raw[:rows]) for kind in kinds]
        packed = pack_parts(parts, cpu, torch.bfloat16, capability)
        assert packed is not None
        expected = torch.cat([expected_of(part) for part in parts])
        assert relative_error(reference.dequantise(packed, torch.float32), expected.double()) < 1e-2
        return packed

    for kinds in (["Q4_K"], ["Q4_K", "Q4_K", "Q6_K"], ["Q3_K"], ["Q5_K", "Q6_K"]):
        packed = pack(*kinds)
        assert packed.supers == SUPERS[kinds[0]] and packed.is_tiled and packed.group == packed.supers.group
        assert (packed.tail is not None) == (len(set(kinds)) > 1)
    for packed in (
        pack("Q4_K", capability=(8, 0)), pack("Q4_K", rows=24), pack("Q4_K", "Q8_0"), pack("Q4_K", "Q6_K", "Q4_K"),
        pack("Q2_K"),
    ):
        assert packed.supers is None and packed.tail is None
    assert pack_parts([blocks["Q4_K"], draw_blocks("IQ4_NL", 16, 512)], cpu, torch.bfloat16, (9, 0)) is None


@pytest.mark.parametrize("kind", BITS)
def test_shares_of_ranks_are_kept_so(kind: str):
    """Outputs, and whole super-blocks of inputs; a cut through these gives plain numbers."""
    blocks = draw_blocks(kind, 64, 1024)
    expected, whole = expected_of(blocks), BlockTensor(blocks, torch.float32, lambda: expected_of(blocks))
    for rows, columns in (((16, 48), (0, 1024)), ((0, 64), (256, 768))):
        own = whole.keep(Cut.of((Share(64, *rows), Share(1024, *columns))))
        assert isinstance(own, BlockTensor)
        weight = pack_supers([own.blocks], torch.device("cpu"))
        assert weight is not None and weight.tile().is_tiled
        kept = expected[slice(*rows), slice(*columns)]
        assert torch.equal(reference.dequantise(weight.tile(), torch.float32), kept)
    part = whole.keep(Cut.of((64, Share(1024, 128, 512))))
    assert not isinstance(part, BlockTensor) and torch.equal(part, expected[:, 128:512])


def test_sizes_that_other_shapes_are_compiled_with():
    weight, _ = make("Q4_K_M", 512)
    other = weight.resize(64, 768)
    assert other is not None and other.tail is None and other.is_tiled and other.supers == weight.supers
    assert not reference.dequantise(other, torch.float32).any() and other.num_bytes == 64 * 768 * 4.5 / 8
    assert weight.resize(64, 384) is None and weight.resize(40, 512) is None


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("name", MIXTURES)
def test_products_that_expand(name: str, device: str, dtype: torch.dtype, tolerance: float):
    """Five units of 128 inputs more than a program takes, and outputs that are no multiple of its."""
    weight, expected = make(name, 768, device)
    assert relative_error(expand.expand(weight, dtype), expected.double()) < tolerance
    if dtype == torch.float32:
        assert torch.allclose(expand.expand(weight, dtype).cpu(), expected, rtol=1e-6, atol=1e-7)
    x = draw(3, 768, device, dtype)
    plain = x.double() @ expected.double().to(device).T
    assert relative_error(expand.expand_and_multiply(x, weight, None), plain) < tolerance
    for multiply in (expand.expand_and_multiply_float, reference.coded_float):
        out = multiply(x, weight)
        assert out.dtype == torch.float32 and relative_error(out, plain) < tolerance


@pytest.mark.parametrize("name", MIXTURES)
def test_who_takes_them(name: str):
    """One solution for any number of rows at least; those that know scales in one level alone take none."""
    weight, _ = make(name, 512)
    for rows in (1, 2, 8, 9, 64, 200, 1000, 5000):
        found = find_solutions(query(weight), rows)
        assert {"triton_expand", "reference"} <= set(found)
        assert set(found) <= {"cuda_tiles", "cuda_tile_block", "cuda_tile_many", "triton_expand", "reference"}
        assert ("cuda_tiles" in found) == (rows <= 8) and ("cuda_tile_block" in found) == (2 <= rows <= 256)
        assert ("cuda_tile_many" in found) == (33 <= rows <= 1024)
        assert set(found) <= set(CODED_FLOAT.names())
    wide = query(make(name, 14336)[0], 5)
    assert CODED_LINEAR.reason_against("cuda_tiles", wide) is None
    assert "71680 inputs" in str(CODED_LINEAR.reason_against("cuda_tiles", query(make(name, 14336)[0], 6)))


def test_rows_of_two_forms_have_no_gate(monkeypatch: pytest.MonkeyPatch):
    """A tile has eight rows of gate and eight of up: layers then launch the activation by itself."""
    weight, _ = make("Q4_K_M", 512)
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    assert tiles.multiply_gated(x, weight, None, Gate("silu")) is None
    stored = CodedWeight(weight, Plan(((1 << 62, "cuda_tiles"),), 2.0))
    norm = Norm(torch.ones(512, dtype=torch.bfloat16), 1e-5)
    assert stored.normalise(x, x, norm, None, "silu") is None and stored.gate(x, None, Gate("silu")) is None
    # nor does the check at a start ask for it
    asked: list[str] = []

    def multiply(x: torch.Tensor, residual: torch.Tensor, norm: Norm, own: object, bias: None, activation: str = ""):
        asked.append(activation)
        return x, residual

    monkeypatch.setattr(choice.CODED_NORM_LINEAR, "load", lambda name: multiply)
    assert choice._call_fused("cuda_tiles", x, weight) == (None, (x, x)) and asked == [""]


@pytest.mark.parametrize("name", MIXTURES)
def test_own_products_fit_shared_memory(name: str):
    """Whatever they say that they take: as many rows of x as there are, and two pieces of the weight at least."""
    for rows in range(1, 9):
        inputs = 71680 // rows // 256 * 256
        form = tiles.describe_form(make(name, 256)[0])
        shape = tiles.choose_shape(form, rows, inputs)
        fixed = tiles.count_fixed_bytes(form, rows, inputs, shape)
        stages, stage = tiles.count_stages(form, fixed, shape, 1 << 30)
        assert shape.chunk % 2 == 0 and stages >= 2, "a super-block has two units"
        assert rows * inputs * 2 < fixed + stages * stage <= tiles.MOST_BYTES
        # codes and scales of sixteen rows
        units = shape.chunk * 128 * 16
        parts = [BITS[kind] for kind, _ in MIXTURES[name]]
        assert stage == units * max(parts) / 8 + tiles.BARRIER_BYTES
    for rows in (2, 16, 17, 32, 33, 64, 200):
        form = tiled_block.describe_form(make(name, 512)[0])
        block = tiled_block.choose_block(form, rows)
        used = block.count_bytes(form) + tiled_block.STATIC_BYTES
        assert used <= tiled_block.MOST_BYTES and block.room * (used + (1 << 10)) <= 228 << 10 and block.stages >= 2


def read_six(stage: torch.Tensor, near: torch.Tensor, far: torch.Tensor, plane: int, at: torch.Tensor) -> torch.Tensor:
    """Codes ``at`` of 16 of 6 bits, whose words begin at ``near`` and ``far``."""
    places = [near + 12, far, far + 4] if plane else [near, near + 4, near + 8]
    words = torch.stack([stage[place + at % 4].int() for place in places])
    last = (words[0] & 3) << 4 | (words[1] & 3) << 2 | words[2] & 3
    return torch.where(at < 12, words.gather(0, (at // 4).clamp(max=2)[None])[0] >> 2, last)


def read_terms(
    stage: torch.Tensor, table: torch.Tensor, r: torch.Tensor, supers: Supers, unit: int, piece: int, plane: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """256 times the scale, and the min, of threads whose eights' scales lie at ``table``; float32."""
    if not supers.has_mins:
        scale = stage[table + r * 16 + unit % 2 * 8 + piece * 2 + plane].view(torch.int8)
        factor = stage[(table + 128 + r * 2)[:, None] + torch.arange(2)].view(torch.float16).float()
        return scale * (256 * factor[:, 0]), torch.zeros(len(r))
    own = stage[(table + r * 16)[:, None] + torch.arange(16)]
    factors = own[:, :4].contiguous().view(torch.float16).float()
    three = own[:, 4 + 3 * (unit % 2 * 2 + piece // 2) :][:, :3].int()
    bits = (three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16) >> 6 * plane
    return factors[:, 0] * 256 * (bits & 63), factors[:, 1] * (bits >> 12 & 63)


def make_numbers(code: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, supers: Supers) -> torch.Tensor:
    """Numbers of the weight in bfloat16 by the kernels' arithmetic; of codes from 0 on."""

    def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (a.double() * b.double() + c.double()).float().bfloat16()

    high = scale.bfloat16()
    low, one = (scale - high.float()).bfloat16(), torch.ones_like(high)
    if not supers.has_mins:
        number = fma(code / 256, one, torch.full_like(high, -(2.0 ** (supers.bits - 9))))
        return fma(number, high, (number.double() * low.double()).float().bfloat16())
    grid = 3072.0 if supers.bits == 4 else 12288.0
    zero = ((least / scale).nan_to_num(0.0).clamp(0, 1) + grid - grid).bfloat16()
    rest = (zero.double() * scale.double() - least.double()).float().bfloat16()
    number = fma(code / 256, one, -zero)
    assert torch.equal(number.double(), code.double() / 256 - zero.double()) or (zero > 0.99).any()
    return fma(number, high, fma(number, low, rest))


def decode_stage(stage: torch.Tensor, supers: Supers, groups: int, unit: int) -> torch.Tensor:
    """The numbers [64 * groups, 128] in bfloat16 that threads of ``tiled_many.cu`` get, by the addresses that they
    read."""
    out, thread = torch.empty(64 * groups, 128, dtype=torch.bfloat16), torch.arange(128 * groups)
    lane, row = thread % 32, thread // 32 * 16 + thread % 32 // 4
    r, unit_bytes = row % 8, 128 * supers.bits
    for half, piece, h, plane, byte in product(range(2), range(4), range(2), range(2), range(2)):
        at, eight = h * 8 + lane % 4 * 2 + byte, row // 8 + half
        if supers.bits == 4:
            code = stage[eight * 512 + r * 64 + (piece * 16 ^ r // 2 * 16) + at].int() >> 4 * plane & 15
        else:
            near = eight * 768 + r * 64 + ((piece ^ 2 * half) * 16 ^ r // 2 * 16)
            far = eight * 768 + 512 + (r * 32 ^ r // 4 * 16 ^ (piece // 2 * 16 + half * 32)) + piece % 2 * 8
            code = read_six(stage, near, far, plane, at)
        code = code if supers.has_mins else code ^ 1 << supers.bits - 1
        table = 8 * groups * unit_bytes + eight * 8 * supers.row_bytes
        scale, least = read_terms(stage, table, r, supers, unit, piece, plane)
        out[row + 8 * half, 64 * plane + 16 * piece + at] = make_numbers(code, scale, least, supers)
    return out


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", BITS)
def test_threads_for_many_rows_find_the_numbers_of_their_rows(kind: str, is_gated: bool):
    """Rounded once, nearly; also of the second half of a super-block, zeros beyond the last outputs. A stage has the
    bytes that its barrier waits for."""
    from headrace.kernels.coded_linear import tiled_many

    outputs, supers = 352, SUPERS[kind]
    blocks = draw_blocks(kind, outputs, 512)
    weight, plain = pack_supers([blocks], torch.device("cpu")), expected_of(blocks)
    assert weight is not None
    weight, form = weight.tile(), tiled_many.describe_form(weight)
    for tile in {tile.groups: tile for tile in tiled_many.TILES}.values():
        boxes, rows = tiled_many.find_boxes(weight, tile, is_gated=is_gated), torch.arange(tile.width)
        for pair, unit in product((0, tile.width // 16), range(4)):
            stage = fill_stage(boxes, unit, unit // 2, pair)
            assert len(stage) == tile.count_code_bytes(form)
            assert 0 <= tile.count_room(form) - len(stage) < tiled_many.CODE_STEP
            eights = pair + rows // 16 + rows // 8 % 2 * (outputs // 16) if is_gated else 2 * pair + rows // 8
            inside = (pair + rows // 16) * 16 < outputs
            expected = plain[(eights * 8 + rows % 8)[inside], 128 * unit : 128 * unit + 128]
            found = decode_stage(stage, supers, tile.groups, unit)
            assert not found[~inside].any() and inside.any()
            once = expected.bfloat16()
            assert relative_error(found[inside], expected.double()) < 1.001 * relative_error(once, expected.double())
            assert (found[inside] != once).double().mean() < 0.02


@pytest.mark.parametrize("name", MIXTURES)
def test_plans_for_many_rows_fit_shared_memory(name: str):
    from headrace.kernels.coded_linear import tiled_many

    weight, _ = make(name, 512)
    form = tiled_many.describe_form(weight)
    for tile in tiled_many.TILES:
        stages, code_stages = tile.count_stages(form)
        assert stages >= 3 and tile.count_bytes(form) <= tiled_many.MOST_BYTES
        # three stages of 256 rows hold codes of 4 bits, but of 6 two
        assert code_stages == (2 if tile.rows == 256 and not {2, 4}.isdisjoint(form[3:]) else 0)
        size = tiled_many.measure_size(200, weight, 132)
        assert sum((size.outputs - size.tail, size.tail)) == weight.out_features
        # a cluster has outputs of one form
        assert tiled_many.count_items(tile, size) == len(weight.parts) * -(-200 // tile.rows)


@pytest.mark.cuda
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("rows,inputs", [(1, 256), (1, 4096), (2, 2304), (3, 1280), (5, 14336), (8, 8960)])
def test_own_products_of_few_rows(name: str, rows: int, inputs: int):
    """Alone, with a bias and the activation, and after the norm; several rounds of blocks, and parts of chunks."""
    weight, plain = make(name, inputs, "cuda")
    plain = plain.cuda().double()
    x, residual = (draw(rows, inputs, "cuda", torch.bfloat16) for _ in range(2))
    x[0, 7] = 60.0
    bias, norm = torch.randn(len(plain), device="cuda").bfloat16(), torch.rand(inputs, device="cuda").bfloat16()
    expected = x.double() @ plain.T + bias.double()
    assert relative_error(tiles.multiply(x, weight, bias), expected) < 5e-3
    assert torch.equal(tiles.multiply(x, weight, bias), tiles.multiply(x, weight, bias))
    wide = tiles.multiply_float(x, weight)
    assert wide.dtype == torch.float32 and relative_error(wide, x.double() @ plain.T) < 5e-4
    if weight.tail is None:
        gate, up = expected.chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate) * up
        assert relative_error(tiles.multiply_gated(x, weight, bias, Gate("silu")), silu) < 1e-2
    out, total = tiles.multiply_normalised(x, residual, Norm(norm, 1e-5, 1.0), weight, None)
    added = (x + residual).double()
    normal = added / (added.square().mean(1, keepdim=True) + 1e-5).sqrt() * (norm.double() + 1)
    assert torch.equal(total, x + residual) and relative_error(out, normal @ plain.T) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    "rows,inputs", [(2, 256), (5, 768), (16, 2304), (32, 4096), (33, 1280), (64, 14336), (130, 768)]
)
def test_own_blocks_of_tens_of_rows(name: str, rows: int, inputs: int):
    """As sums and whole, with a bias: numbers of the weight are rounded once."""
    weight, plain = make(name, inputs, "cuda")
    plain = plain.cuda().bfloat16().double()
    x, bias = draw(rows, inputs, "cuda", torch.bfloat16), torch.randn(len(plain), device="cuda").bfloat16()
    expected = x.double() @ plain.T
    assert relative_error(tiled_block.multiply(x, weight, bias), expected + bias.double()) < 5e-3
    assert torch.equal(tiled_block.multiply(x, weight, bias), tiled_block.multiply(x, weight, bias))
    sums = tiled_block.multiply_sums(x, weight)
    assert relative_error(sums if sums.dim() == 2 else sums.sum(0), expected) < 3e-3
    wide = tiled_block.multiply_float(x, weight)
    assert wide.dtype == torch.float32 and relative_error(wide, expected) < 5e-4
    assert relative_error(tiled_block.launch(x, weight, bias, splits=1), expected + bias.double()) < 5e-3


MANY: dict[str, tuple[tuple[str, int], ...]] = {
    **{kind: ((kind, 400),) for kind in BITS}, "Q4_K_M": (("Q4_K", 2048), ("Q4_K", 512), ("Q6_K", 512)),
    "odd heads": (("Q6_K", 176), ("Q5_K", 48)), "Q3_K, Q4_K": (("Q3_K", 48), ("Q4_K", 528)),
}
"""Outputs that end within tiles, and in the middle of a head's."""


@pytest.mark.cuda
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("rows,inputs", [(33, 256), (65, 1280), (100, 768), (192, 4096), (256, 768), (257, 1280)])
def test_own_products_of_many_rows(name: str, rows: int, inputs: int):
    """Whole, as sums and with the activation: by each tile."""
    from headrace.kernels.coded_linear import tiled_many

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    blocks = [draw_blocks(kind, outputs, inputs) for kind, outputs in MANY[name]]
    weight = pack_supers(blocks, torch.device("cuda"))
    assert weight is not None
    weight, plain = weight.tile(), torch.cat([expected_of(part) for part in blocks]).cuda().bfloat16().double()
    x, bias = draw(rows, inputs, "cuda", torch.bfloat16), torch.randn(len(plain), device="cuda").bfloat16()
    product_ = x.double() @ plain.T
    gate, up = (product_ + bias.double()).chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate) * up
    for tile in tiled_many.TILES:
        for splits in (1, 2):  # a share may begin with the second half of a super-block
            plan = tiled_many.split_units(tile, inputs // 128, splits)
            assert plan is not None
            out = tiled_many.launch(x, weight, None, plan)
            assert relative_error(out if splits == 1 else out.sum(0), product_) < 3e-3
        whole = tiled_many.split_units(tile, inputs // 128, 1)
        assert whole is not None
        assert relative_error(tiled_many.launch(x, weight, bias, whole), product_ + bias.double()) < 3e-3
        if weight.tail is None:
            assert relative_error(tiled_many.launch(x, weight, bias, whole, gate=1), silu) < 5e-3
    if weight.tail is not None:
        assert tiled_many.multiply_gated(x, weight, bias, Gate("silu")) is None
    assert torch.equal(tiled_many.multiply(x, weight, bias), tiled_many.multiply(x, weight, bias))
    wide = tiled_many.multiply_float(x, weight)
    assert wide.dtype == torch.float32 and relative_error(wide, product_) < 5e-4


@pytest.mark.cuda
@pytest.mark.parametrize("name", MIXTURES)
def test_all_solutions_pass_the_check_of_a_start(name: str):
    """None is left out when a model is loaded."""
    weight, _ = make(name, 1024, "cuda")
    capability = torch.cuda.get_device_capability()
    asked = choice.describe_codes(weight, torch.bfloat16, capability)
    times = choice.measure(weight, asked, lambda calls: float(len([call() for call in calls])))
    for rows, found in times.items():
        assert set(choice.find_candidates(asked, rows)) <= set(found), rows
