"""What adapters add, by own CUDA C++: values against float64, and where they are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from devices import relative_error

from headrace.kernels.few_decodes import Rotation
from headrace.kernels.few_decodes import hopper as few_decodes
from headrace.kernels.linear import Norm, gated_product
from headrace.kernels.lora import (
    EXPAND,
    EXPAND_ADD_NORM,
    EXPAND_GATED,
    EXPAND_ROPE_WRITE,
    FEW_DECODES,
    LowRankBank,
    Reduced,
    SlotRows,
    additions,
    gated,
    make_tiles,
    rotated,
)
from headrace.kernels.lora import triton as triton_solution
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import ROPE_WRITE, HeadShape
from headrace.layers.lora.rows import RowsLayout

SLOTS = 5
BATCHES = (
    ([0], 0), ([-1], 0), ([1, -1, 1], 0), ([3, 1, 0, -1, 4, 2, 0, 1], 40), ([1] * 27 + [-1] * 13 + [3] * 17 + [4], 0),
    ([4, 3, -1] * 171, 0), ([-1, 3, 3, 4] * 512, 0),
)
"""Slots of rows, and room of a captured step; the last has large blocks."""
KINDS = ("by places", "dense", "dense partial sums")
on_hopper = pytest.mark.usefixtures("_on_hopper")


@pytest.fixture
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for Hopper")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("left to Triton")

    for name in ("expand", "expand_gated", "expand_add_norm"):
        monkeypatch.setattr(triton_solution, name, refuse)


class Case:
    """A bank of ranks from 0 to ``most_ranks``, rows, and what `SHRINK` leaves of them. What must not be read is no
    number: ranks beyond an adapter's, sums of other slots, memory around."""

    def __init__(self, slots: list[int], room: int, ends: tuple[int, ...], most_ranks: int, kind: str):
        self.draw = torch.Generator("cuda").manual_seed(len(slots) + most_ranks)
        self.slots, self.size, parts = slots, max(room, len(slots)), len(ends)
        ranks = torch.tensor([[(7 * slot + 9 * part) % (most_ranks + 1) for part in range(parts)] for slot in range(5)])
        ranks[3], ranks[4, 0] = most_ranks, 0
        b = torch.full((SLOTS, most_ranks, ends[-1]), torch.nan, device="cuda")
        sums = torch.full((self.size, parts, most_ranks), torch.nan, device="cuda")
        self.added = torch.zeros(self.size, ends[-1], dtype=torch.double, device="cuda")
        own = {slot: [row for row, other in enumerate(slots) if other == slot] for slot in range(SLOTS)}
        for slot, rows in own.items():
            for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
                rank = int(ranks[slot, part])
                padded = -(-rank // 16) * 16
                b[slot, :padded, begin:end] = 0.0
                b[slot, :rank, begin:end] = self.normal(rank, end - begin)
                sums[rows, part, :padded] = self.normal(len(rows), padded).float()
                factor = b[slot, :rank, begin:end].bfloat16().double()
                self.added[rows, begin:end] = sums[rows, part, :rank].double() @ factor
        a = torch.zeros(SLOTS, parts, most_ranks, 8, device="cuda").bfloat16()
        self.bank = LowRankBank(a, b.bfloat16(), ranks.cuda(), ends, make_tiles(ends, b.device))
        layout = RowsLayout(room or len(slots), SLOTS)
        packed, segments = layout.pack(np.array(slots))
        self.rows: SlotRows = layout.view(torch.from_numpy(packed).cuda(), [] if room else segments)
        self.reduced = self._reduce(sums.flatten(1), kind)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw, device="cuda").bfloat16()

    def wide(self, width: int) -> torch.Tensor:
        """Rows within wider memory that is no number elsewhere."""
        memory = torch.full((self.size + 2, width + 16), torch.nan, device="cuda").bfloat16()
        memory[1:-1, 8:-8] = self.normal(self.size, width)
        return memory[1:-1, 8:-8]

    def _reduce(self, sums: torch.Tensor, kind: str) -> Reduced:
        columns = sums.shape[1]
        if kind == "by places":
            return Reduced(torch.stack([sums[self.rows.order] * share for share in (0.5, 0.25, 0.25)]))
        num_splits = 2 if "partial" in kind else 1
        wide = torch.full((num_splits, self.size, SLOTS * columns + 32), torch.nan, device="cuda")
        for row, slot in enumerate(self.slots):
            if slot >= 0:
                begin = 24 + slot * columns
                wide[:, row, begin : begin + columns] = sums[row] / num_splits
        return Reduced((wide if num_splits > 1 else wide.bfloat16())[..., 24:-8], is_dense=True)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most_ranks", [16, 32])
