"""The memory layout of packed weights, and packing and unpacking in plain torch.

A weight [O, I] is cut into panels of 16 outputs. A panel holds 32-bit words [W, 16]: word w of all its outputs side by
side, so that a product reads memory once, sequentially. `Format` says what a word holds; inputs are padded to 64,
outputs to 16. O outputs, I inputs, P panels, W words, G groups of 32 inputs, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.nn.functional as F

from headrace.kernels.native.loading import NATIVE

NATIVE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of plain weights that the native library packs."""
PANEL = 16
"""Outputs of a panel: one 32-bit word of each fills a 512-bit vector."""
GROUP = 32
"""Inputs that share a scale."""
PAD = 64
"""Inputs are padded with zeros to a multiple of it."""
CHUNK_WEIGHTS = 1 << 17
"""Weights processed at a time, so that intermediates stay in the cache."""


class Format(Enum):
    """How numbers are stored. The value is the native kernels' number; a word holds ``per_word`` inputs.

    ``INT8`` has a scale per output; group formats a float16 scale and min per output and group: code * scale + min.
    Byte j of a word of nibbles holds input j in its low half and input j + 4 in its high half. Nibbles are the codes,
    or indices into `TABLES`; those formats have no mins."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_GROUP = 3
    INT4_GROUP = 4
    E2M1_GROUP = 5
    IQ4_GROUP = 6

    @property
    def per_word(self) -> int:
        return (1, 2, 4, 4, 8, 8, 8)[self.value]

    @property
    def has_nibbles(self) -> bool:
        return self.per_word == 8

    @property
    def is_exact(self) -> bool:
        """Whether products take their inputs unrounded; the other formats round them to 8 bits."""
        return self in (Format.FLOAT32, Format.BFLOAT16)


TABLES = {
    Format.E2M1_GROUP: torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8),
    Format.IQ4_GROUP: torch.tensor(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
    ),
}
"""Codes by nibble: twice an E2M1 number (OCP Microscaling Formats 1.0, section 5.3.3), and those of ggml's
IQ4_NL."""


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [O, I]: ``words`` [P, W, 16] int32; ``scales`` [P * 16] float32 for int8, [P, G, 16] float16 for the
    group formats; ``mins`` [P, G, 16] float16, or None for zeros. ``number`` is the format's, as the native kernels
    take it."""

    format: Format
    out_features: int
    in_features: int
    words: torch.Tensor
    scales: torch.Tensor | None = None
    mins: torch.Tensor | None = None

    number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.format.value)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.out_features, self.in_features

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not None, by name."""
        return {name: tensor for name in ("words", "scales", "mins") if (tensor := getattr(self, name)) is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def pad_up(count: int, step: int) -> int:
    """``count`` rounded up to a multiple of ``step``."""
    return -(-count // step) * step


def allocate(
    form: Format, out_features: int, in_features: int, *, has_mins: bool = True, is_blank: bool = True
) -> PackedMatrix:
    """A new matrix, zeros if ``is_blank``, else uninitialised. ``has_mins`` matters for group formats alone."""
    make = torch.zeros if is_blank else torch.empty
    panels, padded = pad_up(out_features, PANEL) // PANEL, pad_up(in_features, PAD)
    words = make(panels, padded // form.per_word, PANEL, dtype=torch.int32)
    if form.is_exact:
        return PackedMatrix(form, out_features, in_features, words)
    if form is Format.INT8:
        return PackedMatrix(form, out_features, in_features, words, make(panels * PANEL))
    scales, mins = (make(panels, padded // GROUP, PANEL, dtype=torch.float16) for _ in range(2))
    return PackedMatrix(form, out_features, in_features, words, scales, mins if has_mins else None)


def pack_floats(weight: torch.Tensor) -> PackedMatrix:
    """Pack a float32 or bfloat16 weight, unchanged."""
    form = Format.BFLOAT16 if weight.dtype == torch.bfloat16 else Format.FLOAT32
    native = pack_natively(form, weight)
    if native is not None:
        return native
    packed = allocate(form, *weight.shape)
    for at, rows in chunks(weight):
        put_words(packed, at, F.pad(rows, (0, -rows.shape[1] % PAD)).view(torch.int32))
    return packed


def pack_natively(form: Format, weight: torch.Tensor) -> PackedMatrix | None:
    """Pack a plain weight [O, I] in C++ (no mins for INT8_GROUP). None while the native library is not loaded, or for a
    weight that it does not take: the caller then packs by torch, with the same result."""
    ops = NATIVE.find()
    if ops is None or weight.dtype not in NATIVE_TYPES or weight.stride(-1) != 1 or weight.device.type != "cpu":
        return None
    # not zeroed: the native library writes all of it, padding included
    packed = allocate(form, *weight.shape, has_mins=form is Format.INT4_GROUP, is_blank=False)
    ops.pack_weight(weight, form.value, packed.words, packed.scales, packed.mins)
    return packed


def chunks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``(first row, rows [n, I])`` of the weight in order; first rows are multiples of 16, as `put_words`
    needs."""
    step = chunk_rows(weight.shape[1])
    for at in range(0, weight.shape[0], step):
        yield at, weight[at : at + step]


