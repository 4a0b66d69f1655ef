"""`Pooler`: from a step's hidden states to the results of pooled rows. P spans of such rows, S results of W numbers, D
hidden size. A text may come in chunks: the reduction of its earlier ones is kept by row until the last is computed.

Refuses: what the model's classifier or dense layers do (``layers/pooling``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headrace.execution.rows import IS_POOLED, OutputsOf, Rows
from headrace.execution.step import StepShape
from headrace.execution.upload import Upload
from headrace.layers.batch import AlignedTexts
from headrace.layers.model import ServedModel
from headrace.layers.pooling import PoolingHead
from headrace.memory.copies import to_host

MEDIAN_WIDTH = 7
"""Positions whose median is taken."""
NOT_FINITE = "the model's result is not finite (NaN or infinity)"


@dataclass(frozen=True, slots=True)
class PoolBatch:
    """Spans of pooled rows, as host arrays: their rows [P], then indices into the P by what must be done. ``resumed``:
    combine with the kept state of earlier chunks; ``unfinished``: keep the state for later chunks; ``finished``: apply
    the pooling head; ``labelled``: compute log-probabilities of the row's label tokens, ``num_labels`` of them.
    ``aligned``: rows whose tokens' attention to sound is wanted, and whether this is their first, and their last chunk.
    """

    rows: np.ndarray
    resumed: np.ndarray
    unfinished: np.ndarray
    finished: np.ndarray
    labelled: np.ndarray
    num_labels: list[int]
    aligned: list[tuple[int, bool, bool]]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Results [S, W] float32 of ``rows`` on the host once the step is done; only the first ``widths[i]`` of a row
    count."""

    rows: list[int]
    widths: list[int]
    values: torch.Tensor

    def records(self, *, check_finite: bool) -> tuple[list[tuple[int, bytes]], list[tuple[int, str]]]:
        """``(results, failures)`` as `StepResult` has them."""
        table = self.values.numpy()
        values = [(row, table[i, :width]) for i, (row, width) in enumerate(zip(self.rows, self.widths, strict=True))]
        failures = [(row, NOT_FINITE) for row, numbers in values if check_finite and not np.isfinite(numbers).all()]
        return [(row, numbers.astype("<f4").tobytes()) for row, numbers in values], failures


