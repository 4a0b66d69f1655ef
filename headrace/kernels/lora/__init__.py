"""Products with low-rank additions of many adapters, each for the rows of its own requests.

T rows, I inputs, O outputs, S slots, P parts of a stacked output, R rank of the largest adapter, N rows with an
adapter, K blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires, requires_hopper


@dataclass(slots=True)
class SlotRows:
    """Which rows of a step have which adapter. ``order`` [T] int64: indices of all rows, those of each slot together,
    in the order of slots, and then those without an adapter. ``blocks`` [3, K] int64: of each block its slot, its first
    place in ``order``, and how many rows it has, at most ``block_rows``, all of one slot; behind those with a slot
    those without, whose slot is -1, and behind them unused ones without rows. ``slots`` [T] int64: of each place of
    ``order``, -1 for none. All three are on the device. ``segments``: slot, first place and number of rows of each
    adapter, on the host; empty in a captured step, whose rows only the device knows. ``side``: a stream on which to
    compute what needs no product, beside it; None: in order; ``is_forked``: something is computed there that the stream
    of the products has not waited for. ``num_dense``: all adapters are in the first so many slots, few enough for each
    row to be multiplied with ``a`` of all of them; 0: they may not be. ``num_runs``: of rows that follow each other and
    have the same adapter, or none, at most so many; 0: only the device knows. ``pairs`` [2, N] int64: the rows with an
    adapter and the slot of each, on the host; made when it is asked for."""

    order: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    block_rows: int
    segments: list[tuple[int, int, int]]
    side: torch.cuda.Stream | None = None
    is_forked: bool = False
    num_dense: int = 0
    num_runs: int = 0
    _pairs: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.order)

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
    ``tiles`` [3, n] int64: of each tile of outputs its part, first output, and end; none is in two parts. ``extended``
    [O + S * P * R, I]: the weight with ``a`` behind it, in whose memory it is; None where it has its own.
    ``published`` [`count_published`] int64: what blocks of one launch tell one another, zeros at first; None where no
    kernel needs it."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    ends: tuple[int, ...]
    tiles: torch.Tensor
    extended: torch.Tensor | None = None
    published: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        """I."""
        return self.a.shape[3]

    @property
    def most_ranks(self) -> int:
        """R."""
        return self.a.shape[2]

    def factors(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``a`` [P, R, I] and ``b`` [R, O] of a slot."""
        return self.a[slot], self.b[slot]

    @property
    def slot_rows(self) -> int:
        """P * R."""
        return self.a.shape[1] * self.a.shape[2]


@dataclass(slots=True)
class Reduced:
    """What shrink leaves on a GPU: partial ``sums`` [splits, T, columns] to be added up. By places of `SlotRows.order`
    there are P * R columns, those of the adapter of the row in that place, float32. ``is_dense``: by rows, in the dtype
    of a product, with P * R columns for each of the first few slots, of which a row's adapter is one."""

    sums: torch.Tensor
    is_dense: bool = False


TILE_OUTPUTS = 128
"""Outputs of a tile."""


