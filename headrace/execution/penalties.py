"""`PenaltyState`: token counts on the device for the rows that have penalties, and only for those. V vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.sampling import Penalties
from headrace.execution.rows import RowTokens
from headrace.execution.upload import Upload, to_device


class PenaltyState:
    """A row with penalties holds a slot: ``in_prompt`` [slots, V] bool and ``counts`` [slots, V] int32 of its output.
    Slots are allocated when first needed, doubling."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._penalties: dict[int, Penalties] = {}
        self._free: list[int] = []

    def start(self, row: int, known: RowTokens) -> None:
        """Take a slot for a row and count the tokens it starts with."""
        penalties = known.sampling.penalties
        assert penalties is not None
        self.release(row)
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        self._penalties[row] = penalties
        tokens = to_device(known.token_ids, self._device)
        prompt, output = tokens[: known.prompt_len], tokens[known.prompt_len :]
        self._in_prompt[slot] = False
        self._in_prompt[slot].index_fill_(0, prompt, True)
        self._counts[slot] = 0
        self._counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def release(self, row: int) -> None:
        """Give a row's slot back, if it has one."""
        if row in self._slots:
            self._free.append(self._slots.pop(row))
            del self._penalties[row]

    def pack(self, rows: np.ndarray, upload: Upload) -> None:
        """Add what `apply` and `count` need for these rows."""
        upload.add("penalty_slots", [self._slots[int(row)] for row in rows])
        chosen = [self._penalties[int(row)] for row in rows]
        upload.add(
            "penalties", np.array([(p.repetition, p.frequency, p.presence) for p in chosen], dtype=np.float64).T.ravel()
        )

    def apply(self, logits: torch.Tensor, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """Penalise logits [n, V] of the packed rows: a positive logit of a token seen anywhere is divided by the
        repetition penalty, a negative one multiplied (Keskar et al., CTRL, section 4.1); then ``frequency * count`` and
        ``presence * (count > 0)`` are subtracted (OpenAI's definition)."""
        slots = sent["penalty_slots"]
        repetition, frequency, presence = sent["penalties"].float().view(3, -1, 1)
        counts = self._counts.index_select(0, slots)
        in_output = counts > 0
        is_seen = self._in_prompt.index_select(0, slots).logical_or_(in_output)
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, penalised, logits)
        return logits.sub_(counts * frequency).sub_(in_output * presence)

    def count(self, ids: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Count the tokens [n] drawn for the packed rows."""
        ones = torch.ones_like(ids, dtype=torch.int32)
        self._counts.view(-1).index_add_(0, sent["penalty_slots"] * self._vocab_size + ids, ones)

    def _grow(self) -> None:
        old = len(self._counts)
        new = max(4, old)
        shape = (new, self._vocab_size)
        self._in_prompt = torch.cat((self._in_prompt, torch.zeros(shape, dtype=torch.bool, device=self._device)))
        self._counts = torch.cat((self._counts, torch.zeros(shape, dtype=torch.int32, device=self._device)))
        self._free.extend(range(old, old + new))
