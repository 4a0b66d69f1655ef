"""`Indexer`: selects the compressed entries that each token attends to, as in DeepSeek sparse attention. T tokens, H
index heads, E index dims, N entries, k selected entries."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.sparse_attention import INDEX_SCORES, SELECT_ENTRIES, Queries
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.rotary import RotaryTable
from headrace.models.deepseek_v4.backends import EntriesBackend
from headrace.models.deepseek_v4.compressor import Compressor
from headrace.models.deepseek_v4.layout import OVERLAPPING
from headrace.models.deepseek_v4.spec import DeepseekV4Spec


class Indexer(nn.Module):
    """Scores are ``sum over h of w[h] * relu(q[h] . key)``; a key is an entry of the indexer's own compressor."""

    def __init__(self, spec: DeepseekV4Spec, rotary: RotaryTable, build: Build):
        super().__init__()
        self.spec, self.rotary, self._dtype = spec.indexer, rotary, build.dtype
        self.q = Linear(build, spec.heads.q_lora_rank, self.spec.num_heads * self.spec.head_dim)
        self.compressor = Compressor(
            self.spec.head_dim, OVERLAPPING, norm_eps=spec.norm_eps, rotary=rotary, build=build
        )
        shape = {"head_dim": self.spec.head_dim, "rotary_dim": rotary.cos_sin.shape[1]}
        self._score = [INDEX_SCORES.choose(build.query(**shape, packed=packed)) for packed in range(2)]
        self._select = SELECT_ENTRIES.choose(build.query())

    def forward(
        self, latent: torch.Tensor | Fp8Rows, weights: torch.Tensor, batch: ForwardBatch, entries: EntriesBackend
    ) -> torch.Tensor | None:
        """The query latents [T, L] and the heads' ``weights`` [T, H], which may be strided, to slots of the selected
        ``entries``, [T, k] int64, padded with -1; None if no request has more entries than are selected. The step's
        index keys have been written."""
        # The indexer's keys and the entries are different cache groups with their own page tables: entry numbers within
        # a request are the same in both, slots are not.
        place = self.compressor.entries
        own: EntriesBackend = place.backend(batch)
        longest, top_k = own.view.longest, self.spec.top_k
        if longest <= top_k:
            return None
        q = self.q.multiply_rows(latent, self._dtype)
        q = q.unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        queries = Queries(q, batch.positions, self.rotary.cos_sin, 0.0)
        scale = (self.spec.head_dim * self.spec.num_heads) ** -0.5
        chosen, tile = [], max(1, own.scores_at_once // longest)
        for low in range(0, len(q), tile):
            tokens = slice(low, min(low + tile, len(q)))
            scores = self._score[place.is_packed](
                queries, weights, place.slots, own.view, scale=scale, top_k=top_k, tokens=tokens
            )
            chosen.append(
                self._select(scores, entries.view, top_k=top_k, per_page=entries.per_page, tokens=tokens)
            )
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)
