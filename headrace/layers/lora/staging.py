"""`StagedFactors`: the low-rank additions of an adapter as a GPU takes them. Pieces of host memory are copied whole to
the device, a few at a time, and a kernel brings what lies in them to its places.

N factors. Refuses: what is more than low-rank additions to products; banks load that themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from headrace.kernels.lora import (
    BEGIN,
    PLACE_FACTORS,
    RANKS,
    TARGET,
    WIDTH,
)
from headrace.kernels.operation import KernelQuery
from headrace.layers.lora.memory import AdapterMemory
from headrace.layers.lora.parts import RANK_STEP, PreparedPart
from headrace.memory.copies import to_device

STAGED_BYTES = 16 << 20
"""Memory of the device that pieces pass through."""
A, B = 0, 1
ONE = int(np.float32(1.0).view(np.int32))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of files."""


class FactorBank(Protocol):
    """What has slots for factors: ``a`` [S, P, R, I], ``b`` [S, R, O], ``ranks`` [S, P]."""

    a: nn.Buffer
    b: nn.Buffer
    ranks: nn.Buffer


class _Group(NamedTuple):
    """Rows ``[first, stop)`` of the table, for one launch."""

    first: int
    stop: int
    most_columns: int
    dtype: torch.dtype
    target_dtype: torch.dtype


@dataclass(slots=True)
class _Wave:
    """Pieces that are on the device at the same time: each with where it begins there, and its bytes in use."""

    pieces: list[tuple[torch.Tensor, int, int]]
    groups: list[_Group]


PIECE, OWNER, WHICH, SOURCE, BANK = range(RANKS + 1, RANKS + 6)
"""More columns of a factor: the piece that it is in, the number of its module, A or B, and the dtypes of the file and
of the bank, by their places in `DTYPES`."""


class StagedFactors:
    """Of ``modules``: those of ``layers`` with a bank in ``banks``, if their factors are small enough. Factors lie in
    ``memory``, or are copied there. Where banks are is asked when an adapter is loaded, as they may move."""

    def __init__(
        self, layers: Mapping[str, Sequence[PreparedPart]], banks: Mapping[str, FactorBank], memory: AdapterMemory
    ):
        self.modules: list[str] = []
        factors: list[list[int]] = []
        for name, bank in banks.items():
            own = _list_factors(len(self.modules), layers[name], bank, memory)
            if all(memory.used[factor[PIECE]] <= STAGED_BYTES for factor in own):
                factors += own
                self.modules.append(name)
        # by numpy: an adapter has hundreds of factors
        table = np.array(factors, np.int64).reshape(-1, BANK + 1)
        starts, self._waves = _divide(memory, {*map(int, table[:, PIECE])})
        found = np.array([starts.get(number, (0, 0)) for number in range(len(memory.pieces))], np.int64).reshape(-1, 2)
        waves, begins = found[table[:, PIECE]].T
        order = np.lexsort((table[:, BANK], table[:, SOURCE], waves))
        table[:, BEGIN] += begins
        table, waves = table[order], waves[order]
        keys = np.column_stack((waves, table[:, [SOURCE, BANK]]))
        ends = [*map(int, np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1), len(table)]
        for first, stop in pairwise([0, *ends] if len(table) else []):
            wave, source, target = map(int, keys[first])
            most_columns = int(table[first:stop, WIDTH].max())
            self._waves[wave].groups.append(_Group(first, stop, most_columns, DTYPES[source], DTYPES[target]))
        self._table, self._owners, self._which = table[:, : RANKS + 1], table[:, OWNER], table[:, WHICH]

    def load(self, slot: int, banks: Mapping[str, FactorBank], stage: Stage) -> None:
        """Fill a slot of the banks, in order of the current stream."""
        if not self.modules:
            return
        places = np.array([_find_slot(banks[name], slot) for name in self.modules], np.int64)
        table = self._table.copy()
        table[:, TARGET] += places[self._owners, self._which]
        table[:, RANKS] += np.where(self._which == A, places[self._owners, 2], 0)
        on_device = to_device(table, stage.memory.device)
        for wave in self._waves:
            for piece, begin, num_bytes in wave.pieces:
                stage.memory[begin : begin + num_bytes].copy_(piece[:num_bytes], non_blocking=True)
            for group in wave.groups:
                stage.place(
                    stage.memory, on_device[group.first : group.stop], group.most_columns, group.dtype,
                    group.target_dtype,
                )


