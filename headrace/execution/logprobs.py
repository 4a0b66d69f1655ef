"""Log-probabilities from raw logits, of sampled tokens and of prompts. n positions, T tokens of a step, D hidden size,
V vocabulary, k best tokens.

Refuses: anything after temperature, penalties or masks: what is reported is the model's own distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.sampling import ALL_LOGPROBS, SamplingSpec
from headrace.base.step import TokenLogprobs
from headrace.execution.rows import WANTS_PROMPT_LOGPROBS, OutputsOf, Rows
from headrace.execution.step import StepShape
from headrace.execution.upload import Upload
from headrace.layers.model import ServedModel
from headrace.memory.copies import to_host

SLICE_POSITIONS = 256
"""Prompt positions whose logits [n, V] are computed at a time: all of a long prompt's would take gigabytes."""


@dataclass(slots=True)
class Logprobs:
    """``logprobs`` and ``ranks`` [n] of the tokens ``ids`` [n]; ``top_ids`` and ``top_logprobs`` [n, k], best first;
    ``id_logprobs`` [n, m] of the tokens that each position names. ``all_ids`` and ``all_logprobs`` [a, V], best first,
    are those of the positions that want all."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    id_logprobs: torch.Tensor
    all_ids: torch.Tensor
    all_logprobs: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All fields, in order."""
        return (
            self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs, self.id_logprobs, self.all_ids,
            self.all_logprobs,
        )

    def copy_to_host(self) -> Logprobs:
        """The same on the host, once the device has come this far."""
        return Logprobs(*(to_host(tensor) for tensor in self.tensors))

    def records(self, top_counts: list[int], id_counts: list[int]) -> list[TokenLogprobs]:
        """One record per position with its own numbers of best (`ALL_LOGPROBS`: all) and of named tokens; for tensors
        on the host."""
        # One conversion per column: reading elements one by one would be far slower.
        *columns, all_ids, all_logprobs = (tensor.tolist() for tensor in self.tensors)
        whole = iter(zip(all_ids, all_logprobs, strict=True))
        found = []
        for token, logprob, rank, top_ids, top, named, count, id_count in zip(
            *columns, top_counts, id_counts, strict=True
        ):
            best = next(whole) if count == ALL_LOGPROBS else (top_ids[:count], top[:count])
            found.append(TokenLogprobs(token, logprob, rank, *best, named[:id_count]))
        return found


