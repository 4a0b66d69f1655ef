"""`TimestampState`: rules of time stamps in output that writes sound down; arXiv:2212.04356, section 4.5, as Whisper's
decoder applies them. Refuses: which tokens are never written (`headrace.execution.rules` has these).
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.sampling import TimestampRules
from headrace.execution.rows import RowTokens
from headrace.execution.upload import Upload
from headrace.memory.copies import to_device

NOTHING = -1
"""Stands for a missing token."""


class TimestampState:
    """``_seen`` [max_rows + 1, 3] int64 on the device: of every row the last token of its output, the one before, and
    the last time stamp. n positions, of which m have rules; V vocabulary."""

    def __init__(self, max_rows: int, device: torch.device):
        self._device, self._max_rows = device, max_rows
        self._seen: torch.Tensor | None = None  # until a row has such rules
        self._rules: dict[int, TimestampRules] = {}

    def start(self, row: int, known: RowTokens) -> None:
        """Take a row's rules and the tail of its output."""
        rules = known.sampling.rules
        if rules is None or rules.timestamps is None:
            return
        if self._seen is None:
            self._seen = torch.full((self._max_rows + 1, 3), NOTHING, dtype=torch.int64, device=self._device)
        self._rules[row] = rules.timestamps
        output = known.token_ids[known.prompt_len :]
        times = output[output >= rules.timestamps.first_id]
        seen = [int(part[-at]) if len(part) >= at else NOTHING for part, at in ((output, 1), (output, 2), (times, 1))]
        self._seen[row] = to_device(np.array(seen, dtype=np.int64), self._device)

    def release(self, row: int) -> None:
        """Forget a row's rules, if it has any."""
        self._rules.pop(row, None)

    def pack(self, rows: np.ndarray, upload: Upload) -> None:
        """Add what `apply` and `push` need for those of these positions whose ``rows`` have such rules."""
        indices = [index for index, row in enumerate(rows) if int(row) in self._rules]
        if indices:
            rules = [self._rules[int(rows[index])] for index in indices]
            upload.add("timed", indices)
            upload.add("timed_rules", np.array([(r.first_id, r.end_id, r.most_at_first) for r in rules]).T.ravel())

    def apply(
        self, logits: torch.Tensor, output_lens: torch.Tensor, rows: torch.Tensor,
        drafts: tuple[torch.Tensor, torch.Tensor] | None, sent: dict[str, torch.Tensor],
    ) -> None:
        """Mask logits [n, V] in place. ``rows`` [n]; ``output_lens`` [n] are the indices of the sampled tokens in their
        outputs; ``drafts``: tokens before the positions that count as output (`Drafted.read`)."""
        if "timed" not in sent:
            return
        chosen = sent["timed"]
        first, end, most = sent["timed_rules"].view(3, -1, 1)
        seen = self._read(rows.index_select(0, chosen))
        if drafts is not None:
            ids, counts = (part.index_select(0, chosen) for part in drafts)
            seen = self._follow(seen, ids, counts, first)
        own = logits.index_select(0, chosen)
        last, before, latest = (part.unsqueeze(1) for part in seen.unbind(1))
        token = torch.arange(own.shape[1], device=own.device)
        is_time, ends_in_time = token >= first, last >= first
        is_closed = ends_in_time & ((before == NOTHING) | (before >= first))  # behind the second stamp of a pair
        is_open = ends_in_time & ~is_closed  # another stamp follows, or the end
        earliest = torch.where(latest == NOTHING, first, latest + (~is_open).long())
        banned = (token == first - 1) | (is_time & is_closed) | ((token < end) & is_open)
        banned |= is_time & (token < earliest)
        # output begins with a stamp, not later than the limit
        is_start = (output_lens.index_select(0, chosen) == 0).unsqueeze(1)
        banned |= is_start & (~is_time | (token > first + most))
        own.masked_fill_(banned, -torch.inf)
        # where all stamps together are more likely than any text, one of them is taken
        times = own.masked_fill(~is_time, -torch.inf).logsumexp(-1, keepdim=True)
        best_text = own.masked_fill(is_time, -torch.inf).amax(-1, keepdim=True)
        own.masked_fill_(~is_time & (times > best_text), -torch.inf)
        logits.index_copy_(0, chosen, own)

    def push(self, ids: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Note new tokens ``ids`` [n, k] of the packed positions' ``rows``; ``counts`` [n, k] bool: which count."""
        if "timed" not in sent or self._seen is None:
            return
        rows, ids, counts = (part.index_select(0, sent["timed"]) for part in (rows, ids, counts))
        first = sent["timed_rules"].view(3, -1, 1)[0]
        # positions of one row write the same
        self._seen.index_copy_(0, rows, self._follow(self._read(rows), ids, counts, first))

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._seen is not None, "a row has rules"
        return self._seen.index_select(0, rows)

    @staticmethod
    def _follow(seen: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """What was seen [m, 3], after those of the tokens ``ids`` [m, k] that count; ``first`` [m, 1]."""
        for own, is_own in zip(ids.unbind(1), counts.unbind(1), strict=True):
            latest = torch.where(own >= first[:, 0], own, seen[:, 2])
            seen = torch.where(is_own.unsqueeze(1), torch.stack((own, seen[:, 0], latest), dim=1), seen)
        return seen
