"""Dispatchers among ranks that have some of the experts each: `GatheringDispatcher` sends all tokens to all ranks,
`ExchangingDispatcher` each token to the ranks of its experts.

Both speak `CHOICES`. Each rank sends its share of its replica's tokens (`ExpertRanks.split_tokens`), and gets their
sums back; its result [T, D] is zero for the other tokens of its replica, which the layer adds up over ``build.tensor``
as it does partial sums. T tokens of the replica, t of them sent by this rank, N received, D hidden size, k experts a
token, W ranks.
"""

from __future__ import annotations

import torch

from headrace.kernels.moe import OWN_EXPERTS
from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens
from headrace.parallel.experts import exchange_counts, reduce_scatter_rows
from headrace.parallel.share import Share

ALIGNMENT = 16
"""Bytes to which packed rows are padded."""


class _Sender:
    """What both have in common: whose tokens are whose, and one message for what belongs to a token."""

    def __init__(self, build: Build):
        self._ranks, self._step = build.experts, build.step
        self._number = OWN_EXPERTS.choose(build.query())
        self.group = build.experts.group
        self._counts: list[int] = []  # tokens that each rank sends
        self._own = Share.whole(0)  # those of this one, among its replica's

    def _take_own(self, tokens: ChosenTokens) -> ChosenTokens:
        """Of the replica's tokens those that this rank sends."""
        # steps of the start, run by each replica for itself, do not say what others have
        counts = self._step.batch.replica_tokens or [len(tokens.hidden)] * self._ranks.num_replicas
        assert counts[self._ranks.replica] == len(tokens.hidden), "all ranks have been told how many tokens there are"
        self._own, self._counts = self._ranks.split_tokens(counts)
        return ChosenTokens(*_slice(tokens, self._own), tokens.num_experts)

    def _place(self, own: torch.Tensor) -> torch.Tensor:
        """The sums of this rank's tokens [t, D] among zeros for those of the others [T, D]."""
        if self._own.is_whole:
            return own
        out = own.new_zeros(self._own.size, own.shape[1])
        out[self._own.start : self._own.stop] = own
        return out

    def _receive(self, packed: torch.Tensor, like: ChosenTokens) -> ChosenTokens:
        """Packed rows [N, bytes], with the experts of this rank numbered from 0 and all others -1."""
        tokens = unpack_tokens(packed, like)
        own = self._ranks.share(like.num_experts)
        ids = self._number(tokens.ids, own.start, own.length)
        return ChosenTokens(tokens.hidden, ids, tokens.weights, own.length, has_padding=True)


class GatheringDispatcher(_Sender):
    """See `Dispatcher`. Every rank gets all tokens, computes those choices that are its own experts, and the sums of a
    token meet at the rank that sent it. The same messages whatever is chosen: nothing waits for the device."""

    def __init__(self, build: Build):
        super().__init__(build)
        self.is_capturable = build.experts.num_replicas == 1  # else messages are as long as others' steps

    def dispatch(self, tokens: ChosenTokens) -> ChosenTokens:
        own = self._take_own(tokens)
        return self._receive(self.group.all_gather_rows(pack_tokens(own), self._counts), own)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return self._place(reduce_scatter_rows(self.group, results, self._counts))


class ExchangingDispatcher(_Sender):
    """See `Dispatcher`. A token goes once to each rank that has any of its experts, which returns one sum. Waits for
    the device: how many rows go where depends on the choices."""

    is_capturable = False

    def __init__(self, build: Build):
        super().__init__(build)
        self._rows = torch.empty(0, dtype=torch.int64)  # of this rank's tokens, one for each row sent
        self._sent: list[int] = []
        self._received: list[int] = []

    def dispatch(self, tokens: ChosenTokens) -> ChosenTokens:
        own = self._take_own(tokens)
        owners = self._find_owners(own)
        wanted = torch.zeros(self.group.size + 1, len(owners), dtype=torch.bool, device=owners.device)
        wanted = wanted.scatter_(0, owners.T, True)[:-1]  # [W, t]; the last row is nobody's
        self._rows = wanted.nonzero()[:, 1]
        counts = wanted.sum(1)
        self._sent, self._received = counts.tolist(), exchange_counts(self.group, counts)
        packed = pack_tokens(own).index_select(0, self._rows)
        return self._receive(self.group.exchange_rows(packed, self._sent, self._received), own)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        back = self.group.exchange_rows(results, self._received, self._sent)
        out = torch.zeros(self._own.length, back.shape[1], dtype=torch.float32, device=back.device)
        # rank by rank, whose rows are of different tokens: always in the same order
        for rows, sums in zip(self._rows.split(self._sent), back.split(self._sent), strict=True):
            out.index_add_(0, rows, sums.float())
        return self._place(out.to(back.dtype))

    def _find_owners(self, tokens: ChosenTokens) -> torch.Tensor:
        """The rank of each choice [t, k]; W for no expert."""
        size = self.group.size
        starts = [tokens.num_experts * rank // size for rank in range(1, size)]
        owners = torch.bucketize(tokens.ids, torch.tensor(starts, device=tokens.ids.device), right=True)
        return owners.masked_fill_(tokens.ids < 0, size)


def _slice(tokens: ChosenTokens, own: Share) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = slice(own.start, own.stop)
    return tokens.hidden[rows], tokens.ids[rows], tokens.weights[rows]


def pack_tokens(tokens: ChosenTokens) -> torch.Tensor:
    """Weights, ids as int32 and hidden states of each token behind each other, as bytes [t, B]."""
    parts = [
        part.contiguous().view(torch.uint8)
        for part in (tokens.weights, tokens.ids.to(torch.int32), tokens.hidden)
    ]
    num_bytes = sum(part.shape[1] for part in parts)
    padding = -num_bytes % ALIGNMENT
    return torch.cat([*parts, parts[0].new_zeros(len(parts[0]), padding)], dim=1)


def unpack_tokens(packed: torch.Tensor, like: ChosenTokens) -> ChosenTokens:
    """The inverse of `pack_tokens`, for tokens of the same width, dtype and number of choices as ``like``."""
    top_k, width = 4 * like.ids.shape[1], like.hidden.shape[1] * like.hidden.element_size()
    weights, ids, hidden, _ = packed.split((top_k, top_k, width, packed.shape[1] - 2 * top_k - width), dim=1)
    return ChosenTokens(
        hidden.contiguous().view(like.hidden.dtype), ids.contiguous().view(torch.int32).long(),
        weights.contiguous().view(torch.float32), like.num_experts,
    )
