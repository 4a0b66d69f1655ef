"""Log-probabilities from raw logits, of sampled tokens and of prompts. n positions, T tokens of a step, D hidden size,
V vocabulary, k best tokens.

Refuses: anything after temperature, penalties or masks: what is reported is the model's own distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.step import TokenLogprobs
from headrace.execution.rows import WANTS_PROMPT_LOGPROBS, Rows
from headrace.execution.step import StepShape
from headrace.execution.upload import Upload, to_host
from headrace.layers.model import ServedModel

SLICE_POSITIONS = 256
"""Prompt positions whose logits [n, V] are computed at a time: all of a long prompt's would take gigabytes."""


@dataclass(slots=True)
class Logprobs:
    """``logprobs`` and ``ranks`` [n] of the tokens ``ids`` [n]; ``top_ids`` and ``top_logprobs`` [n, k], best first."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All fields, in order."""
        return self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def copy_to_host(self) -> Logprobs:
        """The same on the host, once the device has come this far."""
        return Logprobs(*(to_host(tensor) for tensor in self.tensors))

    def records(self, top_counts: list[int]) -> list[TokenLogprobs]:
        """One record per position with its own number of best tokens; for tensors on the host."""
        # One conversion per column: reading elements one by one would be far slower.
        columns = (tensor.tolist() for tensor in self.tensors)
        return [
            TokenLogprobs(token, logprob, rank, top_ids[:count], top_logprobs[:count])
            for token, logprob, rank, top_ids, top_logprobs, count in zip(*columns, top_counts, strict=True)
        ]


def compute_logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Logprobs:
    """Logprobs of ``ids`` [n] under logits [n, V] float32. The rank counts tokens strictly more likely, plus one."""
    logprobs = logits.log_softmax(-1)
    # [n, 1]
    chosen = logprobs.gather(1, ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    return Logprobs(ids, chosen.squeeze(1), ranks, top.indices, top.values)


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt positions ``[start, start + count)`` of a row whose logprobs this step computes. Position p is predicted
    by the hidden state of p - 1; ``hidden_start`` is the index in the step's [T] of the state that predicts
    ``start``."""

    row: int
    start: int
    count: int
    hidden_start: int
    top_count: int


class PromptScorer:
    """Prompt logprobs, in two halves: `pack` before the step's upload, `compute` after the forward pass."""

    def __init__(self, rows: Rows, model: ServedModel):
        self._rows, self._model = rows, model

    def pack(self, shape: StepShape, upload: Upload) -> list[PromptSpan]:
        """Find the prompt positions that the step predicts, and add their tokens to the upload."""
        spans, targets = [], []
        for i in np.flatnonzero(self._rows.flags_np[shape.rows] & WANTS_PROMPT_LOGPROBS):
            row, begin, end = int(shape.rows[i]), int(shape.begins[i]), int(shape.ends[i])
            known = self._rows[row]
            # The state at position p predicts p + 1; beyond the prompt's last token that is output.
            count = min(end + 1, known.prompt_len) - begin - 1
            if count > 0:
                top_count = known.sampling.num_prompt_logprobs
                spans.append(PromptSpan(row, begin + 1, count, int(shape.query_start[i]), top_count))
                # The last target may lie in the next chunk; the host knows the whole prompt.
                targets.append(known.token_ids[begin + 1 : begin + 1 + count])
        upload.add("prompt_targets", np.concatenate(targets))
        return spans

    def compute(
        self, spans: list[PromptSpan], hidden: torch.Tensor | None, sent: dict[str, torch.Tensor]
    ) -> list[tuple[PromptSpan, Logprobs]]:
        """Logprobs of the packed spans from hidden states [T, D]."""
        if not spans:
            return []
        assert hidden is not None, "a path that covers prompt logprobs returns hidden states"
        targets = sent["prompt_targets"].split([span.count for span in spans])
        return [
            (span, self._compute_span(hidden[span.hidden_start : span.hidden_start + span.count], ids, span.top_count))
            for span, ids in zip(spans, targets, strict=True)
        ]

    def _compute_span(self, hidden: torch.Tensor, targets: torch.Tensor, k: int) -> Logprobs:
        """Logprobs of ``targets`` [n] under the logits of ``hidden`` [n, D], a slice of positions at a time."""
        parts = [
            compute_logprobs(self._model.compute_logits(states), ids, k)
            for states, ids in zip(hidden.split(SLICE_POSITIONS), targets.split(SLICE_POSITIONS), strict=True)
        ]
        return Logprobs(*(torch.cat(columns) for columns in zip(*(part.tensors for part in parts), strict=True)))
