"""`Proposer`: lets a drafter on the device make the drafts that the next step verifies.

It runs behind a step's sampling, over the step's own tokens, and writes the drafts into the rows' state; the host reads
none of them. Refuses: deciding when it runs (the plan does) and verifying (the next step does).

T tokens, S sampled positions, F size of the target's features, B entries of a captured step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.execution.captures import Capture, Records
from headrace.execution.device import row_query
from headrace.execution.inputs import InputBuilder
from headrace.kernels.verify import DECODE_INPUTS, DecodeInputs
from headrace.layers.batch import Features, ForwardBatch
from headrace.layers.draft import DraftModel


@dataclass(slots=True)
class Extension:
    """What the drafter computes behind a step, besides what was sampled. ``batch`` of the step's T tokens, with its
    backends to be prepared again; ``features`` [T, F]; ``rows`` [n] that sample, and ``firsts`` [n]: indices in [0, S)
    of their first positions; ``at`` [S]: indices in [0, T) of the sampled positions; ``following`` [T]: the token
    behind each token, as far as the host knows it."""

    batch: ForwardBatch
    features: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    at: torch.Tensor
    following: torch.Tensor


class Proposer:
    """Makes ``count`` drafts per row with a `DraftModel`. Captured steps of up to ``max_entries`` leave what it reads
    in ``features`` and ``sampled``. ``firsts`` [2, max_rows]: rows, and the indices of their first entries in a
    captured step; ``hidden``: the drafter's own states of its entries."""

    def __init__(
        self, draft: DraftModel, count: int, inputs: InputBuilder, *, hidden_size: int, dtype: torch.dtype,
        max_entries: int,
    ):
        self.draft, self.count = draft, count
        self._inputs, self._rows, self._tables = inputs, inputs.rows, inputs.tables
        device = inputs.rows.tensors.last_token.device
        self._decode_inputs = DECODE_INPUTS.choose(row_query(device))
        self.features = torch.zeros((max_entries, draft.features.count * hidden_size), dtype=dtype, device=device)
        # counts of at least 1, so that padding stands for an entry
        self.sampled = torch.ones((3, max_entries), dtype=torch.int64, device=device)
        self.firsts = torch.zeros((2, inputs.layout.max_rows), dtype=torch.int64, device=device)
        self.firsts[0] = inputs.tables.null_row
        self.hidden: torch.Tensor | None = None

    @property
    def null_row(self) -> int:
        """The row that stands for padding."""
        return self._tables.null_row

    def ask_features(self) -> Features | None:
        """The request for the target's hidden states; None if the drafter reads none."""
        return Features(self.draft.features) if self.draft.features.count else None

    @torch.inference_mode()
    def extend(self, extension: Extension, tokens: torch.Tensor) -> None:
        """Make drafts behind a step that was not captured; ``tokens`` [3, S] as of `ACCEPT`."""
        batch, count = extension.batch, len(extension.at)
        for group in batch.groups:  # pruning has prepared them for other queries
            group.backend.prepare(group.inputs)
        if not self.draft.position_shift:
            following = extension.following
            if count:  # the token behind a sampled position is the sampled one
                following.index_copy_(0, extension.at, tokens[0, :count])
            batch = replace(batch, token_ids=following)
        hidden = self._run(replace(batch, wanted=None, features=None), extension.features)
        if count:
            rows, firsts = extension.rows, extension.firsts
            last = extension.at.index_select(0, firsts + tokens[2].index_select(0, firsts) - 1)
            self._chain(hidden.index_select(0, last), rows, self.allocate(len(rows)))

    def follow(self, inputs: DecodeInputs) -> torch.Tensor:
        """Compute the positions of a captured step of B decode entries, some of which are padding; returns their hidden
        states, which stay in ``hidden``."""
        size = len(inputs.token_ids)
        token_ids = inputs.token_ids if self.draft.position_shift else self.sampled[0, :size]
        batch = ForwardBatch(token_ids, inputs.positions, self._inputs.decode_groups(inputs))
        hidden = self._run(batch, self.features[:size])
        if self.hidden is None:
            self.hidden = hidden.new_zeros((self.features.shape[0], hidden.shape[1]))
        self.hidden[:size].copy_(hidden)
        return self.hidden

    def allocate(self, size: int) -> DecodeInputs:
        """Room for the inputs of a chain of ``size`` rows."""
        return DecodeInputs.allocate(size, self._tables.tensor)

    def chain(self, inputs: DecodeInputs) -> torch.Tensor:
        """Make the drafts of as many rows as ``inputs`` has room for, or fewer and padding, whose first entries are in
        ``firsts``, once `follow` was run; returns the drafts of all rows."""
        assert self.hidden is not None, "a captured step was followed before"
        rows, first = self.firsts[:, : len(inputs.token_ids)]
        self._chain(self.hidden.index_select(0, first + self.sampled[2].index_select(0, first) - 1), rows, inputs)
        return self._rows.tensors.drafts

    def _run(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        return self.draft.forward(batch, self.draft.combine(features))

    def _chain(self, state: torch.Tensor, rows: torch.Tensor, inputs: DecodeInputs) -> None:
        """From the hidden state [n, D] before each row's last token to the drafts of the rows [n]; ``inputs`` are
        overwritten."""
        drafts, back = self._rows.tensors.drafts, 1 - self.draft.position_shift
        made = 0
        if back:
            drafts[rows, 0] = self.draft.compute_ids(state)
            made = 1
        while made < self.count:
            # The latest draft (or, for a model of its own, first the last token) is the next input.
            chain = torch.stack((rows, torch.full_like(rows, made)))
            self._decode_inputs(
                chain, self._rows.tensors, self._tables.tensor, self._inputs.layout.page_size, inputs, back=back,
                longest=self._inputs.layout.max_model_len,
            )
            batch = ForwardBatch(inputs.token_ids, inputs.positions, self._inputs.decode_groups(inputs))
            state = self.draft.forward(batch, self.draft.recycle(state))
            drafts[rows, made] = self.draft.compute_ids(state)
            made += 1


class FollowGraph(Capture[torch.Tensor]):
    """The drafter over the entries of captured decodes of one bucket, which it shares the inputs with."""

    def __init__(self, size: int, proposer: Proposer, inputs: DecodeInputs, recorder: Records):
        super().__init__(lambda: proposer.follow(inputs), recorder)
        self.size = size

    def record(self) -> None:
        """See `Bucket`."""
        self.run()


class ChainGraph(Capture[torch.Tensor]):
    """The drafts of up to ``size`` rows."""

    def __init__(self, size: int, proposer: Proposer, recorder: Records):
        inputs = proposer.allocate(size)
        super().__init__(lambda: proposer.chain(inputs), recorder)
        self.size, self._proposer = size, proposer

    def record(self) -> None:
        """See `Bucket`."""
        self._proposer.firsts[0] = self._proposer.null_row
        self._proposer.firsts[1] = 0
        self.run()

    def pack(self, rows: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Pad rows [n] and the indices of their first entries to the bucket: [2 * size]."""
        packed = np.zeros((2, self.size), dtype=np.int64)
        packed[0] = self._proposer.null_row
        packed[0, : len(rows)], packed[1, : len(rows)] = rows, firsts
        return packed.ravel()
