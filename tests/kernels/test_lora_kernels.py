"""Low-rank additions of every solution against plain matrices."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cpu_isas import isa  # noqa: F401
from devices import DEVICES, in_turns, relative_error

from headrace.kernels.linear import Norm
from headrace.kernels.lora import (
    ADAPTED_NORM,
    EXPAND,
    EXPAND_ADD_NORM,
    EXPAND_GATED,
    LINEAR_SHRINK,
    SHRINK,
    LowRankBank,
    Reduced,
    SlotRows,
    count_published,
    gemv,
    make_tiles,
    reference,
)
from headrace.kernels.lora import triton as triton_solution
from headrace.kernels.lora.codes import CodedBank, encode, make_coded_bank
from headrace.layers.lora.rows import RowsLayout

INPUTS, WIDTHS, MOST_RANKS, SLOTS = 200, (130, 24, 40), 32, 5
RANKS = ((4, 4, 4), (32, 0, 17), (0, 0, 0), (16, 8, 1), (9, 9, 9))


def make_bank(device: str, dtype: torch.dtype) -> LowRankBank:
    """Random additions; beyond an adapter's rank zeros up to a multiple of 16, then NaN, which must not be read."""
    generator, ends = torch.Generator().manual_seed(3), tuple(np.cumsum(WIDTHS).tolist())
    a = torch.full((SLOTS, len(WIDTHS), MOST_RANKS, INPUTS), torch.nan)
    b = torch.full((SLOTS, MOST_RANKS, ends[-1]), torch.nan)
    for slot, ranks in enumerate(RANKS):
        begin = 0
        for part, (rank, end) in enumerate(zip(ranks, ends, strict=True)):
            padded = -(-rank // 16) * 16
            a[slot, part, :padded], b[slot, :padded, begin:end] = 0.0, 0.0
            a[slot, part, :rank] = torch.randn(rank, INPUTS, generator=generator) * INPUTS**-0.5
            b[slot, :rank, begin:end] = torch.randn(rank, end - begin, generator=generator)
            begin = end
    where = torch.device(device)
    return LowRankBank(
        a.to(where, dtype), b.to(where, dtype), torch.tensor(RANKS, device=where), ends, make_tiles(ends, where)
    )


def make_rows(slots: list[int], device: str, *, room: int = 0) -> SlotRows:
    """With ``room`` as in a captured step of so many tokens: padded, and without segments."""
    layout = RowsLayout(room or len(slots), SLOTS)
    packed, segments = layout.pack(np.array(slots))
    return layout.view(torch.from_numpy(packed).to(device), [] if room else segments)


def expected_of(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, slots: list[int]) -> torch.Tensor:
    x, out, begin = x.double(), out.double().clone(), 0
    for part, end in enumerate(bank.ends):
        for row, slot in enumerate(slots):
            rank = int(bank.ranks[slot, part]) if slot >= 0 else 0
            if rank:
                reduced = bank.a[slot, part, :rank].double() @ x[row]
                out[row, begin:end] += reduced @ bank.b[slot, :rank, begin:end].double()
        begin = end
    return out


BATCHES = (
    [0], [-1], [1, -1, 1], [3, 1, 0, -1, 4, 2, 0, 1], [1] * 16 + [-1] * 3 + [3] * 17 + [4], [0, 3] * 25,
)


@pytest.mark.parametrize("slots", BATCHES, ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_cpu_solutions(solution: str, dtype: torch.dtype, slots: list[int]):
    check(solution, "cpu", dtype, 1e-5 if dtype == torch.float32 else 1e-2, slots, room=0)


def encode_bank(bank: LowRankBank) -> CodedBank:
    coded = make_coded_bank(SLOTS, MOST_RANKS, INPUTS, bank.ends, bank.ranks)
    for slot, ranks in enumerate(RANKS):
        for part, (rank, (begin, end)) in enumerate(zip(ranks, pairwise((0, *bank.ends)), strict=True)):
            if rank:
                coded.put(slot, part, encode(bank.a[slot, part, :rank], bank.b[slot, :rank, begin:end]))
    return coded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additions_in_8_bits(isa: str, dtype: torch.dtype):  # noqa: F811
    """Near the exact sums; rows without an adapter do not change, and a row has the same bits alone as in a batch."""
    plain = make_bank("cpu", torch.float32)
    bank, expand, generator = encode_bank(plain), EXPAND.load("cpu"), torch.Generator().manual_seed(9)
    for slots in BATCHES:
        x, rows = torch.randn(len(slots), INPUTS, generator=generator).to(dtype), make_rows(slots, "cpu")
        before = torch.randn(len(slots), plain.ends[-1], generator=generator).to(dtype)
        together, decoded = before.clone(), before.clone()
        expand(x, together, bank, rows)
        reference.expand(reference.shrink(x, bank, rows), decoded, bank, rows)
        expected = expected_of(x, before, plain, slots)
        assert relative_error(together, expected) < 0.015 and relative_error(decoded, expected) < 0.015
        for row, slot in enumerate(slots):
            alone = before[row : row + 1].clone()
            expand(x[row : row + 1], alone, bank, make_rows([slot], "cpu"))
            assert torch.equal(alone[0], together[row] if slot >= 0 else before[row])


@pytest.mark.parametrize("powers", [(0, 0), (-30, 0), (0, -30), (30, -60), (-90, 60)], ids=str)
def test_factors_of_any_magnitude_keep_their_product(powers: tuple[int, int]):
    """Scales of few bits: a trained ``b`` may be tiny beside its ``a``, or the other way round."""
    generator, ends = torch.Generator().manual_seed(6), (20, 51)
    a, b = torch.randn(9, INPUTS, generator=generator), torch.randn(9, 31, generator=generator)
    bank = make_coded_bank(2, 16, INPUTS, ends, torch.tensor([[0, 0], [0, 9]]))
    bank.put(1, 1, encode(a * 2.0 ** powers[0], b * 2.0 ** powers[1]), torch.full((31,), 3.0))
    found_a, found_b = bank.factors(1)
    product = found_b[:9, 20:].double().T @ found_a[1, :9].double()
    assert relative_error(product, 3.0 * b.double().T @ a.double() * 2.0 ** sum(powers)) < 0.015
    assert not found_a[1, 9:].any() and not found_b[:, :20].any()


@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("slots, device, dtype, tolerance", in_turns(BATCHES))
def test_triton(device: str, dtype: torch.dtype, tolerance: float, slots: list[int], room: int):
    check("triton", device, dtype, tolerance, slots, room=room)


def check(solution: str, device: str, dtype: torch.dtype, tolerance: float, slots: list[int], *, room: int) -> None:
    """Both kinds of outputs; rows without an adapter must not change by a bit."""
    bank, rows = make_bank(device, dtype), make_rows(slots, device, room=room)
    generator = torch.Generator().manual_seed(len(slots))
    size = max(room, len(slots))
    x = torch.randn(size, INPUTS + 8, generator=generator).to(device, dtype)[:, :INPUTS]
    for out_dtype in (dtype, torch.float32):
        out = torch.randn(size, bank.ends[-1], generator=generator).to(device, out_dtype)
        before, expected = out.clone(), expected_of(x, out, bank, slots)
        EXPAND.load(solution)(SHRINK.load(solution)(x, bank, rows), out, bank, rows)
        assert relative_error(out, expected) < tolerance
        still = torch.ones(size, dtype=torch.bool)
        still[: len(slots)] = torch.tensor([slot < 0 for slot in slots])
        assert torch.equal(out[still.to(device)], before[still.to(device)])


def multiply_densely(x: torch.Tensor, bank: LowRankBank, num_dense: int, *, num_splits: int = 1) -> Reduced:
    """Sums of all rows with the first slots, as a product over a weight with these behind it leaves them: in the dtype
    of ``x``, or float32 partial sums."""
    columns = (x.float() @ bank.a[:num_dense].flatten(0, 2).float().t()).expand(num_splits, -1, -1) / num_splits
    wide = torch.full((num_splits, len(x), columns.shape[2] + 24), torch.nan, device=x.device)
    wide[..., 16:-8] = columns
    return Reduced((wide if num_splits > 1 else wide.to(x.dtype))[..., 16:-8], is_dense=True)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("slots, room", [(BATCHES[3], 0), ([3, 1, -1, 3, 3] * 9, 64)], ids=("few", "captured"))
@pytest.mark.parametrize("device, dtype, tolerance", DEVICES)
def test_sums_of_dense_products(
    device: str, dtype: torch.dtype, tolerance: float, slots: list[int], room: int, num_splits: int
):
    """A row takes what its own slot has; ranks beyond an adapter's are not read."""
    bank, rows = make_bank(device, dtype), make_rows(slots, device, room=room)
    generator, size = torch.Generator().manual_seed(4), max(room, len(slots))
    x = torch.randn(size, INPUTS, generator=generator).to(device, dtype)
    wide = torch.randn(size, bank.ends[-1] + 8, generator=generator).to(device, dtype)
    out, behind = wide[:, : bank.ends[-1]], wide[:, bank.ends[-1] :].clone()
    expected = expected_of(x, out, bank, slots)
    EXPAND.load("triton")(multiply_densely(x, bank, SLOTS, num_splits=num_splits), out, bank, rows)
    assert relative_error(out, expected) < tolerance and torch.equal(wide[:, bank.ends[-1] :], behind)
    gates = narrow_gates(bank)
    product = torch.randn(size, 2 * WIDTHS[1], generator=generator).to(device, dtype)
    gate, up = expected_of(x, product, gates, slots).to(dtype).double().chunk(2, dim=1)
    reduced = multiply_densely(x, gates, SLOTS, num_splits=num_splits)
    gated = EXPAND_GATED.load("triton")(reduced, product, gates, rows, "silu")
    assert relative_error(gated, torch.nn.functional.silu(gate) * up) < tolerance


def narrow_gates(bank: LowRankBank) -> LowRankBank:
    """Parts 1 and 2 of a bank as gate and up, of 24 outputs each."""
    first, size = WIDTHS[0], WIDTHS[1]
    b, ends = bank.b[..., first : first + 2 * size].contiguous(), (size, 2 * size)
    a, ranks = bank.a[:, 1:].contiguous(), bank.ranks[:, 1:].contiguous()
    return LowRankBank(a, b.nan_to_num(), ranks, ends, make_tiles(ends, b.device))


@pytest.mark.parametrize(
    "batch, device, dtype, tolerance", in_turns([(BATCHES[3], 0), (BATCHES[4], 64), ([-1, 3, 3, 4] * 257, 0)])
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_additions_to_gate_and_up(
    device: str, dtype: torch.dtype, tolerance: float, activation: str, batch: tuple[list[int], int]
):
    """The activation is that of all rows, with an adapter, without, and of padding; more rows than `LEAST_MANY` have
    large blocks."""
    slots, room = batch
    bank, rows = narrow_gates(make_bank(device, dtype)), make_rows(slots, device, room=room)
    generator, size = torch.Generator().manual_seed(5), max(room, len(slots))
    x = torch.randn(size, INPUTS, generator=generator).to(device, dtype)
    out = torch.randn(size, 2 * WIDTHS[1], generator=generator).to(device, dtype)
    gate, up = expected_of(x, out, bank, slots).to(dtype).double().chunk(2, dim=1)
    act = torch.nn.functional.silu if activation == "silu" else partial(torch.nn.functional.gelu, approximate="tanh")
    reduced = SHRINK.load("triton")(x, bank, rows)
    gated = EXPAND_GATED.load("triton")(reduced, out, bank, rows, activation)
    assert relative_error(gated, act(gate) * up) < tolerance


@pytest.mark.parametrize("num_rows, device, dtype, tolerance", in_turns([1, 2, 4]))
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("num_partials", [1, 3])
def test_additions_before_a_norm(
    device: str, dtype: torch.dtype, tolerance: float, num_partials: int, is_dense: bool, num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Of a product, or of partial sums of one; the residual is that of `ADD_RMS_NORM`, too."""
    monkeypatch.setattr(triton_solution, "norm_rows", lambda count: num_rows)
    slots, width, generator = [*BATCHES[3], *[1] * 18], WIDTHS[0], torch.Generator().manual_seed(7)
    whole = make_bank(device, dtype)
    a, b = whole.a[:, :1].contiguous(), whole.b[..., :width].contiguous()
    bank = LowRankBank(a, b, whole.ranks[:, :1].contiguous(), (width,), make_tiles((width,), b.device))
    rows, count = make_rows(slots, device), len(slots)
    x = torch.randn(count, INPUTS, generator=generator).to(device, dtype)
    shape, out_dtype = ((num_partials, count, width), torch.float32) if num_partials > 1 else ((count, width), dtype)
    out = torch.randn(shape, generator=generator).to(device, out_dtype)
    residual, weight = (torch.randn(n, width, generator=generator).to(device, dtype) for n in (count, 1))
    product = out.double().sum(0) if num_partials > 1 else out.double()
    total = residual.double() + expected_of(x, product, bank, slots)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * (weight[0].double() + 1.0)
    norm, reduced = Norm(weight[0], 1e-5, 1.0), SHRINK.load("triton")(x, bank, rows)
    if is_dense:
        reduced = multiply_densely(x, bank, SLOTS, num_splits=num_partials)
    normed, stream = EXPAND_ADD_NORM.load("triton")(reduced, out, residual, norm, bank, rows)
    assert relative_error(normed, expected) < 4 * tolerance and relative_error(stream, total) < 2 * tolerance


@pytest.mark.parametrize("slots, device, dtype, tolerance", in_turns([[1], [-1], [4, 1], [-1, 0]]))
def test_products_with_the_first_half_of_an_addition(
    device: str, dtype: torch.dtype, tolerance: float, slots: list[int]
):
    """Of one row, or of two with adapters of their own."""
    bank, rows, generator = make_bank(device, dtype), make_rows(slots, device), torch.Generator().manual_seed(9)
    x = torch.randn(len(slots), INPUTS, generator=generator).to(device, dtype)
    weight = torch.randn(bank.ends[-1], INPUTS, generator=generator).to(device, dtype)
    bias = torch.randn(bank.ends[-1], generator=generator).to(device, dtype)
    found = LINEAR_SHRINK.load("triton")(x, weight, bias, bank, rows)
    assert found is not None
    out, reduced = found
    product = x.double() @ weight.double().t() + bias.double()
    assert relative_error(out, product) < tolerance
    EXPAND.load("triton")(reduced, out, bank, rows)
    assert relative_error(out, expected_of(x, product, bank, slots)) < tolerance


WHOLE_SHAPES = ((4096, 3, 16), (4096, 1, 32), (1032, 2, 64), (14336, 1, 16), (264, 4, 16))
"""Inputs, parts and largest rank."""


@pytest.mark.cuda
@pytest.mark.parametrize("inputs, parts, most_ranks", WHOLE_SHAPES, ids=str)
@pytest.mark.parametrize("slots", [[0], [-1], [3, 1], [2, -1], [-1, 4], [1, 1]], ids=str)
def test_products_of_few_rows_with_all_that_is_added(inputs: int, parts: int, most_ranks: int, slots: list[int]):
    """Also behind a norm, with a gate, again in a graph, and with numbers that must not be read."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    draw, device = torch.Generator(device="cuda").manual_seed(inputs + len(slots)), torch.device("cuda")

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=draw, device=device) * scale).bfloat16()

    ends = tuple(296 * (part + 1) for part in range(parts))
    ranks = torch.tensor([[(5 * slot + 9 * part) % (most_ranks + 1) for part in range(parts)] for slot in range(SLOTS)])
    a = normal(SLOTS, parts, most_ranks, inputs, scale=inputs**-0.5)
    b = normal(SLOTS, most_ranks, ends[-1])
    for slot in range(SLOTS):
        for part, end in enumerate(ends):
            rank, columns = int(ranks[slot, part]), slice(end - 296, end)
            a[slot, part, rank:], b[slot, rank:, columns] = 0.0, 0.0
            padded = -(-rank // 16) * 16
            a[slot, part, padded:], b[slot, padded:, columns] = torch.nan, torch.nan
    published = torch.zeros(count_published(parts, most_ranks), dtype=torch.int64, device=device)
    bank = LowRankBank(a, b, ranks.to(device), ends, make_tiles(ends, device), published=published)
    rows, count = make_rows(slots, "cuda", room=len(slots)), len(slots)
    x, residual, scale = normal(count, inputs + 8)[:, :inputs], normal(count, inputs), normal(inputs)
    weight, bias = normal(ends[-1], inputs, scale=inputs**-0.5), normal(ends[-1])
    total, before = x + residual, (residual, Norm(scale, 1e-5, 1.0))
    normed = F.rms_norm(total.double(), (inputs,), scale.double() + 1.0, 1e-5)

    def expected(given: torch.Tensor) -> torch.Tensor:
        return expected_of(given, given.double() @ weight.double().t() + bias.double(), bank, slots)

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        alone = gemv.adapted_linear(x, weight, bias, bank, rows)
        behind = gemv.adapted_linear(x, weight, bias, bank, rows, before=before)
        assert alone is not None and behind is not None and behind[1] is not None
        return alone[0], behind[0], behind[1]

    first = run()
    assert relative_error(first[0], expected(x)) < 4e-3 and relative_error(first[1], expected(normed)) < 1e-2
    assert torch.equal(first[2], total)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(300):
        graph.replay()
    assert all(torch.equal(again, before) for again, before in zip(captured, first, strict=True)), "in a fixed order"
    if parts != 2:
        assert gemv.adapted_linear(x, weight, bias, bank, rows, "silu") is None
        return
    gate, up = expected(normed).bfloat16().double().chunk(2, dim=1)
    behind = gemv.adapted_linear(x, weight, bias, bank, rows, "silu", before)
    assert behind is not None and relative_error(behind[0], F.silu(gate) * up) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize("ranks, width", [(16, 320), (32, 4416)], ids=str)
@pytest.mark.parametrize("num_partials", [1, 3])
@pytest.mark.parametrize("slots", [[1, -1, 1], [0, 3, -1, 4, 2] * 21], ids=len)
def test_what_is_between_two_products(slots: list[int], num_partials: int, ranks: int, width: int):
    """Additions of unlike ranks, none, and rows without an adapter; the last norm has no product behind it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for Hopper")
    generator, inputs, count = torch.Generator("cuda").manual_seed(11), 192, len(slots)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    def bank_of(inputs: int, widths: tuple[int, ...]) -> LowRankBank:
        own = torch.randint(0, ranks + 1, (SLOTS, len(widths)), generator=generator, device="cuda")
        own[3], own[4, 0] = ranks, 0
        a, b = randn(SLOTS, len(widths), ranks, inputs) * inputs**-0.5, randn(SLOTS, ranks, sum(widths))
        ends = tuple(np.cumsum(widths).tolist())
        for slot in range(SLOTS):
            for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
                rank = int(own[slot, part])
                padded = -(-rank // 16) * 16
                a[slot, part, rank:padded], b[slot, rank:padded, begin:end] = 0.0, 0.0
                a[slot, part, padded:], b[slot, padded:, begin:end] = torch.nan, torch.nan
        return LowRankBank(a, b, own, ends, make_tiles(ends, b.device))

    bank, following = bank_of(inputs, (width,)), bank_of(width, (64, 128, 64))
    rows = make_rows(slots, "cuda", room=count + 20)
    size = count + 20
    x, residual, norm = randn(size, inputs), randn(size, width), Norm(randn(width), 1e-5, 0.5)
    out = randn(num_partials, size, width).float() if num_partials > 1 else randn(size, width)
    product = out.double().sum(0) if num_partials > 1 else out.double()
    total = residual.double() + expected_of(x, product, bank, slots)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * (norm.weight.double() + 0.5)
    for behind in (following, None):
        found = ADAPTED_NORM.load("cuda")(x, out, residual.clone(), norm, bank, behind, rows)
        assert found is not None
        normed, stream, reduced = found
        assert relative_error(normed, expected) < 1e-2 and relative_error(stream, total) < 1e-2
        if behind is None:
            assert reduced is None
            continue
        added = torch.zeros(size, behind.ends[-1], device="cuda")
        wanted = expected_of(expected, added, behind, slots)
        EXPAND.load("triton")(reduced, added, behind, rows)
        assert relative_error(added, wanted) < 2e-2


SOLUTIONS = [
    ("cpu", reference), pytest.param("cpu", triton_solution, marks=pytest.mark.interpreted),
    pytest.param("cuda", triton_solution, marks=pytest.mark.cuda),
]


@pytest.mark.parametrize(("device", "solution"), SOLUTIONS)
@pytest.mark.parametrize(("dtype", "target_dtype"), [
    (torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.cuda),
    pytest.param(torch.float32, torch.bfloat16, marks=pytest.mark.cuda),
])
def test_factors_are_placed(device: str, solution: ModuleType, dtype: torch.dtype, target_dtype: torch.dtype):
    """As they are and transposed, wider than a tile and of any rank; what is beside them stays."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(5, 700, 1.0), (16, 256, 0.3), (33, 90, -2.0), (0, 0, 1.0), (1, 1, 3.0)]
    stored = [torch.randn(rows, columns, generator=generator).to(dtype) for rows, columns, _ in shapes]
    source, begin = torch.zeros(1 << 18, dtype=torch.uint8), 0
    rooms = [torch.full((48, 720), 7.0, dtype=target_dtype, device=device) for _ in shapes]
    ranks = torch.full((len(shapes) + 1,), 9, dtype=torch.int64, device=device)
    rows, expected = [], []
    for i, (factor, (rank, width, scale)) in enumerate(zip(stored, shapes, strict=True)):
        laid = factor.t().contiguous() if i % 2 else factor
        source[begin : begin + laid.nbytes] = laid.reshape(-1).view(torch.uint8)
        padded = -(-rank // 16) * 16
        rows.append([
            begin, rank, padded, width, *((1, rank) if i % 2 else (width, 1)), int(np.float32(scale).view(np.int32)),
            rooms[i].data_ptr() + rooms[i].itemsize, rooms[i].stride(0), ranks.data_ptr() + 8 * i if i != 4 else 0,
        ])
        wanted = torch.full((48, 720), 7.0, dtype=target_dtype)
        wanted[:padded, 1 : 1 + width] = 0.0
        wanted[:rank, 1 : 1 + width] = (factor.float() * scale).to(target_dtype)
        expected.append(wanted)
        begin += -(-laid.nbytes // 64) * 64
    solution.place_factors(source.to(device), torch.tensor(rows, device=device), 700, dtype, target_dtype)
    for room, wanted in zip(rooms, expected, strict=True):
        assert torch.equal(room.cpu(), wanted)
    assert ranks.tolist() == [5, 16, 33, 0, 9, 9]


class Recorder:
    """In place of a kernel: keeps what it is compiled for."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **constants: self.seen.add(tuple(sorted(constants.items())))


@pytest.mark.parametrize(
    "inputs, ends", [(4096, (4096, 5120, 6144)), (14336, (4096,)), (4096, (14336, 28672))], ids=str
)
def test_no_number_of_rows_needs_a_kernel_of_its_own(
    inputs: int, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """A start runs a step of three tokens and the largest one: steps between them find their kernels compiled."""
    names = ("_shrink_kernel", "_expand_kernel", "_expand_gated_kernel")
    a = torch.empty(1, len(ends), 16, inputs, device="meta", dtype=torch.bfloat16)
    b = torch.empty(1, 16, ends[-1], device="meta", dtype=torch.bfloat16)
    ranks = torch.empty(1, len(ends), device="meta")
    bank = LowRankBank(a, b, ranks, ends, make_tiles(ends, torch.device("meta")))

    def run(count: int) -> dict[str, Recorder]:
        recorders = {name: Recorder() for name in names}
        for name, recorder in recorders.items():
            monkeypatch.setattr(triton_solution, name, recorder)
        layout = RowsLayout(count, 64)
        rows = layout.view(torch.empty(layout.room, device="meta", dtype=torch.int64), [])
        x = torch.empty(count, inputs, device="meta", dtype=torch.bfloat16)
        out = torch.empty(count, ends[-1], device="meta", dtype=torch.bfloat16)
        reduced = triton_solution.shrink(x, bank, rows)
        triton_solution.expand(reduced, out, bank, rows)
        if len(ends) == 2:
            triton_solution.expand_gated(reduced, out, bank, rows, "silu")
        return recorders

    started = [run(count) for count in (3, 8192)]
    for count in (1, 17, 63, 100, 257, 600, 1023, 1024, 1500, 2500, 4096, 7000):
        for name, recorder in run(count).items():
            assert recorder.seen <= started[0][name].seen | started[1][name].seen, (count, name)


@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda),
])
@pytest.mark.parametrize(("slots", "room"), [(slots, 0) for slots in BATCHES] + [([3, -1, 1] * 9, 40)], ids=str)
def test_sums_by_row(device: str, dtype: torch.dtype, slots: list[int], room: int):
    """Of all inputs at once, whatever the place of a row; rows without an adapter, and those of padding, have none."""
    bank, rows = make_bank(device, dtype), make_rows(slots, device, room=room)
    x = torch.randn(rows.num_rows, INPUTS, generator=torch.Generator().manual_seed(7)).to(device, dtype)
    sums, owners = triton_solution.shrink_owned(x, bank, rows)
    assert owners.tolist() == slots + [-1] * (rows.num_rows - len(slots))
    for row, slot in enumerate(slots):
        for part, rank in enumerate(RANKS[slot] if slot >= 0 else ()):
            expected, padded = bank.a[slot, part, :rank].double() @ x[row].double(), -(-rank // 16) * 16
            if rank:
                assert relative_error(sums[row, part, :rank], expected) < (1e-5 if dtype == torch.float32 else 1e-2)
            assert not sums[row, part, rank:padded].any()
