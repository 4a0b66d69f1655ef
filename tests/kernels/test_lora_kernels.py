"""Low-rank additions of every solution against plain matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import DEVICES, relative_error

from headrace.kernels.lora import ADD_LOW_RANK, LowRankBank, SlotRows, make_tiles
from headrace.layers.lora.rows import count_blocks, pack_rows, view_rows

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
    size = room or len(slots)
    packed, segments = pack_rows(np.array(slots), size, count_blocks(size, SLOTS))
    where = torch.from_numpy(packed).to(device)
    if room:
        return view_rows(where, room, room, [])
    return view_rows(where, size, size, segments, sum(slot >= 0 for slot in slots))


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
    check(ADD_LOW_RANK.load(solution), "cpu", dtype, 1e-5 if dtype == torch.float32 else 1e-2, slots, room=0)


@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("slots", BATCHES, ids=len)
@pytest.mark.parametrize("device, dtype, tolerance", DEVICES)
def test_triton(device: str, dtype: torch.dtype, tolerance: float, slots: list[int], room: int):
    check(ADD_LOW_RANK.load("triton"), device, dtype, tolerance, slots, room=room)


def check(add, device: str, dtype: torch.dtype, tolerance: float, slots: list[int], *, room: int) -> None:
    """Both kinds of outputs; rows without an adapter must not change by a bit."""
    bank, rows = make_bank(device, dtype), make_rows(slots, device, room=room)
    generator = torch.Generator().manual_seed(len(slots))
    size = max(room, len(slots))
    x = torch.randn(size, INPUTS + 8, generator=generator).to(device, dtype)[:, :INPUTS]
    for out_dtype in (dtype, torch.float32):
        out = torch.randn(size, bank.ends[-1], generator=generator).to(device, out_dtype)
        before, expected = out.clone(), expected_of(x, out, bank, slots)
        add(x, out, bank, rows)
        assert relative_error(out, expected) < tolerance
        still = torch.ones(size, dtype=torch.bool)
        still[: len(slots)] = torch.tensor([slot < 0 for slot in slots])
        assert torch.equal(out[still.to(device)], before[still.to(device)])
