"""Sparse latent attention: each token attends to latents at slots of its own, and an indexer that selects some of them.

One latent is both key and value, shared by all heads. T tokens, R requests, H heads, E head dim, of which the last are
rotated, N entries, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headrace.kernels.operation import KernelQuery, Operation, requires

if TYPE_CHECKING:
    import torch

    from headrace.kernels.latents.slots import Slots


class SeenSlots(NamedTuple):
    """Latents that tokens attend to: ``numbers`` [X, n] int64, slots of ``slots``; token t reads row ``rows[t]`` (row t
    if ``rows`` is None) up to ``counts[t]`` (or n, if that is less). ``rows`` [T] int64, ``counts`` [T] int64."""

    slots: Slots
    numbers: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor | None = None

    def take(self, tokens: slice) -> SeenSlots:
        """Of some tokens, where each has a row of its own."""
        assert self.rows is None
        return self._replace(numbers=self.numbers[tokens], counts=self.counts[tokens])


class Queries(NamedTuple):
    """``q`` [T, H, E], before norm and rotation; ``positions`` [T] int64; ``cos_sin`` [L, R] as of `LatentNorm`;
    ``norm_eps`` of the RMS norm over each head, which has no weight."""

    q: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    norm_eps: float


ATTEND_SLOTS = Operation("sparse attention kernel")
"""``attend_slots(queries: Queries, window: SeenSlots, entries: SeenSlots | None, *, sinks [H] float32, scale) -> [T, H,
E]`` in q's dtype: RMS norm and rotation of each head, then attention over both with one softmax in float32, then the
output's last dims rotated backwards by the query's position. exp(sink) is added to each head's denominator. The query's
shape has ``head_dim``, ``rotary_dim`` and ``packed``."""

ATTEND_ROWS = Operation("row attention kernel")
"""``attend_rows(q [T, H, E], seen: SeenSlots, *, value_dim, scale) -> [T, H, V]``: attention to plain slots of E dims
as they are, of which the first V = ``value_dim`` are the value. The query's shape has ``value_dim`` and ``row_dim``."""


@dataclass(slots=True)
class EntryView:
    """The compressed entries of a step's requests, by cache group. ``page_table`` [R, W] int32; ``requests`` [T] int64:
    each token's; ``visible`` [T] int64: how many entries, from its request's first on, a token may see; ``longest``:
    the most that any may have. Of host lengths, for plain torch alone: the first ``num_decodes`` requests have a token
    each, for each later one ``prefills`` has ``(request, index of its first token, tokens, entries)``; None where the
    device alone knows lengths."""

    page_table: torch.Tensor
    requests: torch.Tensor
    visible: torch.Tensor
    longest: int
    num_decodes: int
    prefills: list[tuple[int, int, int, int]] | None


INDEX_SCORES = Operation("index score kernel")
"""``index_scores(queries: Queries, weights [T, H], keys: Slots, view: EntryView, *, scale, top_k, tokens: slice) -> [n,
N] float32``: for each of the ``n`` tokens and each entry, sum over h of ``scale * weights[h] * relu(q[h] . key)``; rows
of ``weights`` may be strided.
Queries are rotated; where keys are packed, they are packed the same way: turned by a Hadamard matrix, then in e4m3 with
a scale for each head. They have no norm. Undefined for entries
that a token may not see, and for tokens that see at most ``top_k``. The query's shape has ``head_dim``, ``rotary_dim``
and ``packed``."""

SELECT_ENTRIES = Operation("entry selection kernel")
"""``select_entries(scores [n, N] float32, view: EntryView, *, top_k, per_page, tokens: slice) -> [n, top_k] int64``:
slots, ``per_page`` to a page of ``view``, of the ``top_k`` highest-scoring of each token's visible entries, in any
order; all of them, in ascending order, then -1, where there are at most ``top_k``. Exact; of equal scores that do not
all fit, which ones are taken is the solution's choice."""