@pytest.mark.parametrize("slots, room", BATCHES, ids=lambda case: str(len(case)) if isinstance(case, list) else "")
def test_additions_to_a_product(slots: list[int], room: int, most_ranks: int, kind: str):
    """Rows without an adapter keep their bits; what is beside is not written."""
    case = Case(slots, room, (136, 160, 424), most_ranks, kind)
    out = case.wide(424)
    memory, before = out._base, out.clone()
    assert memory is not None
    additions.expand(case.reduced, out, case.bank, case.rows)
    assert relative_error(out, before.double() + case.added) < 5e-3
    still = [row for row in range(case.size) if row >= len(slots) or slots[row] < 0]
    assert torch.equal(out[still], before[still])
    out.fill_(torch.nan)
    assert memory.isnan().all()


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("most_ranks", [16, 32])
@pytest.mark.parametrize("slots, room", BATCHES, ids=lambda case: str(len(case)) if isinstance(case, list) else "")
def test_additions_before_an_activation(slots: list[int], room: int, most_ranks: int, activation: str, kind: str):
    size = 328
    case = Case(slots, room, (size, 2 * size), most_ranks, kind)
    x = case.wide(2 * size)
    gate, up = (x.double() + case.added).bfloat16().double().chunk(2, dim=1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    gated = additions.expand_gated(case.reduced, x, case.bank, case.rows, activation)
    assert relative_error(gated, act * up) < 5e-3


MIXTURES = {
    "one": [1] * 700, "none beside two": [3] * 130 + [-1] * 70 + [0] * 300 + [4] * 61, "in turns": [4, 3, -1, 1] * 80,
    "a row of others": [2] * 63 + [1] + [2] * 64 + [-1, 3], "few": [3, 1], "captured": [1] * 200 + [-1] * 150 + [0] * 3,
}
"""Slots of rows: tiles of 64 rows with one of an adapter, of others alone, and of all."""


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("inputs", "size", "most_ranks"), [(512, 328, 16), (136, 1024, 48), (64, 128, 32)], ids=str)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_additions_within_a_gated_product(
    mixture: str, inputs: int, size: int, most_ranks: int, activation: str, monkeypatch: pytest.MonkeyPatch
):
    """Rows without an adapter have the bits that they have in a batch without any; twice the same."""
    slots, room = MIXTURES[mixture], 400 if mixture == "captured" else 0
    case = Case(slots, room, (size, 2 * size), most_ranks, "dense")
    case.bank.a = torch.full((SLOTS, 2, most_ranks, inputs), torch.nan, device="cuda").bfloat16()
    x, weight = case.wide(inputs), case.normal(2 * size, inputs) * inputs**-0.5
    product = x.double() @ weight.double().T
    for slot in range(SLOTS):
        own = [row for row, other in enumerate(slots) if other == slot]
        for part in range(2):
            rank, columns = int(case.bank.ranks[slot, part]), slice(part * size, (part + 1) * size)
            case.bank.a[slot, part, : -(-rank // 16) * 16] = 0.0
            case.bank.a[slot, part, :rank] = case.normal(rank, inputs) * inputs**-0.5
            sums = (x[own].double() @ case.bank.a[slot, part, :rank].double().T).bfloat16().double()
            product[own, columns] += sums @ case.bank.b[slot, :rank, columns].double()
    gate, up = product.bfloat16().double().chunk(2, dim=1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    monkeypatch.setattr(gated_product, "takes", lambda *_: True)
    monkeypatch.setattr(gated, "LEAST_RUN", 1)
    case.rows.num_runs = case.size
    found = gated.gated_linear(x, weight, None, case.bank, case.rows, activation)
    assert found is not None and relative_error(found, act * up) < 1e-2
    again = gated.gated_linear(x, weight, None, case.bank, case.rows, activation)
    plain = gated_product.gated_linear(x, weight, None, activation)
    assert again is not None and plain is not None and torch.equal(again, found)
    others = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(found[others], plain[others])
    for num_runs in (0, case.size + 1):  # only the device knows, and too many
        case.rows.num_runs = num_runs
        assert gated.gated_linear(x, weight, None, case.bank, case.rows, activation) is None


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_partials", [0, 1, 3])
@pytest.mark.parametrize("width, most_ranks", [(4096, 16), (4096, 32), (328, 16), (8192, 16), (4104, 32)], ids=str)
@pytest.mark.parametrize("slots, room", BATCHES, ids=lambda case: str(len(case)) if isinstance(case, list) else "")
def test_additions_before_a_norm(
    slots: list[int], room: int, width: int, most_ranks: int, num_partials: int, kind: str
):
    if num_partials and len(slots) > additions.FEW_ROWS:
        pytest.skip("products of many rows leave no partial sums")
    case = Case(slots, room, (width,), most_ranks, kind)
    residual, norm = case.wide(width), Norm(case.normal(width), 1e-5, 0.5)
    x = case.normal(num_partials, case.size, width).float() if num_partials else case.wide(width)
    product = x.double().sum(0) if num_partials else x.double()
    total = residual.double() + product + case.added
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * (norm.weight.double() + 0.5)
    normed, stream = additions.expand_add_norm(case.reduced, x, residual, norm, case.bank, case.rows)
    assert relative_error(stream, total) < 6e-3 and relative_error(normed, expected) < 1e-2


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_norm", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, most_ranks", [(4, 1, 128, 16), (4, 2, 64, 32), (8, 4, 32, 16), (2, 1, 256, 16)]
)
@pytest.mark.parametrize("slots, room", BATCHES, ids=lambda case: str(len(case)) if isinstance(case, list) else "")
def test_additions_before_attention(
    slots: list[int], room: int, heads: int, kv_heads: int, head_dim: int, most_ranks: int, has_norm: bool, kind: str
):
    """All rows are rotated, those without an adapter too; pages beside theirs are not written."""
    if has_norm and head_dim > 128:
        pytest.skip("a head's columns are of two warps")
    ends = tuple(count * head_dim for count in (heads, heads + kv_heads, heads + 2 * kv_heads))
    case, page = Case(slots, room, ends, most_ranks, kind), 16
    qkv, num_pages = case.wide(ends[-1]), case.size // 16 + 3
    positions = torch.randint(500, (case.size,), generator=case.draw, device="cuda")
    places = torch.randperm(num_pages * page, generator=case.draw, device="cuda")[: case.size]
    table = torch.randn(500, head_dim, generator=case.draw, device="cuda")
    norms = (case.normal(head_dim), case.normal(head_dim)) if has_norm else None
    shape = HeadShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim, interleaved=False,
        norm_eps=1e-5, norm_offset=0.5,
    )
    rotation = Rotation(positions, table, places, norms, shape)
    pages = [torch.full((2, num_pages, page, kv_heads, head_dim), 7.0, device="cuda").bfloat16() for _ in range(2)]
    (k, k_expected), (v, v_expected) = (stack.unbind(0) for stack in pages)
    whole = (qkv.double() + case.added).bfloat16()
    expected = ROPE_WRITE.load("reference")(
        whole, positions, table, places, k_expected, v_expected, **shape,
        **({} if norms is None else {"q_norm": norms[0], "k_norm": norms[1]}),
    )
    q = rotated.expand_rope_write(case.reduced, qkv, rotation, k, v, case.bank, case.rows)
    assert q is not None
    for ours, theirs in ((q, expected), (k, k_expected), (v, v_expected)):
        assert relative_error(ours, theirs.double()) < 5e-3
    untouched = torch.ones(num_pages * page, dtype=torch.bool, device="cuda")
    untouched[places] = False
    assert all(bool((own.flatten(0, 1)[untouched] == 7.0).all()) for own in (k, v))


@pytest.mark.cuda
@on_hopper
def test_additions_behind_one_another_in_a_graph():
    """With dependent launch, as decodes run: each kernel reads what the one in front has written."""
    case = Case([4, 3, -1, 0] * 60, 256, (4096,), 16, "dense")
    residual, norm, x = case.wide(4096), Norm(case.normal(4096), 1e-5), case.wide(4096)
    streams = residual.clone()

    def run() -> torch.Tensor:
        out, residual_now = x.clone(), residual.clone()
        for _ in range(6):
            additions.expand(case.reduced, out, case.bank, case.rows)
            out, streams_now = additions.expand_add_norm(
                case.reduced, out, residual_now, norm, case.bank, case.rows
            )
        streams.copy_(streams_now)
        return out

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run()
    before = streams.clone()
    for _ in range(200):
        graph.replay()
    assert torch.equal(again, first) and torch.equal(streams, before) and first.isfinite().all()


def test_few_decodes_are_rotated_with_their_attention():
    assert FEW_DECODES == few_decodes.MOST_ROWS


def test_hopper_takes_own_kernels():
    hopper, others = KernelQuery("cuda", "bfloat16", (9, 0)), KernelQuery("cuda", "float16", (9, 0))
    assert EXPAND_ROPE_WRITE.choose(hopper) is EXPAND_ROPE_WRITE.load("cuda")
    assert EXPAND_ROPE_WRITE.choose(others) is EXPAND_ROPE_WRITE.load("reference")
    for operation in (EXPAND, EXPAND_GATED, EXPAND_ADD_NORM):
        assert operation.choose(hopper) is operation.load("cuda")
        assert operation.choose(others) is operation.load("triton_pdl")
