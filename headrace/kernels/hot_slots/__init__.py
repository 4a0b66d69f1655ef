"""Hot slots: entries of a long sparse cache stay in host memory, and a device keeps those of each row that were wanted
latest (HiSparse, https://github.com/sgl-project/sglang/pull/24880). One layer; its indexer has chosen which entries of
a row are read next, and those that are not on the device take the place of what was wanted longest ago.

R rows, B hot slots of a row, M entries that a row can have, n tokens of a step, k entries wanted by each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headrace.kernels.operation import Operation, requires

NONE = -1


@dataclass(frozen=True, slots=True)
class HotSlots:
    """Of one layer; slot s of row r is number r * (B + 1) + s on the device. ``entries`` [R, B + 1] int32: what each
    holds, `NONE` for nothing, the last slot being for a row's newest entry. ``order`` [R, B] int16: the other slots,
    what was wanted longest ago first. All layers share ``marks`` [R, M] int16, zeros between calls, ``victims`` [R, B]
    int16, both for solutions, and ``counts`` [2] int64: entries wanted of rows so far, and copied from the host.
    ``ratio``: tokens of an entry."""

    entries: torch.Tensor
    order: torch.Tensor
    marks: torch.Tensor
    victims: torch.Tensor
    counts: torch.Tensor
    ratio: int = 1

    @classmethod
    def allocate(
        cls, num_layers: int, num_rows: int, num_slots: int, most_entries: int, device: torch.device, *, ratio: int = 1
    ) -> HotSlots:
        """With nothing in them: ``entries`` and ``order`` of all layers, [L, R, ...]; see `layer`."""
        hot = cls(
            torch.empty((num_layers, num_rows, num_slots + 1), dtype=torch.int32, device=device),
            torch.empty((num_layers, num_rows, num_slots), dtype=torch.int16, device=device),
            torch.zeros((num_rows, most_entries), dtype=torch.int16, device=device),
            torch.zeros((num_rows, num_slots), dtype=torch.int16, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            ratio,
        )
        hot.clear(torch.arange(num_rows, device=device))
        return hot

    @staticmethod
    def row_bytes(num_slots: int, most_entries: int, num_layers: int) -> int:
        """Bytes that `allocate` takes for a row."""
        return num_layers * (4 * (num_slots + 1) + 2 * num_slots) + 2 * (most_entries + num_slots)

    def layer(self, number: int) -> HotSlots:
        """Those of one layer."""
        return replace(self, entries=self.entries[number], order=self.order[number])

    @property
    def num_slots(self) -> int:
        """B."""
        return self.order.shape[-1]

    def clear(self, rows: torch.Tensor) -> None:
        """Rows [n] int64 begin anew, in all layers: their slots hold nothing. Waits for nothing."""
        self.entries.index_fill_(1, rows, NONE)
        numbers = torch.arange(self.num_slots, dtype=torch.int16, device=self.order.device)
        self.order[:, rows] = numbers


@dataclass(frozen=True, slots=True)
class EntryParts:
    """What an entry consists of: pairs of tensors [pages, entries of a page, bytes] uint8, alike in the last two dims,
    contiguous in the last. ``sources`` are in host memory that the device reads. ``table`` [pairs, 7] int64 on the
    device: addresses of source and target; in words the strides of their pages and of an entry; entries of a page;
    words of an entry. ``word``: bytes of a word, the largest power of two up to 8 that divides all of these."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    table: torch.Tensor
    word: int

    @classmethod
    def of(cls, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> EntryParts:
        """Of pairs of tensors."""
        rows, word = [], 8
        for source, target in zip(sources, targets, strict=True):
            assert source.shape[1:] == target.shape[1:] and source.stride()[1:] == target.stride()[1:]
            sizes = (source.stride(0), target.stride(0), source.stride(1), source.shape[2])
            word = math.gcd(word, source.data_ptr(), target.data_ptr(), *sizes)
            rows.append((source, target, sizes))
        table = [
            [s.data_ptr(), t.data_ptr(), sizes[0] // word, sizes[1] // word, sizes[2] // word, s.shape[1],
             sizes[3] // word]
            for s, t, sizes in rows
        ]
        return cls(sources, targets, torch.tensor(table, dtype=torch.int64).to(targets[0].device), word)


@dataclass(frozen=True, slots=True)
class Loads:
    """Entries to be copied for n tokens of a step: for token i the first ``counts[i]`` of ``entries[i]``, to the slots
    of these numbers in ``places[i]``, in any order. ``entries`` and ``places`` [n, k] int32, ``counts`` [n] int32."""

    entries: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(cls, num_tokens: int, most_wanted: int, device: torch.device) -> Loads:
        """For n tokens that want up to k entries."""
        entries, places = torch.empty((2, num_tokens, most_wanted), dtype=torch.int32, device=device)
        return cls(entries, places, torch.empty(num_tokens, dtype=torch.int32, device=device))


FIND_SWAPS = Operation("find_swaps kernel")
"""``find_swaps(hot: HotSlots, rows [n] int64, wanted [n, k] int64, kv_lens [n] int32, found [n, k] int64, loads:
Loads)``: writes the number of the slot of each wanted entry, ``found``, and which entries must be copied there before,
``loads``; changes ``hot`` accordingly. ``kv_lens`` are tokens of each row up to the one that wants, which belong to
``kv_lens // ratio`` entries. ``wanted`` holds none beyond these, which nothing checks, no entry twice for a token, and
`NONE` at will, of which ``found`` has `NONE` too.

Tokens of one row that follow each other, its last one and drafts, are one want: what any of them wants is found by all
of them together. It is at most B entries, and each is copied for the first token that wants it. Other tokens of a call
are of other rows, unless they want the same of at most B entries.

What slots hold of entries from the first one on that a want's tokens are part of has been written again since, maybe
behind a wrong draft: it is forgotten. A row with at most B entries has each in the slot of its number, and the order
stays. Otherwise the newest entry is in the last slot; wanted ones in slots stay; the others get, in their order, the
slots that were wanted longest ago and are not now. ``order`` is then: slots not wanted, as before; loaded ones; those
that stayed, as before."""

LOAD_ENTRIES = Operation("load_entries kernel")
"""``load_entries(parts: EntryParts, page_table [n, W] int32, loads: Loads)``: copies what `FIND_SWAPS` asks for.
``page_table`` has the pages of each row in the sources, from its first entry on."""

for _operation, _name in ((FIND_SWAPS, "find_swaps"), (LOAD_ENTRIES, "load_entries")):
    _operation.add("reference", f"headrace.kernels.hot_slots.reference:{_name}", doc="plain torch")
    _operation.add(
        "triton", f"headrace.kernels.hot_slots.triton:{_name}", supports=requires(device="cuda"), priority=10,
        doc="one launch"
    )