def chunk_rows(in_features: int) -> int:
    """Rows per chunk, a multiple of 16."""
    return pad_up(max(1, CHUNK_WEIGHTS // max(1, in_features)), PANEL)


def put_words(packed: PackedMatrix, at: int, words: torch.Tensor) -> None:
    """Store ``words`` [n, W] as rows from ``at`` on, a multiple of 16. Rows up to the next multiple of 16 become
    zero."""
    _by_panel(packed.words, at, words)


def put_codes(packed: PackedMatrix, at: int, codes: torch.Tensor) -> None:
    """Store integer ``codes`` [n, I] as rows from ``at`` on, a multiple of 16: int8, or where a word holds nibbles
    uint8 below 16 (indices into `TABLES`, not their entries)."""
    codes = F.pad(codes, (0, -codes.shape[1] % PAD))
    if packed.format.has_nibbles:
        # eight inputs to four bytes: j in the low nibble of byte j, j + 4 in its high nibble
        halves = codes.view(codes.shape[0], -1, 2, 4)
        codes = halves[:, :, 0] | halves[:, :, 1] << 4
    put_words(packed, at, codes.contiguous().view(codes.shape[0], -1).view(torch.int32))


def put_groups(packed: PackedMatrix, at: int, scales: torch.Tensor, mins: torch.Tensor | None) -> None:
    """Store ``scales`` and ``mins`` [n, ceil(I / 32)] of the rows from ``at`` on, a multiple of 16, as float16."""
    assert packed.scales is not None
    for kept, values in ((packed.scales, scales), (packed.mins, mins)):
        if kept is not None and values is not None:
            _by_panel(kept, at, F.pad(values.to(kept.dtype), (0, kept.shape[1] - values.shape[1])))


def _by_panel(kept: torch.Tensor, at: int, rows: torch.Tensor) -> None:
    """Store ``rows`` [n, W] in panels ``kept`` [P, W, 16] from row ``at`` on, a multiple of 16."""
    rows = F.pad(rows, (0, 0, 0, -rows.shape[0] % PANEL))
    # [panels, 16, W] to [panels, W, 16]: word w of 16 outputs side by side
    panels = rows.view(-1, PANEL, rows.shape[1])
    kept[at // PANEL : at // PANEL + panels.shape[0]] = panels.transpose(1, 2)


def gather_rows(packed: PackedMatrix, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight's ``rows`` [T] int64 as plain numbers [T, I] of ``dtype``, as an embedding looks them up."""
    # the panel of each row, and its column there
    panels, places = rows // PANEL, rows % PANEL
    values = _decode(packed.format, packed.words[panels, :, places])
    if packed.scales is not None and packed.format is Format.INT8:
        values = values * packed.scales[rows, None]
    elif packed.scales is not None:
        values = values.unflatten(1, (-1, GROUP)) * packed.scales[panels, :, places].float().unsqueeze(-1)
        if packed.mins is not None:
            values += packed.mins[panels, :, places].float().unsqueeze(-1)
        values = values.flatten(1)
    return values[:, : packed.in_features].to(dtype)


def unpack(packed: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The weight [O, I] as a new plain tensor, in chunks that fit the cache."""
    dense = torch.empty(packed.shape, dtype=dtype)
    step = chunk_rows(packed.in_features)
    for at in range(0, packed.out_features, step):
        rows = torch.arange(at, min(at + step, packed.out_features))
        dense[at : at + len(rows)] = gather_rows(packed, rows, dtype)
    return dense


def _decode(form: Format, words: torch.Tensor) -> torch.Tensor:
    """Words [T, W] to numbers [T, padded I], before scales and mins are applied."""
    if form is Format.FLOAT32:
        return words.view(torch.float32)
    if form is Format.BFLOAT16:
        return words.contiguous().view(torch.bfloat16)
    if not form.has_nibbles:
        return words.contiguous().view(torch.int8).float()
    # byte j of a word: input j in the low nibble, input j + 4 in the high one
    code_bytes = words.contiguous().view(torch.uint8).unflatten(1, (-1, 1, 4))
    nibbles = torch.cat((code_bytes & 15, code_bytes >> 4), dim=2).flatten(1)
    return (TABLES[form][nibbles.int()] if form in TABLES else nibbles).float()
