"""`Indexer`: selects the compressed entries that each token attends to, as in DeepSeek sparse attention. T tokens, H
index heads, E index dims, N entries, k selected entries."""

from __future__ import annotations

import math

import torch
from torch import nn

from headrace.kernels.once import cache_once
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.rotary import RotaryTable
from headrace.models.deepseek_v4.backends import EntriesBackend
from headrace.models.deepseek_v4.compressor import Compressor, rotate_last
from headrace.models.deepseek_v4.layout import OVERLAPPING
from headrace.models.deepseek_v4.spec import DeepseekV4Spec

TILE_ELEMENTS = 2**25
"""Elements of the largest tensor of scores per head [tile, H, N] that a prefill chunk makes."""


class Indexer(nn.Module):
    """Scores are ``sum over h of w[h] * relu(q[h] . key)``; a key is an entry of the indexer's own compressor."""

    def __init__(self, spec: DeepseekV4Spec, rotary: RotaryTable, build: Build):
        super().__init__()
        self.spec, self.rotary = spec.indexer, rotary
        self.q = Linear(build, spec.heads.q_lora_rank, self.spec.num_heads * self.spec.head_dim)
        self.weights = Linear(build, spec.hidden_size, self.spec.num_heads)
        self.compressor = Compressor(
            spec.hidden_size, self.spec.head_dim, OVERLAPPING, norm_eps=spec.norm_eps, rotary=rotary, build=build
        )

    def forward(self, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``x`` [T, D] and the query latents [T, L] to entry numbers within each token's request, [T, k] int64, padded
        with -1. Writes the step's index keys."""
        slots = self.compressor.entries.slots
        # Packed keys have one scale for all dims. A Hadamard rotation spreads outliers over the dims and so lowers the
        # quantisation error; the matrix is orthonormal, so rotating queries and keys alike leaves q . k unchanged.
        basis = hadamard(self.spec.head_dim, x.device) if slots.pack else None
        self.compressor(x, batch, basis)
        backend: EntriesBackend = self.compressor.entries.backend(batch)
        if backend.slots.shape[1] <= self.spec.top_k:  # no request has more entries than are selected: skip scoring
            return choose_entries(None, backend.visible, backend.slots.shape[1])
        q = self.q(latent).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        q = rotate_last(q, self.rotary.cos_sin.index_select(0, batch.positions)).float()
        q = q if basis is None else q @ basis
        weights = self.weights(x).float() * (self.spec.head_dim * self.spec.num_heads) ** -0.5
        return choose_entries(self._score(q, weights, backend), backend.visible, self.spec.top_k)

    def _score(self, q: torch.Tensor, weights: torch.Tensor, backend: EntriesBackend) -> torch.Tensor:
        """``q`` [T, H, E] and ``weights`` [T, H] to scores [T, N] float32; undefined for entries that a token may not
        see. Decodes are scored as one batch against their own keys, prefill chunks one request at a time."""
        slots, num_decodes = self.compressor.entries.slots, backend.num_decodes
        scores = q.new_zeros(q.shape[0], backend.slots.shape[1])
        if num_decodes:
            keys = slots.gather(backend.slots[:num_decodes], torch.float32)  # [decodes, N, E]; decode t is request t
            hits = torch.einsum("the,tne->thn", q[:num_decodes], keys).relu_()
            scores[:num_decodes] = torch.einsum("thn,th->tn", hits, weights[:num_decodes])
        for request, start, count, num_entries in backend.prefills:
            keys = slots.gather(backend.slots[request, :num_entries], torch.float32)  # [n, E], shared by the tokens
            tile = max(1, TILE_ELEMENTS // max(1, q.shape[1] * num_entries))
            for low in range(start, start + count, tile):
                span = slice(low, min(low + tile, start + count))
                hits = torch.einsum("the,ne->thn", q[span], keys).relu_()
                scores[span, :num_entries] = torch.einsum("thn,th->tn", hits, weights[span])
        return scores


def choose_entries(scores: torch.Tensor | None, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ``top_k`` highest-scoring of each token's first ``visible`` [T] entries, in any order; all of them, in
    ascending order, if there are at most ``top_k``. ``scores`` [T, N], or None if N is at most ``top_k``. Returns
    [T, top_k] int64, padded with -1. Ties are broken arbitrarily."""
    numbers = torch.arange(top_k, device=visible.device)
    first = numbers.expand(len(visible), -1).masked_fill(numbers >= visible[:, None], -1)
    if scores is None or scores.shape[1] <= top_k:
        return first
    everything = torch.arange(scores.shape[1], device=visible.device)
    best = scores.masked_fill(everything >= visible[:, None], float("-inf")).topk(top_k, dim=-1).indices
    # rows with more than top_k visible entries: `best` holds no masked one
    return torch.where(visible[:, None] <= top_k, first, best)


@cache_once
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix [size, size] float32 by Sylvester's construction; ``size`` a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
