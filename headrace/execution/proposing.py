"""`Proposer`: lets a drafter on the device make the drafts that the next step verifies.

It runs behind a step's sampling, over the step's own tokens, and writes the drafts into the rows' state; the host reads
none of them. Refuses: deciding when it runs (the plan does) and verifying (the next step does).

T tokens, S sampled positions, F size of the target's features, B entries of a captured step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.base.cache import CacheLayout
from headrace.execution.captures import Capture, Records
from headrace.execution.device import row_query
from headrace.execution.rows import Rows
from headrace.kernels.verify import DECODE_INPUTS, DecodeInputs
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs
from headrace.layers.batch import Features, ForwardBatch, GroupStep
from headrace.layers.draft import DraftModel
from headrace.memory.page_tables import PageTables


@dataclass(slots=True)
class Extension:
    """What the drafter computes behind a step, besides what was sampled. ``batch`` of the step's T tokens, with its
    backends to be prepared again; ``features`` [T, F]; ``entries`` [2, S]; ``at`` [S]: indices in [0, T) of the sampled
    positions; ``following`` [T]: the token behind each token, as far as the host knows it."""

    batch: ForwardBatch
    features: torch.Tensor
    entries: torch.Tensor
    at: torch.Tensor
    following: torch.Tensor


class Proposer:
    """Makes ``count`` drafts per row with a `DraftModel`. Captured steps of up to ``max_entries`` leave what it reads
    in ``features`` and ``sampled``."""

    def __init__(
        self, draft: DraftModel, count: int, *, rows: Rows, tables: PageTables, layout: CacheLayout,
        backends: list[AttentionBackend], hidden_size: int, dtype: torch.dtype, max_entries: int,
    ):
        self.draft, self.count = draft, count
        self._rows, self._tables, self._layout, self._backends = rows, tables, layout, backends
        device = rows.tensors.last_token.device
        self._decode_inputs = DECODE_INPUTS.choose(row_query(device))
        self.features = torch.zeros((max_entries, draft.features.count * hidden_size), dtype=dtype, device=device)
        self.sampled = torch.zeros((3, max_entries), dtype=torch.int64, device=device)

    def ask_features(self) -> Features | None:
        """The request for the target's hidden states; None if the drafter reads none."""
        return Features(self.draft.features) if self.draft.features.count else None

    @torch.inference_mode()
    def extend(self, extension: Extension, tokens: torch.Tensor) -> None:
        """Make drafts behind a step that was not captured; ``tokens`` [3, S] as of `ACCEPT`."""
        batch, count = extension.batch, extension.entries.shape[1]
        for group in batch.groups:  # pruning has prepared them for other queries
            group.backend.prepare(group.inputs)
        if not self.draft.position_shift:
            following = extension.following
            if count:  # the token behind a sampled position is the sampled one
                following.index_copy_(0, extension.at, tokens[0, :count])
            batch = replace(batch, token_ids=following)
        hidden = self._run(replace(batch, wanted=None, features=None), extension.features)
        if count:
            self._chain(hidden, extension.entries, tokens[:, :count], extension.at)

    def propose(self, inputs: DecodeInputs, groups: list[GroupStep], entries: torch.Tensor) -> torch.Tensor:
        """Make drafts behind a captured step of B decode entries [2, B], some of which are padding; returns the drafts
        of all rows."""
        size = entries.shape[1]
        token_ids = inputs.token_ids if self.draft.position_shift else self.sampled[0, :size]
        hidden = self._run(ForwardBatch(token_ids, inputs.positions, groups), self.features[:size])
        self._chain(hidden, entries, self.sampled[:, :size], torch.arange(size, device=entries.device))
        return self._rows.tensors.drafts

    def _run(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        return self.draft.forward(batch, self.draft.combine(features))

    def _chain(self, hidden: torch.Tensor, entries: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor) -> None:
        """From hidden states [T, D] behind a step to the rows' drafts. Entries that are not their row's first stand for
        the null row: shapes must not depend on how many there are."""
        own, offsets = entries
        is_first = offsets == 0
        rows = torch.where(is_first, own, self._tables.null_row)
        last = torch.arange(len(own), device=own.device) + torch.where(is_first, tokens[2] - 1, 0)
        state = hidden.index_select(0, at.index_select(0, last))
        drafts, back = self._rows.tensors.drafts, 1 - self.draft.position_shift
        made = 0
        if back:
            drafts[rows, 0] = self.draft.compute_ids(state)
            made = 1
        inputs = DecodeInputs.allocate(len(rows), self._tables.tensor)
        while made < self.count:
            # The latest draft (or, for a model of its own, first the last token) is the next input.
            chain = torch.stack((rows, torch.full_like(rows, made)))
            self._decode_inputs(
                chain, self._rows.tensors, self._tables.tensor, self._layout.page_size, inputs, back=back,
                longest=self._layout.max_model_len,
            )
            batch = ForwardBatch(inputs.token_ids, inputs.positions, self.group_steps(inputs))
            state = self.draft.forward(batch, self.draft.recycle(state))
            drafts[rows, made] = self.draft.compute_ids(state)
            made += 1

    def group_steps(self, inputs: DecodeInputs) -> list[GroupStep]:
        """Every cache group over these decodes, its backend prepared. Of lengths the host knows bounds only, except on
        a CPU, whose backends read them."""
        size, longest = len(inputs.token_ids), self._layout.max_model_len
        is_cpu = inputs.kv_lens.device.type == "cpu"
        lengths = list(map(int, inputs.kv_lens)) if is_cpu else [longest] * size
        query_start = torch.arange(size + 1, dtype=torch.int32, device=inputs.token_ids.device)
        steps = []
        for group, backend in enumerate(self._backends):
            step = AttentionInputs(
                num_tokens=size, num_decodes=size, query_lens_cpu=[1] * size, kv_lens_cpu=lengths,
                max_query_len=1, max_kv_len=max(lengths), query_start=query_start, kv_lens=inputs.kv_lens,
                page_table=inputs.page_tables[group], slots=inputs.slots[group],
            )
            backend.prepare(step)
            steps.append(GroupStep(step, backend))
        return steps


class DraftGraph(Capture[torch.Tensor]):
    """Drafting behind captured decodes of one bucket, which it shares the inputs with."""

    def __init__(
        self, size: int, proposer: Proposer, entries: torch.Tensor, inputs: DecodeInputs, recorder: Records
    ):
        super().__init__(lambda: proposer.propose(inputs, proposer.group_steps(inputs), entries), recorder)
        self.size = size

    def record(self) -> None:
        """See `Bucket`."""
        self.run()

