"""Low-rank additions in torch, an adapter at a time: the oracle and the fallback."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F

from headrace.kernels.few_decodes import Rotation
from headrace.kernels.linear import Norm
from headrace.kernels.lora import (
    BEGIN,
    COLUMN_STRIDE,
    PADDED,
    RANK,
    RANKS,
    ROW_STRIDE,
    SCALE,
    TARGET,
    TARGET_STRIDE,
    WIDTH,
    LowRankBank,
    Reduced,
    SlotRows,
)
from headrace.kernels.lora.codes import CodedBank
from headrace.kernels.rowwise import ADD_RMS_NORM, GELU_TANH_MUL, ROPE_WRITE, SILU_MUL


def shrink(x: torch.Tensor, bank: LowRankBank | CodedBank, rows: SlotRows) -> torch.Tensor:
    """See `SHRINK`; [T, P * R] float32, of which only what `expand` reads is defined."""
    num_parts, most_ranks = _parts_of(bank)
    reduced = torch.zeros((len(x), num_parts, most_ranks), dtype=torch.float32, device=x.device)
    for slot, own in _segments(rows):
        inputs, a = x.index_select(0, own).float(), bank.factors(slot)[0]
        for part, rank in enumerate(_read(bank.ranks[slot])):
            reduced[own, part, :rank] = inputs @ a[part, :rank].float().t()
    return reduced.flatten(1)


def linear_shrink(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bank: LowRankBank, rows: SlotRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `LINEAR_SHRINK`."""
    return F.linear(x, weight, bias), shrink(x, bank, rows)


def expand(reduced: torch.Tensor | Reduced, out: torch.Tensor, bank: LowRankBank | CodedBank, rows: SlotRows) -> None:
    """See `EXPAND`."""
    for slot, own in _segments(rows):
        begin, sums, b = 0, _sums_of(reduced, bank, slot, own), bank.factors(slot)[1]
        for part, (rank, end) in enumerate(zip(_read(bank.ranks[slot]), bank.ends, strict=True)):
            if rank:
                added = sums[:, part, :rank] @ b[:rank, begin:end].float()
                out[:, begin:end].index_add_(0, own, added.to(out.dtype))
            begin = end


def expand_gated(
    reduced: torch.Tensor | Reduced, x: torch.Tensor, bank: LowRankBank, rows: SlotRows, activation: str
) -> torch.Tensor:
    """See `EXPAND_GATED`."""
    expand(reduced, x, bank, rows)
    return _gate(x, activation)


def expand_add_norm(
    reduced: torch.Tensor | Reduced, x: torch.Tensor, residual: torch.Tensor, norm: Norm, bank: LowRankBank,
    rows: SlotRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `EXPAND_ADD_NORM`."""
    added = x.clone() if x.dim() == 2 else x.sum(0)
    expand(reduced, added, bank, rows)
    found: tuple[torch.Tensor, torch.Tensor] = ADD_RMS_NORM.load("reference")(
        added.to(residual.dtype), residual, norm.weight, norm.eps, norm.offset
    )
    return found


def expand_rope_write(
    reduced: torch.Tensor | Reduced, qkv: torch.Tensor, rotation: Rotation, k_pages: torch.Tensor,
    v_pages: torch.Tensor, bank: LowRankBank, rows: SlotRows,
) -> torch.Tensor:
    """See `EXPAND_ROPE_WRITE`."""
    expand(reduced, qkv, bank, rows)
    q_norm, k_norm = rotation.norms or (None, None)
    q: torch.Tensor = ROPE_WRITE.load("reference")(
        qkv, rotation.positions, rotation.cos_sin, rotation.slots, k_pages, v_pages, q_norm=q_norm, k_norm=k_norm,
        **rotation.shape,
    )
    return q


def adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bank: LowRankBank, rows: SlotRows,
    activation: str = "", before: tuple[torch.Tensor, Norm] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `ADAPTED_LINEAR`."""
    total = None
    if before is not None:
        residual, norm = before
        x, total = ADD_RMS_NORM.load("reference")(x, residual, norm.weight, norm.eps, norm.offset)
    out = F.linear(x, weight, bias)
    expand(shrink(x, bank, rows), out, bank, rows)
    return _gate(out, activation) if activation else out, total


def adapted_norm(
    x: torch.Tensor, pending: torch.Tensor, residual: torch.Tensor, norm: Norm, bank: LowRankBank,
    following: LowRankBank | None, rows: SlotRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `ADAPTED_NORM`."""
    normed, total = expand_add_norm(shrink(x, bank, rows), pending, residual, norm, bank, rows)
    return normed, total, None if following is None else shrink(normed, following, rows)


def place_factors(
    source: torch.Tensor, table: torch.Tensor, most_columns: int, dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    """See `PLACE_FACTORS`."""
    for row in _read(table):
        rank, padded, width = row[RANK], row[PADDED], row[WIDTH]
        if row[RANKS]:
            _at(row[RANKS], 1, torch.int64).fill_(rank)
        if not padded * width:
            continue
        target = _at(row[TARGET], (padded - 1) * row[TARGET_STRIDE] + width, target_dtype)
        target = target.as_strided((padded, width), (row[TARGET_STRIDE], 1))
        count = (rank - 1) * row[ROW_STRIDE] + (width - 1) * row[COLUMN_STRIDE] + 1
        stored = source[row[BEGIN] : row[BEGIN] + count * dtype.itemsize].view(dtype)
        factor = stored.as_strided((rank, width), (row[ROW_STRIDE], row[COLUMN_STRIDE])).float()
        target[:rank] = factor * torch.tensor(row[SCALE], dtype=torch.int32).view(torch.float32)
        target[rank:] = 0.0


def _gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    gated: torch.Tensor = {"silu": SILU_MUL, "gelu_tanh": GELU_TANH_MUL}[activation].load("reference")(x)
    return gated


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """So many numbers in memory of the host."""
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def _sums_of(
    reduced: torch.Tensor | Reduced, bank: LowRankBank | CodedBank, slot: int, own: torch.Tensor
) -> torch.Tensor:
    """[n, P, R] float32 of the rows ``own`` [n] of a slot."""
    parts = _parts_of(bank)
    if not isinstance(reduced, Reduced):
        return reduced[own].unflatten(1, parts)
    assert reduced.is_dense, "by places they are for kernels of a GPU"
    return reduced.sums.float().sum(0)[own].unflatten(1, (-1, *parts))[:, slot]


def _parts_of(bank: LowRankBank | CodedBank) -> tuple[int, int]:
    """P and R."""
    return len(bank.ends), bank.most_ranks


def _segments(rows: SlotRows) -> list[tuple[int, torch.Tensor]]:
    """Each slot, or part of its rows, and the indices of the rows."""
    found = rows.segments or _read(rows.blocks.t())
    return [(slot, rows.order[first : first + count]) for slot, first, count in found if slot >= 0]


def _read(tensor: torch.Tensor) -> list[Any]:
    """On the host; waits for the device."""
    found: list[Any] = tensor.tolist()
    return found
