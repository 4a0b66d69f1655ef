"""Low-rank additions in 8 bits, as the C++ kernels read them beside weights of 8 or 4 bits: `CodedBank`.

S slots, P parts of a stacked output, R ranks of a part in a slot, I inputs, O outputs, r rank, N panels of 16 outputs.
``CodedSlot`` in csrc/cpu/lora.h says the same of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.kernels.packed_linear.layout import GROUP, PAD, PANEL, Format, PackedMatrix, pad_up, unpack
from headrace.kernels.packed_linear.quantise import MOST_INT8, quantise_int8_groups

RANKS = 16
"""Ranks of an output that share a scale."""
SHIFT = 128
"""Added to codes of ``b``, as byte products take one side unsigned."""
LINE = 64


@dataclass(frozen=True, slots=True)
class CodedFactors:
    """``a`` [r, I] and ``b`` [r, O] of one part: ``a`` as `quantise_int8_groups` makes it; ``codes`` [r / 16, N, 4, 16,
    4] uint8, where byte j of word w of an output is rank 4 w + j, and ``scales`` [r / 16, N, 16] bfloat16. r is rounded
    up to 16. ``num_outputs``: O."""

    num_outputs: int
    a: PackedMatrix
    codes: torch.Tensor
    scales: torch.Tensor


def encode(a: torch.Tensor, b: torch.Tensor) -> CodedFactors:
    """``a`` [r, I] and ``b`` [r, O], rounded to 8 bits with a scale per 32 inputs of a rank, and per 16 ranks of an
    output. Only their product is kept: a power of two moves from ``a``, whose scales are float16, to ``b``."""
    rank, num_outputs = b.shape
    _, exponent = torch.frexp(a.float().abs().amax().clamp(2.0**-100, 2.0**100))
    a, b = torch.ldexp(a.float(), -exponent), torch.ldexp(b.float(), exponent)
    groups = F.pad(b, (0, -num_outputs % PANEL, 0, -rank % RANKS)).view(-1, RANKS, pad_up(num_outputs, PANEL))
    scales = (groups.abs().amax(dim=1) / MOST_INT8).bfloat16()
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    codes = (groups * inverse.unsqueeze(1)).round_().clamp_(-MOST_INT8, MOST_INT8).add_(SHIFT).to(torch.uint8)
    words = codes.view(-1, RANKS // 4, 4, codes.shape[2] // PANEL, PANEL).permute(0, 3, 1, 4, 2)
    return CodedFactors(num_outputs, quantise_int8_groups(a), words.contiguous(), scales.view(len(scales), -1, PANEL))


def decode_b(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``b`` [R, N * 16] float32 of the ``codes`` and ``scales`` of a `CodedFactors`."""
    values = codes.float().sub_(SHIFT).mul_(scales.float()[:, :, None, :, None])
    return values.permute(0, 2, 4, 1, 3).reshape(len(codes) * RANKS, -1)


@dataclass(slots=True)
class CodedBank:
    """As `LowRankBank`, but what a slot has is one row of ``codes`` [S, bytes] uint8. ``most_ranks``: R, a multiple of
    16. Kernels for CPUs alone take it."""

    codes: torch.Tensor
    ranks: torch.Tensor
    ends: tuple[int, ...]
    inputs: int
    most_ranks: int
    extended: None = None
    """No weight is in this memory."""

    @property
    def slot_rows(self) -> int:
        """P * R."""
        return len(self.ends) * self.most_ranks

    def put(self, slot: int, part: int, factors: CodedFactors, gain: torch.Tensor | None = None) -> None:
        """Take what an adapter has for a part into a slot, its outputs multiplied by ``gain`` [O]. Its rank is not
        set."""
        words, a_scales, codes, scales = self._views(slot)
        first, own = part * self.most_ranks // PANEL, factors.a
        assert own.scales is not None
        words[first : first + len(own.words)].copy_(own.words)
        a_scales[first : first + len(own.scales)].copy_(own.scales)
        begin = sum(self._panels()[:part])
        groups, panels = factors.codes.shape[:2]
        codes[:groups, begin : begin + panels].copy_(factors.codes)
        scaled = factors.scales
        if gain is not None:
            scaled = scaled * F.pad(gain, (0, -len(gain) % PANEL)).view(-1, PANEL)
        scales[:groups, begin : begin + panels].copy_(scaled)

    def factors(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``a`` [P, R, I] and ``b`` [R, O] float32 of a slot; defined for its ranks alone."""
        words, a_scales, codes, scales = self._views(slot)
        shape = len(self.ends) * self.most_ranks, self.inputs
        a = unpack(PackedMatrix(Format.INT8_GROUP, *shape, words, a_scales), torch.float32)
        b, begin, parts = decode_b(codes, scales), 0, []
        for width, panels in zip(self._widths(), self._panels(), strict=True):
            parts.append(b[:, begin : begin + width])
            begin += panels * PANEL
        return a.view(len(self.ends), self.most_ranks, self.inputs), torch.cat(parts, dim=1)

    def _widths(self) -> list[int]:
        return [end - begin for begin, end in pairwise((0, *self.ends))]

    def _panels(self) -> list[int]:
        return [pad_up(width, PANEL) // PANEL for width in self._widths()]

    def _views(self, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Words and scales of ``a``, codes and scales of ``b``."""
        found, at = [], 0
        for shape, dtype in _shapes(len(self.ends), self.most_ranks, self.inputs, sum(self._panels())):
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            found.append(self.codes[slot, at : at + num_bytes].view(dtype).view(shape))
            at += num_bytes
        return found[0], found[1], found[2], found[3]


def make_coded_bank(
    num_slots: int, most_ranks: int, inputs: int, ends: tuple[int, ...], ranks: torch.Tensor
) -> CodedBank:
    """One with zeros."""
    bank = CodedBank(torch.empty(0), ranks, ends, inputs, most_ranks)
    shapes = _shapes(len(ends), most_ranks, inputs, sum(bank._panels()))
    num_bytes = sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in shapes)
    bank.codes = torch.zeros(num_slots, pad_up(num_bytes, LINE), dtype=torch.uint8)
    return bank


def _shapes(num_parts: int, most_ranks: int, inputs: int, panels: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    a_panels, padded, groups = num_parts * most_ranks // PANEL, pad_up(inputs, PAD), most_ranks // RANKS
    return [
        ((a_panels, padded // Format.INT8_GROUP.per_word, PANEL), torch.int32),
        ((a_panels, padded // GROUP, PANEL), torch.float16),
        ((groups, panels, RANKS // 4, PANEL, 4), torch.uint8),
        ((groups, panels, PANEL), torch.bfloat16),
    ]
