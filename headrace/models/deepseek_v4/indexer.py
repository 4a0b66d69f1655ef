"""`Indexer`: which compressed entries each token attends to. T tokens, H index heads, E index dims, N entries, k
chosen."""

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
"""Of scores per head that are held at a time."""


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
        """``x`` [T, D] and the query latents [T, L] to numbers of entries [T, k] int64, -1 where a token sees fewer."""
        slots = self.compressor.entries.slots
        # In 8 bits, values spread over all dims lose least; turning both sides changes no product.
        basis = hadamard(self.spec.head_dim, x.device) if slots.pack else None
        self.compressor(x, batch, basis)
        backend: EntriesBackend = self.compressor.entries.backend(batch)
        if backend.slots.shape[1] <= self.spec.top_k:
            return choose_entries(None, backend.visible, backend.slots.shape[1])
        q = self.q(latent).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        q = rotate_last(q, self.rotary.cos_sin.index_select(0, batch.positions)).float()
        q = q if basis is None else q @ basis
        weights = self.weights(x).float() * (self.spec.head_dim * self.spec.num_heads) ** -0.5
        return choose_entries(self._score(q, weights, backend), backend.visible, self.spec.top_k)

    def _score(self, q: torch.Tensor, weights: torch.Tensor, backend: EntriesBackend) -> torch.Tensor:
        """``q`` [T, H, E] and ``weights`` [T, H] to [T, N] float32; what a token may not see has any score."""
        slots, num_decodes = self.compressor.entries.slots, backend.num_decodes
        scores = q.new_zeros(q.shape[0], backend.slots.shape[1])
        if num_decodes:
            keys = slots.gather(backend.slots[:num_decodes], torch.float32)
            hits = torch.einsum("the,tne->thn", q[:num_decodes], keys).relu_()
            scores[:num_decodes] = torch.einsum("thn,th->tn", hits, weights[:num_decodes])
        for request, start, count, num_entries in backend.prefills:
            keys = slots.gather(backend.slots[request, :num_entries], torch.float32)
            tile = max(1, TILE_ELEMENTS // max(1, q.shape[1] * num_entries))
            for low in range(start, start + count, tile):
                span = slice(low, min(low + tile, start + count))
                hits = torch.einsum("the,ne->thn", q[span], keys).relu_()
                scores[span, :num_entries] = torch.einsum("thn,th->tn", hits, weights[span])
        return scores


def choose_entries(scores: torch.Tensor | None, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """Of the first ``visible`` [T] entries the ``top_k`` that score highest, in any order; all of them, in order, where
    there are no more than that. [T, top_k] int64, then -1. Which of equal scores wins is open."""
    numbers = torch.arange(top_k, device=visible.device)
    first = numbers.expand(len(visible), -1).masked_fill(numbers >= visible[:, None], -1)
    if scores is None or scores.shape[1] <= top_k:
        return first
    everything = torch.arange(scores.shape[1], device=visible.device)
    best = scores.masked_fill(everything >= visible[:, None], float("-inf")).topk(top_k, dim=-1).indices
    return torch.where(visible[:, None] <= top_k, first, best)


@cache_once
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix of a power of two, float32."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
