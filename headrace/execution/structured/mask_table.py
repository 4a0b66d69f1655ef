"""`MaskTable`: masks on the device. Every row has a place of its own; others are shared by outputs in the same state of
a grammar, and kept for the next that comes to it. `RowMasks`: those of a step, on their way there. Refuses: computing
masks. S rows of a step, W words a mask, P places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.execution.upload import host_words

NUM_KEPT, MOST_KEPT = 256, 4096
"""Masks of states, at first and at most; 20 KB each for a vocabulary of 150,000."""


@dataclass(slots=True)
class KeptMask:
    """``place``: in the table. ``allows_plain``: see `Constraint.settle`."""

    place: int
    allows_plain: bool = False


class MaskTable:
    """``tensor`` [P, W] int32, P = max_rows + num_kept. Whoever writes to a place does so in the order of the device's
    stream, behind the draws that read what was there before. It grows. ``places_sent``: of the rows of the latest step,
    here and there."""

    def __init__(
        self, max_rows: int, num_words: int, device: torch.device, *, num_kept: int = NUM_KEPT,
        most_kept: int = MOST_KEPT
    ):
        num_kept = max(num_kept, max_rows)  # so that no step drops a mask that it uses
        self._most_places = max_rows + max(num_kept, most_kept)
        self.tensor = torch.zeros((max_rows + num_kept, num_words), dtype=torch.int32, device=device)
        self.places_sent: tuple[bytes, torch.Tensor] | None = None
        self._kept: OrderedDict[Hashable, KeptMask] = OrderedDict()
        self._free = list(range(max_rows + num_kept - 1, max_rows - 1, -1))

    def find(self, key: Hashable) -> KeptMask | None:
        """The mask of a state, if it is kept: longer than all that were asked for less lately."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def add(self, key: Hashable) -> KeptMask:
        """A place for the mask of another state."""
        if not self._free:
            self._make_room()
        kept = self._kept[key] = KeptMask(self._free.pop())
        return kept

    def drop(self, key: Hashable) -> None:
        """Forget a mask."""
        self._free.append(self._kept.pop(key).place)

    def _make_room(self) -> None:
        """More places, or that of the mask that nobody asked for the longest."""
        size = len(self.tensor)
        larger = min(2 * size, self._most_places)
        if larger > size:
            self.tensor = torch.cat((self.tensor, self.tensor.new_zeros((larger - size, self.tensor.shape[1]))))
            self._free.extend(range(larger - 1, size - 1, -1))
        else:
            self._free.append(self._kept.popitem(last=False)[1].place)


@dataclass(slots=True)
class RowMasks:
    """What grammars allow in a step: ``mask_of_row`` [S] int32 tells the place of each row's mask in the table, or -1.
    ``changed`` [n, W] int32 has room for masks that are new there. ``errors`` tells why, by row, where a grammar cannot
    go on. ``words`` is all that is sent, in memory that can be sent as it is: places of new masks, of rows, new
    masks."""

    table: MaskTable
    words: torch.Tensor
    places: np.ndarray
    mask_of_row: np.ndarray
    changed: np.ndarray
    num_changed: int = 0
    errors: dict[int, str | None] = field(default_factory=dict)

    @classmethod
    def allocate(cls, table: MaskTable, mask_of_row: np.ndarray, most_changed: int) -> RowMasks:
        """With room for so many new masks, to be told of by `change`."""
        num_rows, num_words = len(mask_of_row), table.tensor.shape[1]
        words, written = host_words(2 * most_changed + num_rows + most_changed * num_words, table.tensor.device)
        rows, masks = 2 * most_changed, 2 * most_changed + num_rows
        written[rows:masks] = mask_of_row
        return cls(
            table, words, written[:rows].view(np.int64), written[rows:masks],
            written[masks:].reshape(most_changed, num_words)
        )

    def change(self, count: int, row_place: int, place: int) -> None:
        """New mask ``count``, the last one so far, is for a place of the table, and the row at ``row_place`` has it."""
        self.places[count], self.mask_of_row[row_place] = place, place
        self.num_changed = count + 1

    def send(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring the table up to date; it, and ``mask_of_row`` on the device."""
        table, num_changed, key = self.table, self.num_changed, self.mask_of_row.tobytes()
        if not num_changed and table.places_sent is not None and table.places_sent[0] == key:
            return table.tensor, table.places_sent[1]
        rows, num_rows, num_words = 2 * len(self.places), len(self.mask_of_row), table.tensor.shape[1]
        sent = self.words[: rows + num_rows + num_changed * num_words].to(table.tensor.device, non_blocking=True)
        if num_changed:
            table.tensor.index_copy_(
                0, sent[: 2 * num_changed].view(torch.int64), sent[rows + num_rows :].view(num_changed, num_words)
            )
        table.places_sent = key, sent[rows : rows + num_rows]
        return table.tensor, table.places_sent[1]
