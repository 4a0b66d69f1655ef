"""`MaskTable`: masks on the device. Every row has a place of its own; others are shared by outputs in the same state of a
grammar, and kept for the next that comes to it. Refuses: computing masks. W words a mask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

NUM_KEPT = 1024
"""Masks of states, 20 KB each for a vocabulary of 150,000."""


@dataclass(slots=True)
class KeptMask:
    """``place``: in the table. ``allows_plain``: see `Constraint.settle`."""

    place: int
    allows_plain: bool = False


class MaskTable:
    """``tensor`` [max_rows + num_kept, W] int32. Whoever writes to a place does so in the order of the device's stream, behind
    the draws that read what was there before."""

    def __init__(self, max_rows: int, num_words: int, device: torch.device, *, num_kept: int = NUM_KEPT):
        num_kept = max(num_kept, max_rows)  # so that no step drops a mask that it uses
        self.tensor = torch.zeros((max_rows + num_kept, num_words), dtype=torch.int32, device=device)
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
        place = self._free.pop() if self._free else self._kept.popitem(last=False)[1].place
        kept = self._kept[key] = KeptMask(place)
        return kept

    def drop(self, key: Hashable) -> None:
        """Forget a mask."""
        self._free.append(self._kept.pop(key).place)
