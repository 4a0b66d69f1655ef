"""Products with low-rank additions of many adapters, each for the rows of its own requests.

T rows, I inputs, O outputs, S slots, P parts of a stacked output, R rank of the largest adapter, N rows with an
adapter, K blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires

BLOCK_ROWS = 16
"""Most rows of a block, the rows of a tensor core's smallest tile."""


@dataclass(slots=True)
class SlotRows:
    """Which rows of a step have which adapter. ``order`` [N] int64: indices of the rows that have one, sorted by slot.
    ``blocks`` [3, K] int64: of each block its slot, its first place in ``order``, and how many rows it has, at most
    `BLOCK_ROWS`, all of one slot; unused blocks have none. Both are on the device; a captured step has room for more
    than it uses. ``segments``: slot, first place and number of rows of each adapter, on the host; empty in a captured
    step, whose rows only the device knows. ``num_rows``: T. ``pairs`` [2, N] int64: ``order`` and the slot of each, on
    the host; made when it is asked for."""

    num_rows: int
    order: torch.Tensor
    blocks: torch.Tensor
    segments: list[tuple[int, int, int]]
    _pairs: torch.Tensor | None = None

    @property
    def pairs(self) -> torch.Tensor:
        """See the class."""
        if self._pairs is None:
            slots = [slot for slot, _, count in self.segments for _ in range(count)]
            self._pairs = torch.stack((self.order[: len(slots)], torch.tensor(slots)))
        return self._pairs


@dataclass(slots=True)
class LowRankBank:
    """The low-rank additions of one stacked weight in all slots. ``a`` [S, P, R, I] and ``b`` [S, R, O] in the model's
    dtype, scales multiplied into ``b``; rows beyond an adapter's rank are zero up to a multiple of 16, any beyond.
    ``ranks`` [S, P] int64, 0 for parts without an addition. ``ends`` are the P ends of the parts among the O outputs.
    ``tiles`` [3, n] int64: of each tile of outputs its part, first output, and end; none is in two parts."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    ends: tuple[int, ...]
    tiles: torch.Tensor


TILE_OUTPUTS = 256
"""Outputs of a tile."""


def make_tiles(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`LowRankBank.tiles` for parts with these ends."""
    columns: list[tuple[int, int, int]] = []
    begin = 0
    for part, end in enumerate(ends):
        columns += [(part, at, min(at + TILE_OUTPUTS, end)) for at in range(begin, end, TILE_OUTPUTS)]
        begin = end
    return torch.tensor(columns, dtype=torch.int64, device=device).t().contiguous()


ADD_LOW_RANK = Operation("LoRA kernel")
"""``add_low_rank(x [T, I], out [T, O], bank, rows)`` adds ``b[s]' (a[s] x[t])`` to row t of ``out`` in place, for each
row t that has the adapter in slot s: of each part its own outputs. Other rows are neither read nor written. ``out`` is
in x's dtype or float32; what is added is computed in float32 from operands in the bank's dtype."""

ADD_LOW_RANK.add("reference", "headrace.kernels.lora.reference:add_low_rank", doc="torch, an adapter at a time")
ADD_LOW_RANK.add(
    "cpu", "headrace.kernels.lora.cpu:add_low_rank",
    supports=requires(device="cpu", dtypes=("float32", "bfloat16", "float16")), priority=10, doc="own C++ kernels",
)
ADD_LOW_RANK.add(
    "triton", "headrace.kernels.lora.triton:add_low_rank", supports=requires(device="cuda"), priority=10,
    doc="two launches for all parts and adapters",
)
ADD_LOW_RANK.add(
    "triton_pdl", "headrace.kernels.lora.triton:add_low_rank_pdl", supports=requires(device="cuda", capability=(9, 0)),
    priority=15, doc="with dependent launch",
)
