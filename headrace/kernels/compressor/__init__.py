"""Compression of tokens into entries: each window of r tokens becomes one latent, a softmax-weighted sum per channel.

With overlapping windows an entry is pooled from n = 2r tokens, its own window and the one before; a token then has
W = 2E dims: the first E are its part in the entry of the next window, the last E in that of its own. Otherwise n = r
and W = E. T tokens, R requests, C candidates for windows, E dims of an entry, P pages, all computed in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.kernels.latents import reason_against_latents
from headrace.kernels.operation import Operation

if TYPE_CHECKING:
    import torch

    from headrace.kernels.latents import LatentNorm
    from headrace.kernels.latents.slots import Slots


class Windows(NamedTuple):
    """Windows that may end in a step. ``requests`` [C] int64: of which request; ``numbers`` [C] int64: the window's
    index within its request, -1 where none ends. ``query_start`` [R + 1] and ``kv_lens`` [R] int32 as in a step's
    attention inputs."""

    requests: torch.Tensor
    numbers: torch.Tensor
    query_start: torch.Tensor
    kv_lens: torch.Tensor


class StatePages(NamedTuple):
    """Projections of recent tokens: ``values`` and ``gates`` [P, rows, W] float32. A token's row is in the page of its
    request that ``page_table`` [R, pages] names: a block of ``block`` tokens has a ring of ``ring`` rows."""

    values: torch.Tensor
    gates: torch.Tensor
    page_table: torch.Tensor
    block: int
    ring: int


class EntryPages(NamedTuple):
    """Where entries are written: entry m of a request is the m-th slot of its row of ``page_table`` [R, pages]."""

    slots: Slots
    page_table: torch.Tensor


class Pooling(NamedTuple):
    """How windows are pooled: ``ratio`` tokens each, and ``ape`` [ratio, W] float32, which is added to the gate logits
    by a token's place in its window. They overlap if W is twice the entries' dims."""

    ratio: int
    ape: torch.Tensor


COMPRESS = Operation("compression kernel")
"""``compress(projected [T, 2W] float32, windows: Windows, state: StatePages, pooling: Pooling, norm: LatentNorm,
entries: EntryPages)``: for each window that ends, the sum over its n tokens of values times the softmax of gate logits,
per channel; then norm and rotation by the position of the window's first token, and the write. Packed index keys are
turned by a Hadamard matrix before.

``projected``, whose rows may be strided, has values, then gate logits, of this step's tokens; those of tokens before it
are read from ``state``, which is not written. Candidates without a window write to the null page or
nothing. The query's shape has ``head_dim``, ``rotary_dim`` and ``packed``.
"""

STORE_STATE = Operation("compressor state kernel")
"""``store_state(projected [T, 2W] float32, state: StatePages, rows [T] int64)``: write each token's values and gate
logits to the row of that number (page * rows of a page + row); tokens may share a row only in the null page."""


class RowNorm(NamedTuple):
    """Rows ``x`` [T, L], which may be strided, to be RMS-normalised with the ``weight`` [L] and ``eps``. With a
    ``group`` they are then rounded to FP8 as by `QUANTISE_ROWS`."""

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    group: int | None = None


class Pool(NamedTuple):
    """What `STORE_STATE`, by ``rows``, and then `COMPRESS` do with the projections of a step."""

    projected: torch.Tensor
    windows: Windows
    state: StatePages
    rows: torch.Tensor
    pooling: Pooling
    norm: LatentNorm
    entries: EntryPages


FINISH_PROJECTIONS = Operation("latent step kernel")
"""``finish(query: RowNorm, latents: LatentRows, pools: tuple[Pool, ...]) -> [T, L] | Fp8Rows``: what follows the
products with a layer's input: the normalised rows of the query, latents written, and up to two pools. ``pools`` are for
steps in which each token is the only one of a request, in order, and no two requests share pages that either writes:
then token t is candidate t of the windows. All rotate by one table. The query's shape has ``head_dim``, ``rotary_dim``
and ``packed`` of latents and of the first pool's entries.
"""

COMPRESS.add("reference", "headrace.kernels.compressor.reference:compress", doc="plain torch")
COMPRESS.add_triton(
    "headrace.kernels.compressor.triton:compress", supports=reason_against_latents,
    doc="one kernel: pooling, norm, rotation, packing, write",
)
STORE_STATE.add("reference", "headrace.kernels.compressor.reference:store_state", doc="plain torch")
STORE_STATE.add_triton(
    "headrace.kernels.compressor.triton:store_state", doc="one kernel; tokens that no later window needs write nothing"
)
FINISH_PROJECTIONS.add("reference", "headrace.kernels.compressor.reference:finish", doc="one after the other")
FINISH_PROJECTIONS.add_triton(
    "headrace.kernels.compressor.fused:finish", supports=reason_against_latents,
    doc="one kernel: norms, rotations, pooling, packing, writes",
)
