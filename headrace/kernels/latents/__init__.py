"""Latents: vectors that are both key and value, one for a token or a group of tokens, in pages of slots.

Slot number = page * S + index within the page. T tokens, P pages, S slots of a page, E dims of a vector, of which the
last R are rotated, in adjacent pairs, and the first N = E - R are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.kernels.operation import KernelQuery, Operation, requires

if TYPE_CHECKING:
    import torch

GROUP = 64
"""Plain dims that share a scale in a packed slot."""
ROTATED = 64
"""Rotated dims of a packed slot, stored in bfloat16."""
SCALE_BYTES = 8
"""Per packed slot: one e8m0 byte per group of plain dims (7 of the 448 plain dims of head dim 512), padded to 8."""
KEY_SCALE_BYTES = 4
"""Per packed index key: one float32 scale."""


class LatentNorm(NamedTuple):
    """What turns a projection into a latent: the RMS norm's ``weight`` [E] and ``eps``, and the table ``cos_sin``
    [L, R] float32 (first half cosines, second half sines) by which it is rotated."""

    weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor


WRITE_LATENTS = Operation("latent write kernel")
"""``write_latents(x [T, E], norm: LatentNorm, positions [T] int64, slots: Slots, numbers [T] int64)``: normalise and
rotate each row, and write it to the slot of that number. x may be strided, its last dimension contiguous. Rows may
share a slot only in the null page. The query's shape has ``head_dim``, ``rotary_dim``, and ``packed``: 1 for slots of
8 bits.
"""


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


def reason_against_dependent(query: KernelQuery) -> str | None:
    """The same with programmatic dependent launch."""
    return requires(device="cuda", capability=(9, 0))(query) or reason_against_latents(query)


WRITE_LATENTS.add("reference", "headrace.kernels.latents.reference:write_latents", doc="plain torch")
WRITE_LATENTS.add(
    "triton", "headrace.kernels.latents.triton:write_latents", supports=reason_against_latents, priority=10,
    doc="one kernel: norm, rotation, packing, write",
)
WRITE_LATENTS.add(
    "triton_pdl", "headrace.kernels.latents.triton:write_latents_pdl", supports=reason_against_dependent, priority=15,
    doc="with dependent launch",
)
