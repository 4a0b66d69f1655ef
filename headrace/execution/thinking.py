"""`ThinkingState`: which rows are reasoning, for those whose reasoning is limited; ends it where the limit is reached.

Whether a row still reasons is known on the device alone: the token before may not have reached the host.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.sampling import ThinkingLimit
from headrace.execution.rows import RowTokens
from headrace.execution.upload import Upload


class ThinkingState:
    """``is_thinking`` [max_rows + 1] bool: whether the row's output so far ends inside reasoning."""

    def __init__(self, max_rows: int, device: torch.device):
        self._is_thinking = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)
        self._limits: dict[int, ThinkingLimit] = {}

    def start(self, row: int, known: RowTokens) -> None:
        """Take a row's limit and where its output, as far as known, stands."""
        rules = known.sampling.rules
        if rules is None or rules.thinking is None:
            return
        limit = self._limits[row] = rules.thinking
        output = known.token_ids[known.prompt_len :]
        marks = output[(output == limit.end_id) | (output == limit.start_id)]
        is_open = marks[-1] == limit.start_id if len(marks) else limit.start_id < 0
        self._is_thinking[row : row + 1].fill_(bool(is_open))

    def release(self, row: int) -> None:
        """Forget a row's limit, if it has one."""
        self._limits.pop(row, None)

    def pack(self, rows: np.ndarray, output_lens: np.ndarray, upload: Upload) -> None:
        """Add what `apply` and `push` need of those of these rows that have a limit."""
        places = [place for place, row in enumerate(rows) if int(row) in self._limits]
        if not places:
            return
        limits = [self._limits[int(rows[place])] for place in places]
        upload.add("thinking_places", places)
        upload.add("thinking_rows", rows[places])
        upload.add(
            "thinking_left",
            [limit.limit - int(output_lens[place]) for place, limit in zip(places, limits, strict=True)]
        )
        upload.add("thinking_ends", [limit.end_id for limit in limits])
        upload.add("thinking_starts", [limit.start_id for limit in limits])

    def apply(self, logits: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Leave nothing but the end of reasoning to rows that reason beyond their limit; logits [n, V], in place."""
        if "thinking_places" not in sent:
            return
        places = sent["thinking_places"]
        own = logits.index_select(0, places)
        forced = torch.full_like(own, -torch.inf).scatter_(1, sent["thinking_ends"].unsqueeze(1), 0.0)
        is_over = self._is_thinking.index_select(0, sent["thinking_rows"]) & (sent["thinking_left"] <= 0)
        logits.index_copy_(0, places, torch.where(is_over.unsqueeze(1), forced, own))

    def push(self, ids: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Note what the tokens [n] drawn for the packed rows begin or end."""
        if "thinking_places" not in sent:
            return
        rows, drawn = sent["thinking_rows"], ids.index_select(0, sent["thinking_places"])
        is_thinking = (
            self._is_thinking.index_select(0, rows) | (drawn == sent["thinking_starts"])
        ) & (drawn != sent["thinking_ends"])
        self._is_thinking.index_copy_(0, rows, is_thinking)
