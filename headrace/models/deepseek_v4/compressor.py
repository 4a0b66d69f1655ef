"""`Compressor`: pools each window of r tokens into one cache entry, a softmax-weighted sum per channel, in float32, by
`headrace.kernels.compressor`. T tokens, W projected dims, E dims of an entry: W = 2E where windows overlap (r = 4).
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.compressor import COMPRESS, STORE_STATE, EntryPages, Pool, Pooling, StatePages
from headrace.kernels.latents import LatentNorm
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.models.deepseek_v4.backends import StateBackend
from headrace.models.deepseek_v4.layout import BLOCK, OVERLAPPING
from headrace.models.deepseek_v4.places import Place


class Compressor(nn.Module):
    """Writes finished entries to the pages of ``entries``, and to the pages of ``state`` the projections of tokens that
    a later step's window still needs."""

    def __init__(self, dim: int, ratio: int, *, norm_eps: float, rotary: RotaryTable, build: Build):
        super().__init__()
        self.ratio, self.rotary = ratio, rotary
        self.width = 2 * dim if ratio == OVERLAPPING else dim
        build = build.in_float32()
        self.ape = build.parameter(ratio, self.width)  # added to gate logits by a token's place in its window
        self.norm = RmsNorm(build, dim, norm_eps)
        self.entries, self.state = Place(), Place()
        self._store = STORE_STATE.choose(build.query())
        # plain slots, packed slots
        self._compress = [
            COMPRESS.choose(build.query(head_dim=dim, rotary_dim=rotary.cos_sin.shape[1], packed=packed))
            for packed in range(2)
        ]

    def describe(self, projected: torch.Tensor, batch: ForwardBatch) -> Pool:
        """What is to be done with ``projected`` [T, 2W], values and gates of a layer's normalised input."""
        backend: StateBackend = self.state.backend(batch)
        pages = self.state.pages
        return Pool(
            projected, backend.windows,
            StatePages(pages.k, pages.v, self.state.step(batch).inputs.page_table, BLOCK, backend.spec.window),
            backend.rows, Pooling(self.ratio, self.ape),
            LatentNorm(self.norm.weight, self.norm.eps, self.rotary.cos_sin),
            EntryPages(self.entries.slots, self.entries.step(batch).inputs.page_table),
        )

    def pool(self, pool: Pool, batch: ForwardBatch) -> None:
        """Store the state and write the entries of any step."""
        backend: StateBackend = self.state.backend(batch)
        (before, rows), (behind, later) = backend.stores
        self._store(pool.projected[before], pool.state, rows)
        self._compress[self.entries.is_packed](
            pool.projected, pool.windows, pool.state, pool.pooling, pool.norm, pool.entries
        )
        self._store(pool.projected[behind], pool.state, later)
