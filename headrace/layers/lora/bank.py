"""`LinearBank`: what the adapters on the device change in one product, and the contract of all banks.

T rows, I inputs, O outputs, r rank, S slots, P parts of a stacked output, R largest rank. Sizes are those of this
rank's share of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import frexp
from typing import Any, ClassVar

import torch
from torch import nn

from headrace.kernels.linear import Norm
from headrace.kernels.lora import (
    ADAPTED_LINEAR,
    ADAPTED_NORM,
    EXPAND,
    EXPAND_ADD_NORM,
    EXPAND_GATED,
    LINEAR_SHRINK,
    SHRINK,
    LowRankBank,
    Reduced,
    SlotRows,
    chains_norm,
    count_published,
    fits_norm,
    is_dense,
    make_tiles,
)
from headrace.kernels.lora.codes import CodedBank, encode, make_coded_bank
from headrace.kernels.operation import KernelQuery, choose_fused
from headrace.layers.lora.contract import TENSORS, AdaptedPart, SiteKind
from headrace.layers.lora.extended import ExtendedWeight
from headrace.layers.lora.extras import Extras, ExtrasMaker
from headrace.layers.lora.parts import RANK_STEP, BankSizes, LoadBytes, PreparedPart, check_range, fits, refuse
from headrace.layers.quantization.storage import StorableLayer
from headrace.parallel.group import Group
from headrace.parallel.share import Share


@dataclass(slots=True)
class Adaptation:
    """What `LinearBank.begin` began: of ``x`` [T, I] and the rows that have adapters; ``reduced`` as `SHRINK` left it,
    None while that is still to be computed."""

    x: torch.Tensor
    rows: SlotRows
    reduced: Any


class AdapterBank(nn.Module):
    """What the adapters on the device change in one layer, which has it as ``lora``. A layer's weights are prepared on
    any thread, and loaded by the one that launches steps."""

    kind: ClassVar[SiteKind]
    num_experts: int = 0
    part_names: frozenset[str] | None = None
    """Of a layer that may lack some of a family's parts, see `StorableLayer.has_part`; None: all that are named."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that are set aside."""
        return 0

    def sizes(self, part: str) -> tuple[int, int]:
        """Inputs and outputs of a part in the checkpoint; of all of them if it is empty."""
        raise NotImplementedError

    def prepare(self, part: AdaptedPart, *, is_staged: bool = False) -> list[PreparedPart]:
        """What is needed here of an adapter's part, in host memory; raises `UnsupportedFeature`. ``is_staged``: factors
        stay as they are, for `headrace.layers.lora.staging`, where there is nothing else."""
        raise NotImplementedError

    def count_bytes(self, parts: Sequence[PreparedPart]) -> LoadBytes:
        """What `load` takes of the device beside the room that the bank has set aside; unless replaced, all tensors."""
        tensors = (getattr(part, name) for part in parts for name in TENSORS)
        return LoadBytes(sum(tensor.nbytes for tensor in tensors if tensor is not None))

    def load(self, slot: int, parts: Sequence[PreparedPart]) -> None:
        """Take an adapter into a slot; without parts the slot is empty. In stream order, behind steps that were
        launched."""
        raise NotImplementedError

    def has_extras(self, slot: int) -> bool:
        """Whether the adapter in a slot changes more than captured steps compute."""
        raise NotImplementedError


def make_buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Buffer:
    """Zeros that are no part of checkpoints."""
    return nn.Buffer(torch.zeros(shape, dtype=dtype, device=device), persistent=False)


