"""`Proposer`: lets a drafter on the device make the drafts that the next step verifies.

It runs behind a step's sampling, over the step's own tokens, and writes the drafts into the rows' state; the host reads
none of them. Refuses: deciding when it runs (the plan does) and verifying (the next step does).

T tokens, S sampled positions, F size of the target's features, B entries of a captured step, n rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.execution.captures import Capture, Records
from headrace.execution.device import row_query
from headrace.execution.inputs import InputBuilder
from headrace.kernels.rowwise import WRITE_SUM
from headrace.kernels.verify import DECODE_INPUTS, DecodeInputs
from headrace.layers.batch import Features, ForwardBatch
from headrace.layers.draft import DraftModel


@dataclass(slots=True)
class Extension:
    """What the drafter computes behind a step that was not captured, besides what was sampled. ``batch`` of the step's
    T tokens, with its backends to be prepared again; ``features`` [T, F]; ``rows`` [n] that sample, and ``firsts`` [n]:
    indices in [0, S) of their first positions; ``at`` [S]: indices in [0, T) of the sampled positions; ``following``
    [T]: the token behind each token, as far as the host knows it. ``num_drafts``: how many to make per row."""

    batch: ForwardBatch
    features: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    at: torch.Tensor
    following: torch.Tensor
    num_drafts: int


class Chain:
    """Drafts of n rows, one after the other: ``entries`` [2, n] are the rows and how many drafts each has by now, the
    first row of `headrace.kernels.verify.DECODE_INPUTS` and the offset of the next input; ``state`` [n, D] is the
    drafter's hidden state before that."""

    def __init__(self, proposer: Proposer, size: int):
        tables = proposer.tables
        self.entries = torch.zeros((2, size), dtype=torch.int64, device=tables.device)
        self.inputs = DecodeInputs.allocate(size, tables)
        self.state: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.entries.shape[1]