class Stage:
    """Memory of the device that pieces pass through, and the kernel that takes factors from there."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # written outside of it, too
            self.memory = torch.empty(STAGED_BYTES, dtype=torch.uint8, device=device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self.place = PLACE_FACTORS.choose(KernelQuery(device.type, "uint8", capability))

    def warm_up(self, dtypes: set[torch.dtype]) -> None:
        """Launch what loads of any file into banks of these dtypes launch, with nothing to do."""
        table = torch.zeros((1, RANKS + 1), dtype=torch.int64, device=self.memory.device)
        for target_dtype in dtypes:
            for dtype in DTYPES:
                self.place(self.memory, table, 1, dtype, target_dtype)


def _list_factors(
    owner: int, parts: Sequence[PreparedPart], bank: FactorBank, memory: AdapterMemory
) -> list[list[int]]:
    """Those of a module, which are then in the memory: rows of the table, without the beginnings of their pieces on the
    device and of their slot, and the columns behind."""
    bank_a = bank.a
    num_parts, most_ranks, inputs = bank_a.shape[1:]
    item, outputs, rank_item = bank_a.itemsize, bank.b.shape[2], bank.ranks.itemsize
    target = DTYPES.index(bank_a.dtype)
    found = []
    for part in parts:
        assert part.a is not None and part.b is not None and part.rank
        rank, padded = part.rank, -(-part.rank // RANK_STEP) * RANK_STEP
        (part.a, at_a), (part.b, at_b) = memory.keep(part.a), memory.keep(part.b)
        in_a, source = item * part.index * most_ranks * inputs, DTYPES.index(part.a.dtype)
        found.append([
            at_a.begin, rank, padded, inputs, *part.a.stride(), ONE, in_a, inputs, rank_item * part.index,
            at_a.piece, owner, A, source, target,
        ])
        scale, source = int(np.float32(part.scale).view(np.int32)), DTYPES.index(part.b.dtype)
        found.append([
            at_b.begin, rank, padded, part.b.shape[1], *part.b.stride(), scale, item * part.start, outputs, 0,
            at_b.piece, owner, B, source, target,
        ])
    for index in {*range(num_parts)} - {part.index for part in parts}:  # without an addition
        found.append([0, 0, 0, 0, 0, 0, ONE, 0, 0, rank_item * index, found[0][PIECE], owner, A, *found[0][SOURCE:]])
    return found


def _divide(memory: AdapterMemory, needed: set[int]) -> tuple[dict[int, tuple[int, int]], list[_Wave]]:
    """For each piece that is needed the wave that it comes in and where it begins there, and the waves."""
    starts: dict[int, tuple[int, int]] = {}
    waves: list[_Wave] = []
    at = STAGED_BYTES
    for number in sorted(needed):
        num_bytes = memory.used[number]
        if at + num_bytes > STAGED_BYTES:
            waves.append(_Wave([], []))
            at = 0
        starts[number] = len(waves) - 1, at
        waves[-1].pieces.append((memory.pieces[number], at, num_bytes))
        at += num_bytes
    return starts, waves


def _find_slot(bank: FactorBank, slot: int) -> tuple[int, int, int]:
    """Addresses of a slot's ``a``, ``b`` and ranks."""
    buffers = bank.a, bank.b, bank.ranks
    a, b, ranks = (buffer.data_ptr() + slot * buffer.stride(0) * buffer.itemsize for buffer in buffers)
    return a, b, ranks