class LinearBank(AdapterBank):
    """The bank of a product, which calls `begin` before it and `finish` behind it. ``shares``: this rank's outputs by
    part; ``columns``: its inputs, of which the ranks of ``group`` have some each. ``find_rows``: which rows of the step
    have which adapter, if any."""

    kind: ClassVar[SiteKind] = "linear"

    def __init__(
        self, layer: StorableLayer, shares: Mapping[str, Share], columns: Share, query: KernelQuery, *,
        sizes: BankSizes, find_rows: Callable[[], SlotRows | None], group: Group | None = None,
        bias: nn.Parameter | None = None
    ):
        super().__init__()
        self._group, self._find_rows = group, find_rows
        self.shares, self.columns, self.part_names = dict(shares), columns, frozenset(shares)
        device, widths = layer.weight.device, [share.length for share in shares.values()]
        self._weight_dtype = layer.weight.dtype
        self.ends = tuple(accumulate(widths))
        self.ranks = make_buffer(sizes.num_slots, len(widths), dtype=torch.int64, device=device)
        self._make_factors(sizes)
        self.is_low_rank_only = not layer.is_storable  # something besides the layer reads its weight
        self.is_capturable = True  # unset where something besides the layer adds by `SlotRows.segments`
        self._extras: dict[int, Extras] = {}
        self._used: set[int] = set()  # slots with a low-rank addition
        self._slot_ranks: dict[int, list[int]] = {}  # what ``ranks`` says of slots that were ever used
        self.extended: ExtendedWeight | None = None
        self._extras_maker = ExtrasMaker(layer, bias, group, (self.ends[-1], columns.length))
        self._shrink, self._expand = SHRINK.choose(query), EXPAND.choose(query)
        self._expand_gated = choose_fused(EXPAND_GATED, query)
        self._expand_add_norm = choose_fused(EXPAND_ADD_NORM, query)
        self._linear_shrink = choose_fused(LINEAR_SHRINK, query)
        self._adapted_norm = choose_fused(ADAPTED_NORM, query)
        self._adapted_linear = choose_fused(ADAPTED_LINEAR, query)

    def _make_factors(self, sizes: BankSizes) -> None:
        """Set aside the memory of low-rank additions."""
        device, dtype, padded = self.ranks.device, sizes.dtype or self._weight_dtype, sizes.padded_rank
        shape = sizes.num_slots, len(self.ends), padded, self.columns.length
        self.a = make_buffer(*shape, dtype=dtype, device=device)
        self.b = make_buffer(sizes.num_slots, padded, self.ends[-1], dtype=dtype, device=device)
        self.tiles = nn.Buffer(make_tiles(self.ends, device), persistent=False)
        self.published = make_buffer(count_published(len(self.ends), padded), dtype=torch.int64, device=device)
        self._tensors: LowRankBank | None = None

    def sizes(self, part: str) -> tuple[int, int]:
        """See `AdapterBank`."""
        shares = self.shares.values() if part == "" else [self.shares[part]]
        return self.columns.size, sum(share.size for share in shares)

    @property
    def slot_bytes(self) -> int:
        """See `AdapterBank`."""
        return self.a[0].nbytes + self.b[0].nbytes

    def has_extras(self, slot: int) -> bool:
        """See `AdapterBank`."""
        return slot in self._extras or (slot in self._used and not self.is_capturable)

    @property
    def tensors(self) -> LowRankBank | CodedBank:
        """The buffers, for kernels."""
        known = self._tensors
        if known is None or known.a is not self.a:  # buffers are replaced when the model moves to another device
            extended = None if self.extended is None else self.extended.find(self.a)
            known = self._tensors = LowRankBank(
                self.a, self.b, self.ranks, self.ends, self.tiles, extended, self.published
            )
        return known

    @property
    def is_active(self) -> bool:
        """Whether some row of the step has an adapter."""
        return self._find_rows() is not None

    @property
    def fuses_gates(self) -> bool:
        """Whether what adapters add to gate and up is fused with the activation."""
        return self._expand_gated is not None and len(self.ends) == 2

    def fuses_norm(self, begun: Adaptation) -> bool:
        """Whether what adapters add is fused with the norm behind it."""
        has_all = isinstance(begun.reduced, Reduced) and begun.reduced.is_dense
        return self._expand_add_norm is not None and self._is_plain and (has_all or fits_norm(len(begun.x)))

    @property
    def _is_plain(self) -> bool:
        return self._group is None and len(self.ends) == 1 and self.is_low_rank

    @property
    def is_low_rank(self) -> bool:
        """Whether all that adapters on the device do here is to add to sums."""
        return not self._extras

    def prepare(self, part: AdaptedPart, *, is_staged: bool = False) -> list[PreparedPart]:
        """See `AdapterBank`."""
        if self.is_low_rank_only and not part.is_low_rank:
            raise refuse(part.module, "more than a low-rank addition", "train it without use_dora and bias")
        full = self._start_of(part.part)
        prepared, begin = [], 0
        for index, (name, share) in enumerate(self.shares.items()):
            if part.part in ("", name):
                rows = slice(full[name] + share.start, full[name] + share.stop)
                found = PreparedPart(index, begin)
                is_alone = is_staged and part.is_low_rank
                prepared.append(self._stage(part, found, rows) if is_alone else self._narrow(part, found, rows))
            begin += share.length
        assert prepared, f"no part is called {part.part}"
        return prepared

    def _start_of(self, part: str) -> dict[str, int]:
        """Where the parts begin in an adapter's outputs: of its own part, or of all."""
        starts, at = {}, 0
        for name, share in self.shares.items():
            starts[name] = at
            at += share.size if part == "" else 0
        return starts

    def _stage(self, part: AdaptedPart, found: PreparedPart, rows: slice) -> PreparedPart:
        assert part.a is not None and part.b is not None
        found.rank, found.scale = part.rank, part.scale
        # an adapter has hundreds of parts, and each call takes microseconds
        found.a = part.a if self.columns.is_whole else part.a[:, self.columns.start : self.columns.stop]
        b = part.b if rows == slice(0, part.b.shape[0]) else part.b[rows]
        found.b, dtype = b.t(), self.b.dtype
        if not (fits(part, "a", dtype) and fits(part, "b", dtype)):  # found out by making them
            check_range(part, "a", found.a.to(dtype))
            check_range(part, "b", _scale(b, part.scale).to(dtype))
        return found

    def _narrow(self, part: AdaptedPart, found: PreparedPart, rows: slice) -> PreparedPart:
        inputs = slice(self.columns.start, self.columns.stop)
        if part.magnitude is not None:
            found.magnitude = self._keep(part.magnitude[rows].float())
        if part.a is not None and part.b is not None:
            scaled = _scale(part.b[rows], part.scale)
            self._prepare_factors(found, part.a[:, inputs], scaled.t())
            check_range(part, "a", found.a)
            check_range(part, "b", scaled if found.b is None else found.b)
        if part.bias is not None:
            found.bias = self._keep(part.bias[rows].float())
        if part.weight is not None:
            found.weight = self._keep(part.weight[rows, inputs].to(self._weight_dtype))
            check_range(part, "weight", found.weight)
        if part.token_ids is not None and part.token_rows is not None:
            is_own = (part.token_ids >= rows.start) & (part.token_ids < rows.stop)
            found.token_ids = self._keep(part.token_ids[is_own] - rows.start)
            found.token_rows = self._keep(part.token_rows[is_own][:, inputs].to(self._weight_dtype))
            check_range(part, "token_rows", found.token_rows)
        return found

    def _prepare_factors(self, found: PreparedPart, a: torch.Tensor, b: torch.Tensor) -> None:
        """Keep ``a`` [r, I] and ``b`` [r, O] of this rank's share as `_put` takes them."""
        found.rank, found.a = len(a), self._keep(a.to(self.b.dtype))
        found.b = self._keep(b.float() if found.magnitude is not None else b.to(self.b.dtype))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory of its own: it stays for longer than what was read."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def load(self, slot: int, parts: Sequence[PreparedPart], *, is_placed: bool = False) -> None:
        """See `AdapterBank`. ``is_placed``: what is for the device is there, by `headrace.layers.lora.staging`."""
        self._extras.pop(slot, None)
        self._used.discard(slot)
        ranks = [0] * len(self.ends)
        extras = self._extras_maker.make(parts, self.ranks.device) if any(part.has_extras for part in parts) else None
        if extras is not None:
            self._extras[slot] = extras
        for part in parts:
            if part.rank:
                ranks[part.index] = part.rank
                if not is_placed:
                    self._put(slot, part, None if extras is None else extras.gain)
        if ranks != self._slot_ranks.get(slot) and not is_placed:
            if len(set(ranks)) == 1:
                self.ranks[slot].fill_(ranks[0])  # takes a fifth as long as a copy from pinned memory
            else:
                on_host = torch.tensor(ranks)
                self.ranks[slot].copy_(on_host.pin_memory() if self.ranks.is_cuda else on_host, non_blocking=True)
        self._slot_ranks[slot] = ranks
        if any(ranks):
            self._used.add(slot)

    def _put(self, slot: int, part: PreparedPart, gain: torch.Tensor | None) -> None:
        """Take the low-rank addition of a part into a slot, all outputs of the layer multiplied by ``gain`` [O]."""
        assert part.a is not None and part.b is not None
        padded, stop = -(-part.rank // RANK_STEP) * RANK_STEP, part.start + part.b.shape[1]
        b = part.b if gain is None else part.b.to(gain.device, non_blocking=True) * gain[part.start : stop]
        self.a[slot, part.index, : part.rank].copy_(part.a, non_blocking=True)
        self.b[slot, : part.rank, part.start : stop].copy_(_scale(b, part.scale), non_blocking=True)
        if part.rank < padded:
            self.a[slot, part.index, part.rank : padded].zero_()
            self.b[slot, part.rank : padded, part.start : stop].zero_()

    def begin(self, x: torch.Tensor, *, before_norm: bool = False) -> Adaptation | None:
        """Begin what adapters of the rows of ``x`` [T, I] change, before the product or beside it; None where no row
        has one. ``before_norm``: `finish_norm` may follow, and this is left to it where that is faster."""
        rows = self._find_rows()
        # a drafter that shares a head asks for other rows: its guesses are those of the base model
        if rows is None or (rows.num_rows != len(x) and self.kind == "head"):
            return None
        assert rows.num_rows == len(x), f"{len(x)} rows in a step of {rows.num_rows}"
        is_later = before_norm and self._adapted_norm is not None and self._is_plain and chains_norm(len(x))
        return Adaptation(x, rows, None if is_later else self._shrink(x, self.tensors, rows))

    def multiply_whole(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "",
        before: tuple[torch.Tensor, Norm] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The product with a plain weight and all that adapters add, in one kernel, as `ADAPTED_LINEAR`; None where
        that is not faster."""
        rows = self._find_rows()
        if self._adapted_linear is None or rows is None or rows.num_rows != len(x) or not self.is_low_rank:
            return None
        found: tuple[torch.Tensor, torch.Tensor | None] | None = self._adapted_linear(
            x, weight, bias, self.tensors, rows, activation, before
        )
        return found

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_wide: bool,
        is_pending: bool = False,
    ) -> tuple[Adaptation, torch.Tensor] | None:
        """`begin` and the product [T, O] with a plain weight, in one kernel; None where that is not faster.
        ``is_wide``: rows of the product may be apart in memory; ``is_pending``: and partial sums [S, T, O] of it will
        do."""
        rows = self._find_rows()
        if rows is None or rows.num_rows != len(x):
            return None
        tensors = self.tensors
        found = None if self._linear_shrink is None else self._linear_shrink(x, weight, bias, tensors, rows)
        is_faster = rows.num_dense > 0 and is_dense(len(x), rows.num_dense, tensors.most_ranks)
        if found is None and is_wide and is_faster and self.extended is not None and tensors.extended is not None:
            num_more = rows.num_dense * tensors.slot_rows
            takes_sums = is_pending and self.is_low_rank
            found = self.extended.multiply(x, bias, tensors.extended, num_more, is_pending=takes_sums)
        return None if found is None else (Adaptation(x, rows, found[1]), found[0])

    def finish(self, begun: Adaptation | None, out: torch.Tensor) -> torch.Tensor:
        """The product ``out`` [T, O], changed in place where anything began."""
        if begun is not None:
            self._replace_outputs(begun, out)
            reduced = self._shrink(begun.x, self.tensors, begun.rows) if begun.reduced is None else begun.reduced
            self._expand(reduced, out, self.tensors, begun.rows)
        return out

    def finish_gated(self, begun: Adaptation, out: torch.Tensor, activation: str) -> torch.Tensor:
        """``activation(gate) * up`` [T, F] of the product ``out`` [T, 2F], which it may overwrite; where it
        `fuses_gates`."""
        assert self._expand_gated is not None
        self._replace_outputs(begun, out)
        gated: torch.Tensor = self._expand_gated(begun.reduced, out, self.tensors, begun.rows, activation)
        return gated

    def finish_norm(
        self, begun: Adaptation, out: torch.Tensor, stream: torch.Tensor, norm: Norm,
        following: LinearBank | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Adaptation | None] | None:
        """As `ADD_RMS_NORM` of the product ``out`` [T, D] or [S, T, D] with what adapters add, and what the bank
        ``following`` begins with the norm's output. Of what `begin` left to this; None, with nothing changed, where
        that is not one kernel. Else where it `fuses_norm`, without a bank that follows."""
        if begun.reduced is None:
            if self._adapted_norm is None:
                return None
            behind = None if following is None else following.tensors
            found = self._adapted_norm(begun.x, out, stream, norm, self.tensors, behind, begun.rows)
            if found is None:
                return None
            normed, total, reduced = found
            return normed, total, None if following is None else Adaptation(normed, begun.rows, reduced)
        if following is not None:
            return None
        assert self._expand_add_norm is not None
        normed, total = self._expand_add_norm(begun.reduced, out, stream, norm, self.tensors, begun.rows)
        return normed, total, None

    def _replace_outputs(self, begun: Adaptation, out: torch.Tensor) -> None:
        for slot, first, count in begun.rows.segments if self._extras else ():
            if (extras := self._extras.get(slot)) is not None:
                own = begun.rows.order[first : first + count]
                extras.apply(begun.x.index_select(0, own), out, own)

    def count_bytes(self, parts: Sequence[PreparedPart]) -> LoadBytes:
        """See `AdapterBank`."""
        return self._extras_maker.count_bytes(parts)


def _scale(b: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * b`` in float32, or in bfloat16 where that is the same."""
    is_exact = b.dtype == torch.bfloat16 and abs(frexp(scale)[0]) == 0.5  # a power of two
    return b if scale == 1.0 else (b if is_exact else b.float()) * scale


class CodedLinearBank(LinearBank):
    """As `LinearBank`, for a CPU: additions are kept in 8 bits, as weights beside them are. They are rounded when they
    are prepared, beside the steps that run."""

    def _make_factors(self, sizes: BankSizes) -> None:
        shape = sizes.num_slots, sizes.padded_rank, self.columns.length
        self._coded = make_coded_bank(*shape, self.ends, self.ranks)
        self.codes = nn.Buffer(self._coded.codes.to(self.ranks.device), persistent=False)

    @property
    def slot_bytes(self) -> int:
        """See `AdapterBank`."""
        return self.codes[0].nbytes

    @property
    def tensors(self) -> CodedBank:
        """The buffers, for kernels."""
        self._coded.codes, self._coded.ranks = self.codes, self.ranks  # replaced when the model moves
        return self._coded

    def _prepare_factors(self, found: PreparedPart, a: torch.Tensor, b: torch.Tensor) -> None:
        found.rank, found.coded = len(a), encode(a.contiguous(), b)
        if found.magnitude is not None:
            found.a, found.b = self._keep(a.to(self._weight_dtype)), self._keep(b.float())

    def _put(self, slot: int, part: PreparedPart, gain: torch.Tensor | None) -> None:
        assert part.coded is not None
        own = None if gain is None else gain[part.start : part.start + part.coded.num_outputs]
        self.tensors.put(slot, part.index, part.coded, own)


class HeadBank(LinearBank):
    """The bank of a head, whose rows are sampled or pooled ones."""

    kind: ClassVar[SiteKind] = "head"

    def has_extras(self, slot: int) -> bool:
        """See `AdapterBank`. The native call for decodes on a CPU adds to layers alone."""
        is_native = not self.ranks.is_cuda and slot in self._used
        return is_native or super().has_extras(slot)
