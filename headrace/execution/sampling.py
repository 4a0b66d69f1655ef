"""`Sampler`: from logits to tokens. S sampled positions, V vocabulary.

In vLLM's order: raw logprobs, bias, allowed tokens, bad words, minimum length, penalties, DRY, grammar; then the
argmax for greedy rows, and for the others temperature, min-p, top-k, top-p, XTC and a random choice
(``kernels/sample``). Every operation is row-wise, so the token of a position does not depend on those beside it. Where
a row has drafts, one token is sampled behind each of them, as if all drafts before were output; those behind the first
wrong draft do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headrace.execution.device import row_query
from headrace.execution.logprobs import Logprobs, compute_sampled, pack_logged
from headrace.execution.rows import Rows, RowTokens
from headrace.execution.rules import Drafted, PenaltyState, RuleState
from headrace.execution.step import SampleBatch
from headrace.execution.structured.bitmasks import RowBitmasks
from headrace.execution.upload import Upload
from headrace.kernels.sample import (
    ARGMAX,
    ARGMAX_SHARE,
    MERGE_SHARES,
    NOT_FINITE,
    NOTHING_ALLOWED,
    SAMPLE,
    SAMPLE_GREEDY,
    SampleParams,
)
from headrace.kernels.sample.reference import mask_argmax
from headrace.layers.model import ServedModel
from headrace.parallel.group import Group

MESSAGES = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NOTHING_ALLOWED: "the request's logit rules and grammar leave no token to choose",
}


@dataclass(slots=True)
class Sampled:
    """``tokens`` [3, S or more] int64 on the device: ids, states and counts (`headrace.kernels.verify.ACCEPT`; columns
    beyond S are padding); ``logprobs`` of the positions in ``SampleBatch.logged``, if any. ``errors``: see
    `RowBitmasks`."""

    tokens: torch.Tensor
    logprobs: Logprobs | None
    errors: dict[int, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LatestRows:
    """The entries that sampled last, as bytes (``key``) and on the device ([2, S]), with the lengths of their rows'
    prompts [S] and their parameters: decodes of the same rows need no second upload. Valid until any row is started or
    released."""

    key: bytes
    entries: torch.Tensor
    prompt_lens: torch.Tensor
    params: SampleParams | None


class Sampler:
    """Owns the penalty and rule state of the rows; `pack` before the step's upload, `sample` after the forward pass.

    Steps must be packed and sampled in plan order, each sampled before the next is packed: `sample` leaves state
    (counts, recent tokens, last tokens) for the next step, and `_latest` says what its upload may omit.
    """

    def __init__(self, rows: Rows, max_rows: int, vocab_size: int, group: Group | None = None):
        self._group = group or Group()
        device = rows.tensors.last_token.device
        self._rows, self.vocab_size = rows, vocab_size
        self._latest: _LatestRows | None = None
        self._penalties = PenaltyState(vocab_size, device)
        self._rules = RuleState(max_rows, vocab_size, device)
        query = row_query(device, vocab_size=vocab_size)
        self._sample, self._argmax = SAMPLE.choose(query), ARGMAX.choose(query)

    def start(self, row: int, known: RowTokens) -> None:
        """Set up the state of a row that was taken."""
        self.release(row)
        if known.sampling.penalties is not None:
            self._penalties.start(row, known)
        if known.sampling.rules is not None:
            self._rules.start(row, known)

    def release(self, row: int) -> None:
        """Drop the state of a row that was given back."""
        self._latest = None  # the same row number may come back with other parameters
        self._penalties.release(row)
        self._rules.release(row)

    def pack(self, batch: SampleBatch, upload: Upload) -> None:
        """Add the sampling parameters of the batch to the upload, without those that are on the device because the same
        rows sampled last."""
        if self._latest is None or self._latest.key != batch.entries.tobytes():
            upload.add("sample_entries", batch.entries.ravel())
            upload.add("sample_prompt_lens", self._rows.prompt_len_np[batch.rows])
            if len(batch.random):
                reals = self._rows.reals_np[batch.rows].T.copy()
                reals[0, np.delete(np.arange(len(batch.rows)), batch.random)] = 0.0  # temperature of greedy rows
                upload.add("sample_reals", reals.ravel())  # [3, S]: temperature, top_p, min_p
                upload.add("sample_integers", self._rows.integers_np[batch.rows].T.ravel())  # [2, S]: top_k, seed
        if len(batch.ruled):
            self._rules.pack(batch.rows[batch.ruled], upload)
            upload.add("ruled", batch.ruled)
        if len(batch.penalised):
            self._penalties.pack(batch.rows[batch.penalised], upload, most_new=batch.most_drafts + 1)
            upload.add("penalised", batch.penalised)
        if len(batch.logged):
            upload.add("logged", batch.logged)
            pack_logged([self._rows[int(row)].sampling for row in batch.rows[batch.logged]], upload)

    def sample(
        self, logits: torch.Tensor, positions: torch.Tensor, batch: SampleBatch, sent: dict[str, torch.Tensor],
        bitmasks: RowBitmasks | None = None,
    ) -> Sampled:
        """Sample a token per position from logits [S, V] float32 (overwritten), computed at ``positions`` [S], find out
        which drafts are right, and update the state of the rows. ``bitmasks`` are those of ``batch.constrained``, if
        there are any. Launches only; waits for nothing."""
        # Copied before anything edits them: what is reported is the model's own distribution.
        raw = logits.index_select(0, sent["logged"]) if len(batch.logged) else None
        latest = self._find_params(batch, sent)
        # The random choice is a function of (seed, index in the output), so that it survives a retraction.
        output_lens = positions + 1 - latest.prompt_lens
        drafted = Drafted(latest.entries, batch.most_drafts, self._rows.tensors.drafts)
        before = None
        masks = (None, None) if bitmasks is None else bitmasks.send()
        if len(batch.ruled) or len(batch.penalised):
            before, _ = self._argmax(logits)  # bans may hide NaN or infinity, so finiteness is checked first
            self._edit(logits, output_lens, drafted, batch, sent, masks)
        params = None if latest.params is None else replace(latest.params, position=output_lens)
        sampled = self._sample(logits, params=params, masks=masks[0], mask_of_row=masks[1], before=before)
        sampled = self._group.broadcast(sampled)
        tokens = self._rows.accept(sampled, latest.entries, positions, batch.most_drafts)
        self._count(tokens, drafted, batch, sent)  # on the device: the host does not know the ids yet
        logprobs = None
        if raw is not None:
            logprobs = compute_sampled(raw, tokens[0].index_select(0, sent["logged"]), batch.top_counts, sent)
        return Sampled(tokens, logprobs, bitmasks.errors if bitmasks is not None else {})

    def _edit(
        self, logits: torch.Tensor, output_lens: torch.Tensor, drafted: Drafted, batch: SampleBatch,
        sent: dict[str, torch.Tensor], masks: tuple[torch.Tensor, torch.Tensor] | tuple[None, None],
    ) -> None:
        """Apply rules, then penalties, to the positions that have them; in place, through copies of those [n, V]."""
        if len(batch.ruled):
            chosen = sent["ruled"]
            edited = logits.index_select(0, chosen)
            self._rules.apply(edited, output_lens.index_select(0, chosen), drafted.select(chosen), sent)
            logits.index_copy_(0, chosen, edited)
        if len(batch.penalised):
            chosen = sent["penalised"]
            edited = logits.index_select(0, chosen)
            self._penalties.apply(edited, drafted.select(chosen), sent)
            if "xtc_indices" in sent:
                # XTC chooses among what the grammar allows, or it might exclude all of that.
                if masks[0] is not None and masks[1] is not None:
                    mask_argmax(edited, masks[0], masks[1].index_select(0, chosen))
                self._penalties.exclude(edited, output_lens.index_select(0, chosen), sent)
            logits.index_copy_(0, chosen, edited)

    def _find_params(self, batch: SampleBatch, sent: dict[str, torch.Tensor]) -> _LatestRows:
        """The entries and their parameters, as sent now or before."""
        if "sample_entries" in sent:
            params = self._read_params(batch, sent) if len(batch.random) else None
            entries = sent["sample_entries"].view(2, -1)
            self._latest = _LatestRows(batch.entries.tobytes(), entries, sent["sample_prompt_lens"], params)
        assert self._latest is not None, "what was not sent is on the device"
        return self._latest

    def _read_params(self, batch: SampleBatch, sent: dict[str, torch.Tensor]) -> SampleParams:
        rows = batch.rows[batch.random]
        top_p, min_p = self._rows.reals_np[rows, 1:].T
        top_k = self._rows.integers_np[rows, 0]
        # How far down the sorted logits any row's cut may lie; a top_p alone may reach the whole vocabulary.
        ranked = np.where(top_k > 0, top_k, np.where(top_p < 1.0, self.vocab_size, 0))
        temperatures, top_ps, min_ps = sent["sample_reals"].view(3, -1)
        top_ks, seeds = sent["sample_integers"].view(2, -1)
        index = torch.zeros_like(seeds)  # in the output: differs in every step, see `sample`
        return SampleParams(
            temperatures, top_ks, top_ps, min_ps, seeds, index, has_min_p=bool((min_p > 0).any()),
            has_top_p=bool((top_p < 1.0).any()), num_ranked=min(int(ranked.max()), self.vocab_size),
        )

    def _count(
        self, tokens: torch.Tensor, drafted: Drafted, batch: SampleBatch, sent: dict[str, torch.Tensor]
    ) -> None:
        """Let penalties and rules know the tokens [3, S] that count."""
        if len(batch.penalised):
            self._penalties.count(tokens, drafted, sent)
        if len(batch.ruled):
            self._rules.push(tokens, drafted, sent)


class ReceivingSampler(Sampler):
    """The sampler of ranks other than 0: takes what rank 0 samples, and has no state of penalties and rules."""

    def start(self, row: int, known: RowTokens) -> None:
        """See `Sampler`."""

    def release(self, row: int) -> None:
        """See `Sampler`."""

    def pack(self, batch: SampleBatch, upload: Upload) -> None:
        """See `Sampler`."""
        upload.add("sample_entries", batch.entries.ravel())

    def sample(
        self, logits: torch.Tensor, positions: torch.Tensor, batch: SampleBatch, sent: dict[str, torch.Tensor],
        bitmasks: RowBitmasks | None = None,
    ) -> Sampled:
        """See `Sampler`; of the logits only the number counts."""
        sampled = self._group.broadcast(torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device))
        entries = sent["sample_entries"].view(2, -1)
        return Sampled(self._rows.accept(sampled, entries, positions, batch.most_drafts), None)


class GreedyHead:
    """Logits and argmax ids of captured decodes, B of a bucket. Ranks that have the logits of v tokens each exchange
    their largest ones; whole logits, hundreds of megabytes for hundreds of rows, are gathered only to be sampled
    from."""

    def __init__(self, model: ServedModel, device: torch.device):
        self._model, query = model, row_query(device)
        self._sample_greedy = SAMPLE_GREEDY.choose(query)
        self._argmax_share, self._merge_shares = ARGMAX_SHARE.choose(query), MERGE_SHARES.choose(query)

    def compute(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, D] to logits, of this rank's tokens [B, v], and what `SAMPLE_GREEDY` finds in those of all
        [2, B]. May be captured in a CUDA graph; all ranks call it."""
        head = self._model.divided_head
        if head is None:
            logits = self._model.compute_logits(hidden)
            return logits, self._sample_greedy(logits)
        logits = head.compute_own(hidden)
        largest = self._argmax_share(logits, head.shares[head.group.rank].start)
        return logits, self._merge_shares(head.group.all_gather(largest, [2] * head.group.size))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Rows of what `compute` returned to logits of all tokens [S, V]. All ranks call it."""
        head = self._model.divided_head
        return logits if head is None else head.gather(logits)