def compute_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, k: int, named: torch.Tensor | None = None,
    whole: torch.Tensor | None = None,
) -> Logprobs:
    """Logprobs of ``ids`` [n] under logits [n, V] float32, and of the tokens ``named`` [n, m]. The rank counts tokens
    strictly more likely, plus one. ``whole`` [a]: indices of the positions that want all logprobs."""
    logprobs = logits.log_softmax(-1)
    # [n, 1]
    chosen = logprobs.gather(1, ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    by_name = chosen[:, :0] if named is None else logprobs.gather(1, named)
    rows = logprobs[:0] if whole is None else logprobs.index_select(0, whole)
    ranked = rows.sort(dim=-1, descending=True, stable=True)
    return Logprobs(ids, chosen.squeeze(1), ranks, top.indices, top.values, by_name, ranked.indices, ranked.values)


def pack_logged(specs: list[SamplingSpec], upload: Upload) -> None:
    """Add what `compute_sampled` needs for positions whose rows want logprobs."""
    width = max(len(spec.logprob_ids) for spec in specs)
    if width:
        # padded with token 0, whose logprobs `Logprobs.records` leaves out
        upload.add("logged_named", [i for s in specs for i in (*s.logprob_ids, *(0,) * (width - len(s.logprob_ids)))])
    whole = [index for index, spec in enumerate(specs) if spec.num_logprobs == ALL_LOGPROBS]
    if whole:
        upload.add("logged_whole", whole)


def compute_sampled(
    logits: torch.Tensor, ids: torch.Tensor, top_counts: list[int], sent: dict[str, torch.Tensor]
) -> Logprobs:
    """Logprobs of the sampled tokens ``ids`` [n] of the packed positions under logits [n, V]."""
    named = sent["logged_named"].view(len(logits), -1) if "logged_named" in sent else None
    # Positions that want all are apart: the others need not be sorted as a whole because of them.
    most = max((count for count in top_counts if count != ALL_LOGPROBS), default=0)
    return compute_logprobs(logits, ids, most, named, sent.get("logged_whole"))


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt positions ``[start, start + count)`` of a row whose logprobs this step computes. Position p is predicted
    by the hidden state of p - 1; ``hidden_start`` is the index in the step's [T] of the state that predicts
    ``start``. ``spec``: how many best tokens are wanted, and which."""

    row: int
    start: int
    count: int
    hidden_start: int
    spec: SamplingSpec

    def records(self, logprobs: Logprobs) -> list[TokenLogprobs]:
        """One record per position."""
        spec = self.spec
        return logprobs.records([spec.num_prompt_logprobs] * self.count, [len(spec.logprob_ids)] * self.count)


class PromptScorer:
    """Prompt logprobs, in two halves: `pack` before the step's upload, `compute` after the forward pass."""

    def __init__(self, rows: Rows, model: ServedModel, outputs_of: OutputsOf):
        self._rows, self._model, self._outputs_of = rows, model, outputs_of

    def pack(self, shape: StepShape, upload: Upload) -> list[PromptSpan]:
        """Find the prompt positions that the step predicts, and add their tokens to the upload."""
        spans, targets, named = [], [], list[int]()
        for i in np.flatnonzero(self._rows.flags_np[shape.rows] & WANTS_PROMPT_LOGPROBS):
            row, begin, end = int(shape.rows[i]), int(shape.begins[i]), int(shape.ends[i])
            known = self._rows[row]
            # The state at position p predicts p + 1; beyond the prompt's last token that is output.
            count = min(end + 1, known.prompt_len) - begin - 1
            if count > 0:
                spans.append(PromptSpan(row, begin + 1, count, int(shape.query_start[i]), known.sampling))
                named += known.sampling.logprob_ids
                # The last target may lie in the next chunk; the host knows the whole prompt.
                targets.append(known.token_ids[begin + 1 : begin + 1 + count])
        upload.add("prompt_targets", np.concatenate(targets))
        upload.add("prompt_named", np.array(named, dtype=np.int64))
        return spans

    def compute(
        self, spans: list[PromptSpan], hidden: torch.Tensor | None, sent: dict[str, torch.Tensor]
    ) -> list[tuple[PromptSpan, Logprobs]]:
        """Logprobs of the packed spans from hidden states [T, D]."""
        if not spans:
            return []
        assert hidden is not None, "a path that covers prompt logprobs returns hidden states"
        targets = sent["prompt_targets"].split([span.count for span in spans])
        named = sent["prompt_named"].split([len(span.spec.logprob_ids) for span in spans])
        return [
            (span, self._compute_span(span, hidden[span.hidden_start : span.hidden_start + span.count], ids, own))
            for span, ids, own in zip(spans, targets, named, strict=True)
        ]

    def _compute_span(
        self, span: PromptSpan, hidden: torch.Tensor, targets: torch.Tensor, named: torch.Tensor
    ) -> Logprobs:
        """Logprobs of ``targets`` [n] and of the tokens ``named`` [m] under the logits of ``hidden`` [n, D], a slice of
        positions at a time."""
        spec, parts = span.spec, []
        wants_all = spec.num_prompt_logprobs == ALL_LOGPROBS
        for states, ids in zip(hidden.split(SLICE_POSITIONS), targets.split(SLICE_POSITIONS), strict=True):
            whole = torch.arange(len(ids), device=ids.device) if wants_all else None
            top_count = 0 if wants_all else spec.num_prompt_logprobs
            with self._outputs_of(np.full(len(ids), span.row)):
                logits = self._model.compute_logits(states)
            parts.append(compute_logprobs(logits, ids, top_count, named.expand(len(ids), -1), whole))
        return Logprobs(*(torch.cat(columns) for columns in zip(*(part.tensors for part in parts), strict=True)))
