"""`BitmaskTable`: bitmasks on the device. Outputs in the same state of a grammar share one, which stays for the next
output that comes to it. `RowBitmasks`: the bitmasks of a step, on their way there. Refuses: filling bitmasks.

S sampled rows, W words a bitmask, N slots, G new bitmasks of a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

MIN_SLOTS, MAX_SLOTS = 256, 4096
"""Bitmasks on the device; 20 KB each for a vocabulary of 150,000."""


class BitmaskTable:
    """An LRU cache: ``tensor`` [N, W] int32, which grows, and the key of each slot. A slot may be given to another key
    while a step that reads it is in flight: it is overwritten in stream order, behind that step's sampling.
    ``last_sent``: the slots of the latest step's rows, on the host and on the device."""

    def __init__(
        self, max_rows: int, num_words: int, device: torch.device, *, min_slots: int = MIN_SLOTS,
        max_slots: int = MAX_SLOTS,
    ):
        # More slots than a step has rows: adding its new bitmasks evicts none that it has just found.
        min_slots = max(min_slots, 2 * max_rows)
        self._max_slots = max(min_slots, max_slots)
        self.tensor = torch.zeros((min_slots, num_words), dtype=torch.int32, device=device)
        self.last_sent: tuple[bytes, torch.Tensor] | None = None
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        self._free = list(range(min_slots - 1, -1, -1))

    def require(self, count: int) -> None:
        """A step needs up to ``count`` bitmasks at once: with as many slots, adding one evicts none that it uses."""
        self._max_slots = max(self._max_slots, count)

    def find(self, key: Hashable) -> int | None:
        """The slot of a key, which becomes the most recently used; None if it has none."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
        return slot

    def add(self, key: Hashable) -> int:
        """Give a new key a slot, taken from the least recently used key if all are in use. Its content is stale until
        `RowBitmasks.send`."""
        if not self._free and len(self.tensor) < self._max_slots:
            self._grow()
        slot = self._slots[key] = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        return slot

    def drop(self, key: Hashable) -> None:
        """Remove a key and free its slot."""
        self._free.append(self._slots.pop(key))

    def _grow(self) -> None:
        size = len(self.tensor)
        larger = min(2 * size, self._max_slots)
        # A new tensor: steps in flight keep the old one alive, and slots keep their numbers.
        self.tensor = torch.cat((self.tensor, self.tensor.new_zeros((larger - size, self.tensor.shape[1]))))
        self._free.extend(range(larger - 1, size - 1, -1))


@dataclass(slots=True)
class RowBitmasks:
    """What grammars allow in a step: row s may sample the tokens of the bitmask in slot ``slot_of_row[s]`` of the
    table, or any token where that is -1. ``new`` [G, W] are bitmasks for ``slots`` [G] of the table. ``errors``: by
    row, why its grammar cannot go on.

    ``words``: slots (int64), slot_of_row and new (int32) one after another, pinned for a GPU and sent as they are.
    Torch's host allocator reuses that memory once the copy is done.
    """

    table: BitmaskTable
    words: torch.Tensor
    slots: np.ndarray
    slot_of_row: np.ndarray
    new: np.ndarray
    errors: dict[int, str | None] = field(default_factory=dict)

    @classmethod
    def allocate(cls, table: BitmaskTable, slot_of_row: np.ndarray, slots: list[int]) -> RowBitmasks:
        """``new`` is not initialised."""
        # words: [2 * G slots, as int64 | S slot_of_row | G * W new]; int64 first, so that it is aligned
        device, num_words = table.tensor.device, table.tensor.shape[1]
        rows, masks = 2 * len(slots), 2 * len(slots) + len(slot_of_row)  # where these begin; slots are int64
        size = masks + len(slots) * num_words
        words = torch.empty(size, dtype=torch.int32, pin_memory=device.type != "cpu")
        written = words.numpy()
        written[:rows].view(np.int64)[:], written[rows:masks] = slots, slot_of_row
        parts = written[:rows].view(np.int64), written[rows:masks], written[masks:].reshape(len(slots), num_words)
        return cls(table, words, *parts)

    def send(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new bitmasks into the table; returns its tensor [N, W] and ``slot_of_row`` [S] on the device. One
        copy, or none when the same rows use the same slots as last time. Waits for nothing."""
        table, key = self.table, self.slot_of_row.tobytes()
        # Steady state: every bitmask is in the table and the rows use the same slots as in the last step.
        if not len(self.new) and table.last_sent is not None and table.last_sent[0] == key:
            return table.tensor, table.last_sent[1]
        sent = self.words.to(table.tensor.device, non_blocking=True)
        rows = 2 * len(self.slots)
        masks = rows + len(self.slot_of_row)
        if len(self.new):
            table.tensor.index_copy_(0, sent[:rows].view(torch.int64), sent[masks:].view(self.new.shape))
        table.last_sent = key, sent[rows:masks]
        return table.tensor, table.last_sent[1]


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens ``ids`` (end of text, stop tokens) that are banned for the first ``count`` tokens of an output, unless
    the grammar allows nothing else."""

    count: int
    ids: tuple[int, ...]

    def clear(self, bitmask: np.ndarray) -> None:
        """Remove them from a bitmask [W] int32, in place."""
        words, before = bitmask.view(np.uint32), dict[int, int]()
        for token in self.ids:
            index = token // 32
            before.setdefault(index, int(words[index]))
            words[index] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        if not words.any():
            for index, word in before.items():
                words[index] = word
