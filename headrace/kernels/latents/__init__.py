"""Latents: vectors that are both key and value, one for a token or a group of tokens, in pages of slots.

Slot number = page * S + index within the page. T tokens, P pages, S slots of a page, E dims of a vector, of which the
last R are rotated, in adjacent pairs, and the first N = E - R are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.kernels.operation import KernelQuery, Operation

if TYPE_CHECKING:
    import torch

    from headrace.kernels.latents.slots import Slots

GROUP = 64
"""Plain dims that share a scale in a packed slot."""
ROTATED = 64
"""Rotated dims of a packed slot, stored in bfloat16."""
SCALE_BYTES = 8
"""Per packed slot: one e8m0 byte per group of plain dims (7 of the 448 plain dims of head dim 512), padded to 8."""
KEY_SCALE_BYTES = 4
"""Per packed index key: one float32 scale."""
MOST_APART = 11
"""Of a packed index key in MXFP4 no scale is less than so many powers of two below the key's largest, so that its
values are e4m3 numbers times one power of two: 6 times the largest scale becomes 384, 0.5 times the least 2 ** -6."""


class LatentNorm(NamedTuple):
    """What turns a projection into a latent: the RMS norm's ``weight`` [E] and ``eps``, and the table ``cos_sin``
    [L, R] float32 (first half cosines, second half sines) by which it is rotated."""

    weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor


class LatentRows(NamedTuple):
    """Rows ``x`` [T, E] to be normalised and rotated by their ``positions`` [T] int64, and written to the ``slots`` of
    ``numbers`` [T] int64. x may be strided, its last dimension contiguous. Rows may share a slot only in the null
    page."""

    x: torch.Tensor
    norm: LatentNorm
    positions: torch.Tensor
    slots: Slots
    numbers: torch.Tensor


DECODE_WINDOWS = Operation("decode window kernel")
"""``decode_windows(page_table [R, W] int32, kv_lens [R] int32, *, window, per_page) -> (numbers [R, window] int64,
counts [R] int64)``: of the last token of each request, the slots of the latest positions, its own first, and how many
there are; the others are undefined.
"""

DECODE_ENTRIES = Operation("decode entry kernel")
"""``decode_entries(kv_lens [R] int32, *, ratio) -> (requests [R] int64, visible [R] int64)``: the requests' own
numbers, and how many whole windows of ``ratio`` tokens each has."""

LIST_ENTRIES = Operation("entry list kernel")
"""``list_entries(page_table [R, W] int32, *, count, per_page) -> [R, count] int64``: the slots of the first ``count``
entries of each request, undefined beyond those that it has. Rows of the table may be one row, expanded."""

DECODE_STATE = Operation("decode state kernel")
"""``decode_state(page_table [R, W] int32, kv_lens [R] int32, *, ratio, block, ring, per_page) -> (requests, windows,
rows)``, [R] int64 each: the requests' own numbers; the window that ends with each one's last token, or -1; the row of
that token, of a ring of ``ring`` rows for each ``block`` tokens, ``per_page`` rows to a page."""


def reason_against_latents(query: KernelQuery) -> str | None:
    """Why the Triton kernels here and in `compressor` cannot make these latents; None if they can."""
    head_dim, rotary_dim = query.shape.get("head_dim", 0), query.shape.get("rotary_dim", 0)
    if query.device != "cuda":
        return "needs a cuda device"
    if head_dim & (head_dim - 1) or rotary_dim & (rotary_dim - 1) or not 16 <= rotary_dim < head_dim <= 512:
        return f"takes powers of two up to 512, at least 16 of them rotated, not {rotary_dim} of {head_dim}"
    if query.shape.get("packed", 0) and (rotary_dim != ROTATED or query.capability < (8, 9)):
        return f"packs {ROTATED} rotated dims, with compute capability 8.9"
    return None


for _operation, _name in (
    (DECODE_WINDOWS, "decode_windows"), (DECODE_ENTRIES, "decode_entries"), (DECODE_STATE, "decode_state"),
    (LIST_ENTRIES, "list_entries"),
):
    _operation.add("reference", f"headrace.kernels.latents.reference:{_name}", doc="plain torch")
    _operation.add_triton(f"headrace.kernels.latents.decodes:{_name}", doc="one kernel")