class Proposer:
    """Makes drafts with a `DraftModel`. Captured steps of up to ``max_tokens`` tokens leave what it reads in
    ``features`` [max_tokens, F], and those who run them the rest in ``sampled`` [3, max_tokens]: the token behind each
    token, and in the last row, at each row's first sampled position, how many of its sampled tokens count. ``firsts``
    [2, max_rows]: rows, and where in the step these positions are. ``hidden``: the drafter's states of the step's
    tokens."""

    def __init__(
        self, draft: DraftModel, inputs: InputBuilder, *, hidden_size: int, dtype: torch.dtype, max_tokens: int
    ):
        self.draft = draft
        self._inputs, self._rows, self._tables = inputs, inputs.rows, inputs.tables
        device = inputs.rows.tensors.last_token.device
        self._decode_inputs = DECODE_INPUTS.choose(row_query(device))
        self._write_sum = WRITE_SUM.choose(row_query(device))
        self.features = torch.zeros((max_tokens, draft.features.count * hidden_size), dtype=dtype, device=device)
        # counts of at least 1, so that padding stands for an entry
        self.sampled = torch.ones((3, max_tokens), dtype=torch.int64, device=device)
        self.firsts = torch.zeros((2, inputs.layout.max_rows), dtype=torch.int64, device=device)
        self.firsts[0] = inputs.tables.null_row
        self.hidden: torch.Tensor | None = None

    @property
    def null_row(self) -> int:
        """The row that stands for padding."""
        return self._tables.null_row

    @property
    def tables(self) -> torch.Tensor:
        """The page tables of all rows."""
        return self._tables.tensor

    def ask_features(self, num_captured: int = 0) -> Features | None:
        """The request for the target's hidden states; None if the drafter reads none. A step that is captured, of so
        many tokens, leaves them where no graph of its pool may write: the drafter's graph is another one."""
        if not self.draft.features.count:
            return None
        return Features(self.draft.features, self._write_sum, self.features[:num_captured] if num_captured else None)

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
            chain = Chain(self, len(rows))
            self._begin(chain, rows, hidden.index_select(0, last))
            for _ in range(extension.num_drafts - self.num_at_once):
                self.advance(chain)

    def follow(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the tokens of a captured step, some of which are padding; returns ``hidden``."""
        size = len(batch.token_ids)
        if not self.draft.position_shift:
            batch = replace(batch, token_ids=self.sampled[0, :size])
        hidden = self._run(batch, self.features[:size])
        if self.hidden is None:
            self.hidden = hidden.new_zeros((self.features.shape[0], hidden.shape[1]))
        self.hidden[:size].copy_(hidden)
        return self.hidden

    @property
    def num_at_once(self) -> int:
        """Drafts that `begin` makes: a head drafts from the states of the step, a model of its own reads the sampled
        token first."""
        return 1 - self.draft.position_shift

    def begin(self, chain: Chain) -> torch.Tensor:
        """Begin the chain of as many rows as it has room for, or fewer and padding, which are in ``firsts``, once
        `follow` was run; returns the drafts of all rows."""
        assert self.hidden is not None, "a captured step was followed before"
        rows, first = self.firsts[:, : len(chain)]
        state = self.hidden.index_select(0, first + self.sampled[2].index_select(0, first) - 1)
        return self._begin(chain, rows, state)

    def _begin(self, chain: Chain, rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """From the hidden states [n, D] before the last tokens of the rows [n]."""
        if chain.state is None:
            chain.state = torch.empty_like(state)
        chain.state.copy_(state)
        chain.entries[0].copy_(rows)
        chain.entries[1].fill_(self.num_at_once)
        drafts = self._rows.tensors.drafts
        if self.num_at_once:
            drafts[rows, 0] = self.draft.compute_ids(state)
        return drafts

    def advance(self, chain: Chain) -> torch.Tensor:
        """One more draft of every row of the chain; returns the drafts of all rows."""
        # The latest draft (or, for a model of its own, first the last token) is the next input.
        assert chain.state is not None, "a chain has begun"
        inputs, drafts = chain.inputs, self._rows.tensors.drafts
        rows, made = chain.entries
        self._decode_inputs(
            chain.entries, self._rows.tensors, self._tables.tensor, self._inputs.layout.page_size, inputs,
            back=self.num_at_once, longest=self._inputs.layout.max_model_len,
        )
        batch = ForwardBatch(inputs.token_ids, inputs.positions, self._inputs.decode_groups(inputs, rows))
        state = self.draft.forward(batch, self.draft.recycle(chain.state))
        drafts[rows, made] = self.draft.compute_ids(state)
        chain.state.copy_(state)
        made.add_(1)
        return drafts

    def _run(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        return self.draft.forward(batch, self.draft.combine(features))


class FollowGraph(Capture[torch.Tensor]):
    """The drafter over the tokens of captured steps of one bucket, whose inputs it shares: ``make_batch`` builds a
    batch over them, ``clear`` makes them padding."""

    def __init__(
        self, size: int, proposer: Proposer, make_batch: Callable[[], ForwardBatch], clear: Callable[[], object],
        recorder: Records,
    ):
        super().__init__(lambda: proposer.follow(make_batch()), recorder)
        self.size, self._clear = size, clear

    def record(self) -> None:
        """See `Bucket`."""
        self._clear()  # it holds the latest step's, whose pages may be another request's by now
        self.run()


class ChainGraph:
    """The drafts of up to ``size`` rows: one graph begins them, another one adds a draft each time."""

    def __init__(self, size: int, proposer: Proposer, recorder: Records):
        self.size, self._proposer = size, proposer
        chain = Chain(proposer, size)
        self._begin = Capture(lambda: proposer.begin(chain), recorder)
        self._advance = Capture(lambda: proposer.advance(chain), recorder)

    @property
    def is_recorded(self) -> bool:
        """See `Bucket`."""
        return self._begin.is_recorded and self._advance.is_recorded

    def record(self) -> None:
        """See `Bucket`."""
        self._proposer.firsts[0] = self._proposer.null_row
        self._proposer.firsts[1] = 0
        self.run(1 + self._proposer.num_at_once)

    def run(self, num_drafts: int) -> None:
        """Make drafts of the rows in `Proposer.firsts`."""
        self._begin.run()
        for _ in range(num_drafts - self._proposer.num_at_once):
            self._advance.run()

    def pack(self, rows: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Pad rows [n], and where in the step their first sampled positions are, to the bucket: [2 * size]."""
        packed = np.zeros((2, self.size), dtype=np.int64)
        packed[0] = self._proposer.null_row
        packed[0, : len(rows)], packed[1, : len(rows)] = rows, firsts
        return packed.ravel()