def make_tiles(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`LowRankBank.tiles` for parts with these ends."""
    columns: list[tuple[int, int, int]] = []
    begin = 0
    for part, end in enumerate(ends):
        columns += [(part, at, min(at + TILE_OUTPUTS, end)) for at in range(begin, end, TILE_OUTPUTS)]
        begin = end
    return torch.tensor(columns, dtype=torch.int64, device=device).t().contiguous()


SHRINK = Operation("LoRA kernel before a product")
"""``shrink(x [T, I], bank, rows) -> reduced``: what `EXPAND` of the same solution takes, ``a[s] x[t]`` of each row that
has the adapter in slot s, in whatever form. It does not need the product, which may run after it or beside it.
``expand`` of every solution on a GPU, and of the reference, takes a `Reduced` of dense sums too."""

EXPAND = Operation("LoRA kernel after a product")
"""``expand(reduced, out [T, O], bank, rows)`` adds ``b[s]' (a[s] x[t])`` to row t of ``out`` in place, for each row t
that has the adapter in slot s: of each part its own outputs. Other rows are neither read nor written. ``out`` is in x's
dtype or float32; what is added is computed in float32 from operands in the bank's dtype. Solutions on a CPU take a
`headrace.kernels.lora.codes.CodedBank`, too; the native one then rounds ``x`` to 8 or 15 bits, as products with
weights of 8 bits do, and sums of a rank to 15."""

EXPAND_GATED = Operation("LoRA kernel before an activation")
"""``expand_gated(reduced, x [T, 2F], bank, rows, activation) -> [T, F]``: the same for a product that stacks gate and
up, and then ``activation(gate) * up`` of all rows, each rounded to x's dtype as if stored. ``activation`` is "silu" or
"gelu_tanh". ``x`` may be overwritten."""

EXPAND_ADD_NORM = Operation("LoRA kernel before a norm")
"""``expand_add_norm(reduced, x, residual [T, D], norm: Norm, bank, rows) -> (normed, new_residual)``: as
`ADD_RMS_NORM`, of ``x`` and what `EXPAND` adds. For few rows, see `fits_norm`."""

EXPAND_ROPE_WRITE = Operation("LoRA kernel before attention")
"""``expand_rope_write(reduced, qkv [T, O], rotation: Rotation, k_pages, v_pages, bank, rows) -> q | None``: `EXPAND`
of a product that stacks q, k and v, rounded as if stored, and `ROPE_WRITE`; None, with nothing done, where it takes no
such sizes. ``qkv`` may be overwritten. See `precedes_attention`."""

LINEAR_SHRINK = Operation("LoRA kernel with a product")
"""``linear_shrink(x [T, I], weight [O, I], bias [O] | None, bank, rows) -> (out [T, O], reduced) | None``: `LINEAR` and
`SHRINK` in one kernel; None where two are as fast, for more than a row or two."""

ADAPTED_LINEAR = Operation("product with LoRA")
"""``adapted_linear(x [T, I], weight [O, I], bias [O] | None, bank, rows, activation="", before=None) -> (out, None) |
None``: `LINEAR` and all that adapters add, each output rounded once, then the gated ``activation`` if one is named, of
a weight that stacks gate and up, each rounded as if stored: out is [T, O] or [T, O / 2]. With ``before``, a residual
[T, I] and a `Norm`, x is ``norm(residual + x)`` and the second result that sum. None where more kernels are as fast: it
is one for a row or two, whose ``bank`` has `LowRankBank.published`, and with an activation one behind `SHRINK` for a
thousand and more."""

ADAPTED_NORM = Operation("LoRA kernel between two products")
"""``adapted_norm(x [T, I], pending, residual [T, D], norm: Norm, bank, following, rows) -> (normed, new_residual,
reduced | None) | None``: `SHRINK` of x, the input of a product whose output or partial sums are ``pending``,
`EXPAND_ADD_NORM`, and of the norm's output `SHRINK` by ``following``, the bank of the product behind it, unless that is
None. One kernel for all; None where it takes no such sizes. For some rows, see `chains_norm`."""

BEGIN, RANK, PADDED, WIDTH, ROW_STRIDE, COLUMN_STRIDE, SCALE, TARGET, TARGET_STRIDE, RANKS = range(10)
"""Columns of `PLACE_FACTORS`'s table."""

PLACE_FACTORS = Operation("LoRA kernel that fills slots")
"""``place_factors(source [n] uint8, table [N, 10] int64, most_columns, dtype, target_dtype)``: each row of the table
is a factor of an adapter. Its ``RANK`` rows of ``WIDTH`` columns begin at byte ``BEGIN`` of the source in ``dtype``,
with strides of ``ROW_STRIDE`` and ``COLUMN_STRIDE`` numbers. They are multiplied in float32 by ``SCALE``, the bits of a
float32, and written in ``target_dtype`` to address ``TARGET``, rows ``TARGET_STRIDE`` numbers apart; zeros follow up to
row ``PADDED``. The rank is written as int64 to address ``RANKS`` unless that is 0. ``most_columns``: the largest width.
All on one device."""

WHOLE_ROWS = 2
"""Most rows of `ADAPTED_LINEAR`."""

FEW_DECODES = 16
"""Most rows of attention with the rotation in its launch, see `headrace.kernels.few_decodes`."""


def count_published(parts: int, ranks: int) -> int:
    """Numbers of `LowRankBank.published`."""
    return 1 + WHOLE_ROWS * parts * ranks


MOST_NORM_ROWS = 64
"""For more rows reading ``b`` for each row takes longer than another launch."""

CHAINED_ROWS = range(129, 513)
"""For which `ADAPTED_NORM`, which reads additions for each 16 rows, is faster than what it replaces: a layer with
adapters takes 238.7 us at 256 rows with it and 254.8 without, 175.6 and 173.5 at 128, 154.4 and 142.7 at 64 (H200,
Llama-3.1-8B, rank 16)."""


LEAST_DENSE = 16
FEW_RANKS, MOST_ROWS = 128, 512
"""With more ranks in all slots than a few, only steps of at most so many rows: a layer with 64 adapters takes 278.6 us
at 256 rows, and 316.6 with `ADAPTED_NORM`; at 64 rows 200.3 and 256.4 (H200, as above). At 1,024 rows one adapter
takes 873 with all 64 and 756 with 8 (another run)."""


def is_dense(rows: int, slots: int, ranks: int) -> bool:
    """Whether so many rows are multiplied at once with the weight and ``a`` of so many slots, of so many ranks each,
    where that is possible."""
    is_few = slots == 1 or slots * ranks <= FEW_RANKS
    return rows >= LEAST_DENSE and (is_few or rows <= MOST_ROWS)


def fits_norm(rows: int) -> bool:
    """Whether `EXPAND_ADD_NORM` pays off for so many rows."""
    return rows <= MOST_NORM_ROWS


def precedes_attention(rows: int) -> bool:
    """Whether `EXPAND_ROPE_WRITE` pays off for so many rows: for few, the rotation is in the launch of attention."""
    return rows > FEW_DECODES


def chains_norm(rows: int) -> bool:
    """Whether `ADAPTED_NORM` pays off for so many rows."""
    return rows in CHAINED_ROWS


_in_bfloat16 = requires(device="cuda", dtypes=("bfloat16",))


for _operation, _name in (
    (SHRINK, "shrink"), (EXPAND, "expand"), (EXPAND_GATED, "expand_gated"), (EXPAND_ADD_NORM, "expand_add_norm")
):
    _operation.add("reference", f"headrace.kernels.lora.reference:{_name}", doc="torch, an adapter at a time")
    _operation.add(
        "triton", f"headrace.kernels.lora.triton:{_name}", supports=requires(device="cuda"), priority=10,
        doc="one launch for all parts and adapters",
    )
    _operation.add(
        "triton_pdl", f"headrace.kernels.lora.triton:{_name}_pdl",
        supports=requires(device="cuda", capability=(9, 0)), priority=15, doc="with dependent launch",
    )
    if _operation is not SHRINK:
        _operation.add(
            "cuda", f"headrace.kernels.lora.additions:{_name}",
            supports=lambda query: _in_bfloat16(query) or requires_hopper(query), priority=20,
            doc="own CUDA C++ for Hopper",
        )
EXPAND_ROPE_WRITE.add(
    "reference", "headrace.kernels.lora.reference:expand_rope_write", doc="one behind the other"
)
EXPAND_ROPE_WRITE.add(
    "cuda", "headrace.kernels.lora.rotated:expand_rope_write",
    supports=lambda query: _in_bfloat16(query) or requires_hopper(query), priority=20, doc="own CUDA C++ for Hopper",
)
LINEAR_SHRINK.add("reference", "headrace.kernels.lora.reference:linear_shrink", doc="torch, one behind the other")
_in_half = requires(device="cuda", dtypes=("float16", "bfloat16"))
LINEAR_SHRINK.add("triton", "headrace.kernels.lora.gemv:linear_shrink", supports=_in_half, priority=10, doc="a GEMV")
LINEAR_SHRINK.add(
    "triton_pdl", "headrace.kernels.lora.gemv:linear_shrink_pdl",
    supports=requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(9, 0)), priority=15,
    doc="with dependent launch",
)
ADAPTED_NORM.add("reference", "headrace.kernels.lora.reference:adapted_norm", doc="one behind the other")
ADAPTED_NORM.add(
    "cuda", "headrace.kernels.lora.adapted_norm:adapted_norm",
    supports=lambda query: _in_bfloat16(query) or requires_hopper(query), priority=10, doc="own CUDA C++ for Hopper",
)
for _operation, _name in ((SHRINK, "shrink"), (EXPAND, "expand")):
    _operation.add(
        "cpu", f"headrace.kernels.lora.cpu:{_name}",
        supports=requires(device="cpu", dtypes=("float32", "bfloat16", "float16")), priority=10, doc="own C++ kernels",
    )
ADAPTED_LINEAR.add("reference", "headrace.kernels.lora.reference:adapted_linear", doc="one behind the other")
ADAPTED_LINEAR.add(
    "cuda", "headrace.kernels.lora.gemv:adapted_linear",
    supports=lambda query: _in_bfloat16(query) or requires_hopper(query), priority=10, doc="own CUDA C++ for Hopper",
)
PLACE_FACTORS.add(
    "reference", "headrace.kernels.lora.reference:place_factors", supports=requires(device="cpu"), doc="by address"
)
PLACE_FACTORS.add(
    "triton", "headrace.kernels.lora.triton:place_factors", supports=requires(device="cuda"), priority=10,
    doc="one launch for all factors of a dtype",
)
