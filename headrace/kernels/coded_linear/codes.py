"""`CodedMatrix`: a quantised weight in the form that all checkpoint formats are read into: codes, scales, zero points.

A weight is ``(value of code - zero) * scale``. Here a code takes a byte; kernels repack. O outputs, I inputs, G groups
of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F

CHUNK_WEIGHTS = 1 << 22
"""Weights that are dequantised at a time, which bounds temporaries."""
LEAST_GROUP = 16
"""A cut through a group makes smaller groups of equal length down to this; below, inputs name their group."""
NOT_FINITE = "some {} are infinite or not a number, so the file is damaged or was written so; fetch it again"


class Code(Enum):
    """What a code stands for: an integer (int8 or uint8), an e4m3 number, or an entry of `TABLES`."""

    INT = "int"
    E4M3 = "e4m3"
    E2M1 = "e2m1"
    NF4 = "nf4"
    FP4 = "fp4"
    IQ4 = "iq4"


TABLES = {
    # OCP Microscaling Formats 1.0, section 5.3.3
    Code.E2M1: (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    # ggml's IQ4_NL and IQ4_XS
    Code.IQ4: tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))),
    # QLoRA, arXiv:2305.14314, appendix E
    Code.NF4: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    # bitsandbytes' 4-bit floats: 0, 1/192, then 2/3, 1, 1/3, 1/2, 1/6, 1/4, and their negatives
    Code.FP4: (
        0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25, -0.0, -0.005208333333, -0.66666667,
        -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
    ),
}
"""Values by code, for codes of 4 bits that are no integers."""


def is_finite(table: torch.Tensor) -> bool:
    """Whether all numbers are finite. True on a GPU: a checkpoint has thousands of tables, and to ask for each would
    wait for the device each time; there, requests are told that logits are not finite."""
    return table.device.type != "cpu" or bool(table.isfinite().all())


@dataclass(frozen=True)
class CodedMatrix:
    """A weight [O, I]. ``codes`` [O, I]: int8 or uint8, or float8_e4m3fn. ``scales`` [ceil(O / rows), G] of any float
    dtype: of blocks of ``rows`` outputs and ``group`` inputs, the last of which may be smaller. ``zeros``: like
    ``scales``, or None. ``group_ids`` [I]: each input's group, where groups are not consecutive inputs; ``group`` is
    then their usual size. ``bits`` of a code that carry information."""

    code: Code
    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    rows: int = 1
    group_ids: torch.Tensor | None = None
    bits: int = 8

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device) -> CodedMatrix:
        """On another device."""
        zeros, ids = (None if table is None else table.to(device) for table in (self.zeros, self.group_ids))
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros, group_ids=ids
        )

    def find_fault(self) -> str | None:
        """What is wrong with the tables of a matrix that a file describes; None if they fit."""
        if 0 in self.shape:
            return f"there are no values: {list(self.shape)}"
        if self.group_ids is not None and tuple(self.group_ids.shape) != self.shape[1:]:
            return f"values {list(self.shape)} need {self.shape[1]} groups of inputs, not {list(self.group_ids.shape)}"
        num_groups = self.scales.shape[1] if self.group_ids is not None else -(-self.shape[1] // self.group)
        for noun, table in (("scales", self.scales), ("zero points", self.zeros)):
            if table is not None and tuple(table.shape) != (-(-self.shape[0] // self.rows), num_groups):
                return (
                    f"values {list(self.shape)} need {noun} {[-(-self.shape[0] // self.rows), num_groups]}, the "
                    f"checkpoint has {list(table.shape)}"
                )
            if table is not None and table.is_floating_point() and not is_finite(table):
                return NOT_FINITE.format(noun)
        return None

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight [O, I]; computed in float32."""
        dense = torch.empty(self.shape, dtype=dtype, device=self.device)
        step = max(1, CHUNK_WEIGHTS // max(1, self.shape[1]))
        for at in range(0, self.shape[0], step):
            rows = range(at, min(at + step, self.shape[0]))
            values = decode(self.code, self.codes[at : rows.stop])
            if self.zeros is not None:
                values -= self._spread(self.zeros, rows)
            dense[at : rows.stop] = values * self._spread(self.scales, rows)
        return dense

    def _spread(self, table: torch.Tensor, rows: range) -> torch.Tensor:
        """Scales or zeros of each weight of these rows, float32: [n, I], or [n, 1] where the inputs share one."""
        table = table[rows.start // self.rows : (rows.stop - 1) // self.rows + 1].float()
        if self.rows > 1:
            first = rows.start // self.rows
            table = table[torch.arange(rows.start, rows.stop, device=self.device) // self.rows - first]
        if self.group_ids is not None:
            return table[:, self.group_ids]
        return table if table.shape[1] == 1 else table.repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def _with_tables(
        self, scales: torch.Tensor, zeros: torch.Tensor | None, *, group: int = 0, rows: int = 0
    ) -> CodedMatrix:
        """The same codes with other tables; ``group`` and ``rows`` of 0 stay."""
        return replace(self, scales=scales, zeros=zeros, group=group or self.group, rows=rows or self.rows)

    def by_row(self) -> CodedMatrix:
        """With a row of scales for each output."""
        if self.rows == 1:
            return self
        index = torch.arange(self.shape[0], device=self.device) // self.rows
        return self._with_tables(self.scales[index], None if self.zeros is None else self.zeros[index], rows=1)

    def as_signed(self) -> CodedMatrix:
        """Integers as int8; unsigned ones of 8 bits less 128."""
        if self.codes.dtype == torch.int8:
            return self
        if self.bits < 8:
            return replace(self, codes=self.codes.view(torch.int8), bits=8)
        zeros = torch.zeros_like(self.scales, dtype=torch.float32) if self.zeros is None else self.zeros.float()
        return replace(self, codes=(self.codes ^ 128).view(torch.int8), zeros=zeros - 128, bits=8)

    def keep(self, rows: slice, columns: slice) -> CodedMatrix:
        """Some consecutive outputs and inputs, wherever blocks end."""
        kept = self._keep_rows(rows.start, rows.stop)
        return kept._keep_columns(columns.start, columns.stop)

    def _keep_rows(self, start: int, stop: int) -> CodedMatrix:
        if (start, stop) == (0, self.shape[0]):
            return self
        whole = self if start % self.rows == 0 else self.by_row()
        tables = slice(start // whole.rows, -(-stop // whole.rows))
        return replace(
            whole, codes=self.codes[start:stop], scales=whole.scales[tables],
            zeros=None if whole.zeros is None else whole.zeros[tables]
        )

    def _keep_columns(self, start: int, stop: int) -> CodedMatrix:
        if (start, stop) == (0, self.shape[1]):
            return self
        kept = replace(self, codes=self.codes[:, start:stop])
        if self.group_ids is not None:
            return replace(kept, group_ids=self.group_ids[start:stop])
        if self.scales.shape[1] == 1:
            return replace(kept, group=stop - start)
        size = math.gcd(start % self.group, self.group)
        if size < LEAST_GROUP:
            return replace(kept, group_ids=torch.arange(start, stop, device=self.device) // self.group)
        # groups of ``size``, which neither the groups nor the cut divide
        index = torch.arange(start, stop, size, device=self.device) // self.group
        return kept._with_tables(
            self.scales[:, index], None if self.zeros is None else self.zeros[:, index], group=size
        )

    def regroup(self, group: int) -> CodedMatrix:
        """With smaller groups, of a size that divides the present one."""
        if self.scales.shape[1] == 1 and self.group_ids is None:  # one group, of any size
            num_groups = -(-self.shape[1] // group)
            spread = [None if table is None else table.expand(-1, num_groups) for table in (self.scales, self.zeros)]
        elif group == self.group:
            return self
        else:
            times, num_groups = self.group // group, -(-self.shape[1] // group)
            spread = [
                None if table is None else table.repeat_interleave(times, 1)[:, :num_groups]
                for table in (self.scales, self.zeros)
            ]
        assert spread[0] is not None
        return self._with_tables(spread[0], spread[1], group=group)


def decode(code: Code, codes: torch.Tensor) -> torch.Tensor:
    """The values of codes, as new float32."""
    if code in TABLES:
        return torch.tensor(TABLES[code], device=codes.device)[codes.int()]
    return codes.to(torch.float32, copy=True)


def stack_matrices(parts: Sequence[CodedMatrix]) -> CodedMatrix | None:
    """Matrices of equal inputs above one another, with their own scales; None where no common form holds them."""
    if len(parts) == 1:
        return parts[0]
    if {part.code for part in parts} == {Code.INT} and len({part.codes.dtype for part in parts}) > 1:
        parts = [part.as_signed() for part in parts]
    first = parts[0]
    if len({(part.code, part.codes.dtype, part.shape[1]) for part in parts}) > 1:
        return None
    if any(part.group_ids is not None for part in parts):
        if any(
            part.group_ids is None or first.group_ids is None or not torch.equal(part.group_ids, first.group_ids)
            or part.scales.shape[1] != first.scales.shape[1] for part in parts
        ):
            return None
    else:
        groups = {part.group for part in parts if part.scales.shape[1] > 1}
        if groups:
            common = math.gcd(*groups)
            parts = [part.regroup(common) for part in parts]
    # blocks of outputs stay where every part but the last has whole ones
    if len({part.rows for part in parts}) > 1 or any(part.shape[0] % part.rows for part in parts[:-1]):
        parts = [part.by_row() for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.zeros_like(p.scales) if p.zeros is None else p.zeros.to(p.scales) for p in parts])
    dtype = first.scales.dtype if len({part.scales.dtype for part in parts}) == 1 else torch.float32
    return replace(
        parts[0], codes=_join([part.codes for part in parts]), scales=_join([p.scales.to(dtype) for p in parts]),
        zeros=zeros, bits=max(part.bits for part in parts)
    )


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dtype.itemsize > 1:
        return torch.cat(tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)  # float8 lacks operators


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 [R, count] from little-endian bit streams in ``words`` [R, W] int32; codes may straddle words. Raises
    `TypeError` for words of another size."""
    if words.dtype.itemsize != 4:
        raise TypeError(f"words of codes are {words.dtype}, not int32")
    if 8 % bits == 0:  # whole codes to a byte
        raw = words.contiguous().view(torch.uint8)
        if bits < 8:
            raw = torch.stack([raw >> at & (1 << bits) - 1 for at in range(0, 8, bits)], dim=-1).flatten(1)
        return raw[:, :count]
    start = torch.arange(count, device=words.device) * bits
    low, shift = start // 32, start % 32
    unsigned = F.pad(words.long() & 0xFFFFFFFF, (0, 1))  # a stream may end with its last word
    pairs = unsigned[:, low] | (unsigned[:, low + 1] << 32)
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.uint8)