def _reason_against_attention(query: KernelQuery) -> str | None:
    head_dim, rotary_dim = query.shape.get("head_dim", 0), query.shape.get("rotary_dim", 0)
    if head_dim & (head_dim - 1) or rotary_dim & (rotary_dim - 1) or not 16 <= rotary_dim < head_dim <= 512:
        return f"takes powers of two up to 512, at least 16 of them rotated, not {rotary_dim} of {head_dim}"
    least = (8, 9) if query.shape.get("packed", 0) else (8, 0)
    return requires(device="cuda", dtypes=("float16", "bfloat16"), capability=least)(query)


ATTEND_SLOTS.add("reference", "headrace.kernels.sparse_attention.reference:attend_slots", doc="plain torch, by tiles")
ATTEND_SLOTS.add_triton(
    "headrace.kernels.sparse_attention.triton:attend_slots", supports=_reason_against_attention,
    doc="reads packed slots; splits the slots of few tokens among programs",
)
ATTEND_ROWS.add("reference", "headrace.kernels.sparse_attention.reference:attend_rows", doc="plain torch, by tiles")
INDEX_SCORES.add("reference", "headrace.kernels.sparse_attention.reference:index_scores", doc="plain torch")
INDEX_SCORES.add_triton(
    "headrace.kernels.sparse_attention.indexer:index_scores", supports=_reason_against_attention,
    doc="one kernel; reads packed keys",
)
SELECT_ENTRIES.add("reference", "headrace.kernels.sparse_attention.reference:select_entries", doc="torch's topk")
SELECT_ENTRIES.add(
    "triton", "headrace.kernels.sparse_attention.indexer:select_entries", supports=requires(device="cuda"), priority=10,
    doc="radix selection, a program a token; of equal scores the first",
)


def _reason_against_rows(query: KernelQuery) -> str | None:
    value_dim = query.shape.get("value_dim", 0)
    rest = query.shape.get("row_dim", 0) - value_dim
    if value_dim & (value_dim - 1) or rest & (rest - 1) or not 32 <= value_dim <= 512 or not 16 <= rest <= 256:
        return f"takes powers of two, 32 to 512 dims of a value and 16 to 256 more of a key, not {value_dim} and {rest}"
    block_bytes = 112 << 10 if value_dim > 256 else 0
    return requires(
        device="cuda", dtypes=("float16", "bfloat16"), capability=(8, 0), block_bytes=block_bytes
    )(query)


ATTEND_ROWS.add_triton(
    "headrace.kernels.sparse_attention.rows:attend_rows", supports=_reason_against_rows,
    doc="splits the slots of few tokens among programs",
)


def _reason_against_hopper(query: KernelQuery) -> str | None:
    sizes = tuple(query.shape.get(name, 0) for name in ("head_dim", "rotary_dim", "packed"))
    if query.capability[0] != 9 or sizes != (512, 64, 1):
        return f"takes packed vectors of 512 dims, 64 of them rotated, on compute capability 9.0, not {sizes}"
    return requires(device="cuda", dtypes=("bfloat16",))(query)


ATTEND_SLOTS.add(
    "hopper", "headrace.kernels.sparse_attention.hopper:attend_slots", supports=_reason_against_hopper, priority=20,
    doc="own CUDA C++: slots unpacked once for 64 heads, wgmma",
)


def _reason_against_scores(query: KernelQuery) -> str | None:
    if query.capability[0] != 9:
        return "was compared with the others on Hopper alone"
    return _reason_against_attention(query)


INDEX_SCORES.add(
    "cuda", "headrace.kernels.sparse_attention.few_scores:index_scores", supports=_reason_against_scores, priority=20,
    doc="own CUDA C++ for few scores, two tokens of a prompt at a time for many; others as triton_pdl",
)
SELECT_ENTRIES.add(
    "cuda", "headrace.kernels.sparse_attention.selection:select_entries",
    supports=requires(device="cuda", capability=(9, 0)), priority=20,
    doc="own CUDA C++: radix selection, a block a token; in order, of equal scores the first",
)