class Pooler:
    """Two halves: `pack` before the step's upload, `pool` after the forward pass."""

    def __init__(self, rows: Rows, model: ServedModel, outputs_of: OutputsOf):
        self._rows, self._model, self._outputs_of = rows, model, outputs_of
        self._pooling_head: PoolingHead | None = model.pooling_head
        self._states: torch.Tensor | None = None  # [max_rows, D] float32, of texts whose first chunks are computed
        self._weights: dict[int, list[torch.Tensor]] = {}  # by row, [heads, tokens, positions] of each chunk

    def pack(self, shape: StepShape, upload: Upload) -> PoolBatch:
        """Add what pooling needs to the upload."""
        # Rows with label ids need no state across chunks: their result is of the last token's logits alone.
        spans = np.flatnonzero(self._rows.flags_np[shape.rows] & IS_POOLED)
        rows, begins, ends = shape.rows[spans], shape.begins[spans], shape.ends[spans]
        known = [self._rows[int(row)] for row in rows]
        totals = np.array([len(row.token_ids) for row in known])
        labels = [row.pooling.label_ids if row.pooling is not None else [] for row in known]
        is_aligned = np.array([row.pooling is not None and row.pooling.alignment is not None for row in known])
        is_own, is_done = np.array([not ids for ids in labels]) & ~is_aligned, ends == totals
        batch = PoolBatch(
            rows, np.flatnonzero(is_own & (begins > 0)), np.flatnonzero(is_own & ~is_done),
            np.flatnonzero(is_own & is_done), np.flatnonzero(~is_own & ~is_aligned & is_done),
            [len(ids) for ids, done in zip(labels, is_done, strict=True) if ids and done],
            [(int(rows[i]), bool(begins[i] == 0), bool(is_done[i])) for i in np.flatnonzero(is_aligned)],
        )
        upload.add("pool_spans", spans)
        upload.add("pool_first", shape.query_start[:-1][spans])
        upload.add("pool_last", shape.query_start[1:][spans] - 1)
        upload.add("pool_lengths", shape.lengths)
        upload.add("pool_finished", batch.finished)
        upload.add("pool_totals", totals[batch.finished])
        if len(batch.resumed):
            upload.add("pool_resumed", batch.resumed)
            upload.add("pool_resumed_rows", rows[batch.resumed])
        if len(batch.unfinished):
            upload.add("pool_unfinished", batch.unfinished)
            upload.add("pool_unfinished_rows", rows[batch.unfinished])
        if len(batch.labelled):
            most = max(batch.num_labels)  # [labelled, most], padded with token 0, which ``widths`` cuts off
            upload.add("pool_labelled", batch.labelled)
            upload.add("pool_labels", np.array([(labels[i] + [0] * most)[:most] for i in batch.labelled]).ravel())
        return batch

    def pool(
        self, batch: PoolBatch | None, hidden: torch.Tensor | None, sent: dict[str, torch.Tensor],
        aligned: AlignedTexts | None = None,
    ) -> list[PooledRows]:
        """Results of the rows that end in this step, on their way to the host; ``hidden`` [T, D]."""
        if batch is None:
            return []
        assert hidden is not None, "a path that covers pooling returns hidden states"
        found = []
        if len(batch.finished) or len(batch.unfinished):
            states = self._reduce(batch, hidden, sent)
            if len(batch.finished):
                own = batch.rows[batch.finished]
                with self._outputs_of(own):
                    found.append(self._send(own, self._apply_head(states, sent), None))
        if len(batch.labelled):
            last = sent["pool_last"].index_select(0, sent["pool_labelled"])
            with self._outputs_of(batch.rows[batch.labelled]):
                logits = self._model.compute_logits(hidden.index_select(0, last))
            # log_softmax of the chosen tokens alone, without a second [n, V] tensor
            chosen = (
                logits.gather(1, sent["pool_labels"].view(len(batch.labelled), -1)) - logits.logsumexp(-1, keepdim=True)
            )
            found.append(self._send(batch.rows[batch.labelled], chosen, batch.num_labels))
        return found + (self._align(batch, aligned) if aligned is not None else [])

    def _align(self, batch: PoolBatch, aligned: AlignedTexts) -> list[PooledRows]:
        """Attention to sound of rows that end in this step; what earlier chunks have is kept until then."""
        found = []
        for (row, is_first, is_last), alignment, weights in zip(
            batch.aligned, aligned.alignments, aligned.weights, strict=True
        ):
            kept = self._weights[row] = [] if is_first else self._weights.get(row, [])
            if weights:
                kept.append(torch.cat(weights))
            if is_last:
                count = len(self._rows[row].token_ids) - alignment.begin
                matrix = weigh_sound(torch.cat(self._weights.pop(row), dim=1)[:, -count:, : alignment.num_positions])
                found.append(self._send(np.array([row]), matrix.view(1, -1), None))
        return found

    def release(self, row: int) -> None:
        """The row was given back, maybe before its text had ended."""
        self._weights.pop(row, None)

    def _reduce(self, batch: PoolBatch, hidden: torch.Tensor, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """[P, D] float32: each span's hidden states reduced to one, with those of its text's earlier spans; kept for
        unfinished texts."""
        assert self._pooling_head is not None, "a generating model has no pooling head"
        reduction = self._pooling_head.reduction
        states = _reduce_spans(reduction, hidden, sent)
        if len(batch.resumed) and reduction != "last":
            kept = self._kept(states).index_select(0, sent["pool_resumed_rows"])
            states.index_copy_(
                0, sent["pool_resumed"], _combine(reduction, kept, states.index_select(0, sent["pool_resumed"]))
            )
        if len(batch.unfinished) and reduction != "last":
            self._kept(states).index_copy_(
                0, sent["pool_unfinished_rows"], states.index_select(0, sent["pool_unfinished"])
            )
        return states

    def _apply_head(self, states: torch.Tensor, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """Results [finished, W] of states [P, D]; a mean's sum is divided by the whole text's length only here."""
        assert self._pooling_head is not None
        states = states.index_select(0, sent["pool_finished"])
        if self._pooling_head.reduction == "mean":
            states = states / sent["pool_totals"][:, None]
        return self._pooling_head(states)

    def _kept(self, like: torch.Tensor) -> torch.Tensor:
        if self._states is None:
            self._states = like.new_zeros(len(self._rows.flags_np), like.shape[1])
        return self._states

    @staticmethod
    def _send(rows: np.ndarray, values: torch.Tensor, widths: list[int] | None) -> PooledRows:
        return PooledRows([int(row) for row in rows], widths or [values.shape[1]] * len(rows), to_host(values.float()))


def weigh_sound(weights: torch.Tensor) -> torch.Tensor:
    """How much tokens attend to positions of sound, [heads, tokens, positions] to [tokens, positions]: each position
    compared with the others' tokens, medians of neighbours, and the mean of heads; arXiv:2212.04356, section 3.8, and
    the code published with it."""
    total, side = torch.zeros_like(weights[0]), MEDIAN_WIDTH // 2
    for head in weights:  # one at a time, as sorting takes many times their memory
        own = (head - head.mean(dim=0)) / head.std(dim=0, unbiased=False).clamp(min=1e-10)
        if own.shape[-1] > side:
            padded = F.pad(own[None], (side, side), mode="reflect")[0]
            own = padded.unfold(-1, MEDIAN_WIDTH, 1).sort()[0][..., side]
        total += own
    return total / len(weights)


def _reduce_spans(reduction: str, hidden: torch.Tensor, sent: dict[str, Any]) -> torch.Tensor:
    if reduction in ("first", "last"):
        return hidden.index_select(0, sent[f"pool_{reduction}"]).float()
    # Over all spans of the step [R], since segments must be contiguous; then those of pooled rows [P].
    per_span = torch.segment_reduce(
        hidden.float(), "sum" if reduction == "mean" else "max", lengths=sent["pool_lengths"], unsafe=True
    )
    return per_span.index_select(0, sent["pool_spans"])


def _combine(reduction: str, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    if reduction == "first":
        return earlier
    return earlier + later if reduction == "mean" else torch.maximum(earlier, later)
