"""`IndexedAttention`: latent attention to the tokens that an indexer selects. DeepSeek-V3.2-Exp, 2025, section 2.

T tokens, D hidden size, H heads, L latent dim, E rotated dims, I index dims, k selected tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.latents.slots import Slots
from headrace.kernels.rowwise.reference import rotate
from headrace.kernels.sparse_attention import ATTEND_ROWS, INDEX_SCORES, SELECT_ENTRIES, Queries
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import GroupStep
from headrace.layers.build import Build
from headrace.layers.latent_attention import LatentAttention, has_whole_prompts
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import LayerSpec, NormSpec
from headrace.models.deepseek_v32.backend import RowsBackend
from headrace.models.deepseek_v32.spec import IndexedAttentionSpec

SCORES_AT_ONCE = 2**28
"""Most scores that exist at a time: 1 GiB."""
KEY_NORM_EPS = 1e-6
STILL_DIMS = 16
"""Rotated dims of `INDEX_SCORES`, here by no angle: the indexer rotates other dims, before."""


class IndexedAttention(LatentAttention):
    """``x [T, D] -> [T, D]``. Pages hold rows of L + E + I: as of `LatentAttention`, then the index key. Where rows are
    in host memory, index keys are the values of the pages."""

    uses_backend = False

    def __init__(
        self, spec: IndexedAttentionSpec, layer: LayerSpec, *, hidden_size: int, norm: NormSpec,
        rotary: RotaryTable | None, build: Build
    ):
        super().__init__(spec, layer, hidden_size=hidden_size, norm=norm, rotary=rotary, build=build)
        self.row_dim = spec.row_dim
        self.indexer = TokenIndexer(spec, hidden_size, self.rotary, build) if spec.selects else None
        self._attend_seen = ATTEND_ROWS.choose(build.query(value_dim=spec.kv_lora_rank, row_dim=spec.row_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, pages = self.step.batch, self.pages
        assert pages is not None and self.q_norm is not None and self.q_up is not None, "bind comes first"
        step = batch.groups[self.group]
        q, latent, k_rope = self.down(x).split(self.widths, dim=-1)
        q_latent = self.q_norm(q)
        backend = RowsBackend.of(step)
        if self.indexer is not None:
            backend.selected = self.indexer(x, q_latent, batch.positions, pages, step)
        return self.output(self._attend(
            self.q_up(q_latent).unflatten(-1, (self.num_heads, -1)), (latent, k_rope), pages.k[..., : self.row_dim],
            step, is_expanded=backend.selected is None and has_whole_prompts(step.inputs)
        ))

    def _attend_latents(self, q: torch.Tensor, step: GroupStep) -> torch.Tensor:
        """See `LatentAttention`; to the selected tokens alone."""
        backend, sizes = RowsBackend.of(step), {"value_dim": self.spec.kv_lora_rank, "scale": self.spec.scale}
        pages = self.pages
        assert pages is not None, "bind comes first"
        if pages.hot is None:
            return self._attend_seen(q, backend.find_seen(pages.k.squeeze(2)[..., : self.row_dim]), **sizes)
        parts = backend.open_hot(pages.hot).read(pages.hot, backend.selected, lambda own: Slots(own.k.squeeze(2)))
        mixed = [self._attend_seen(q[tokens], seen, **sizes) for tokens, seen in parts]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


class TokenIndexer(nn.Module):
    """Scores are ``sum over h of w[h] * relu(q[h] . key)``; the first dims of queries and keys are rotated."""

    def __init__(self, spec: IndexedAttentionSpec, hidden_size: int, rotary: RotaryTable, build: Build):
        super().__init__()
        self.spec, self.rotary = spec, rotary
        self.q = Linear(build, spec.q_lora_rank, spec.index_heads * spec.index_head_dim)
        self.key = Linear(build, hidden_size, spec.index_head_dim)
        self.key_norm = LayerNorm(build, spec.index_head_dim, KEY_NORM_EPS)
        self.weights = Linear(build.in_float32(), hidden_size, spec.index_heads, is_storable=False)
        self.still = nn.Buffer(torch.zeros(1, STILL_DIMS, device=build.device), persistent=False)
        self.still[:, : STILL_DIMS // 2] = 1.0
        query = build.query(head_dim=spec.index_head_dim, rotary_dim=STILL_DIMS, packed=0)
        self._score, self._select = INDEX_SCORES.choose(query), SELECT_ENTRIES.choose(query)

    def forward(
        self, x: torch.Tensor, q_latent: torch.Tensor, positions: torch.Tensor, pages: KvPages, step: GroupStep
    ) -> torch.Tensor | None:
        """``x`` [T, D] and query latents to slots of the selected tokens [T, k] int64, padded with -1; None if no
        request has more tokens than are selected. Writes the step's index keys."""
        spec, backend = self.spec, RowsBackend.of(step)
        angles = self.rotary.cos_sin.index_select(0, positions)
        key = self._rotate(self.key_norm(self.key(x)).unsqueeze(1), angles).squeeze(1)
        hot = None if pages.hot is None else backend.open_hot(pages.hot)
        keys = pages.k.squeeze(2)[..., spec.row_dim :] if hot is None else pages.v.squeeze(2)  # [P, page_size, I]
        keys.view(-1, keys.shape[-1]).index_copy_(0, step.inputs.slots, key.to(keys.dtype))
        view, top_k = backend.view, spec.top_k
        numbered = view if hot is None else hot.view
        if view.longest <= top_k:
            return None
        q = self._rotate(self.q(q_latent).unflatten(-1, (spec.index_heads, spec.index_head_dim)), angles)
        queries = Queries(q, torch.zeros_like(positions), self.still, 0.0)
        weights, scale = self.weights(x.float()), (spec.index_heads * spec.index_head_dim) ** -0.5
        chosen, tile = [], max(1, SCORES_AT_ONCE // view.longest)
        for low in range(0, len(x), tile):
            tokens = slice(low, min(low + tile, len(x)))
            scores = self._score(queries, weights, Slots(keys), view, scale=scale, top_k=top_k, tokens=tokens)
            chosen.append(self._select(scores, numbered, top_k=top_k, per_page=backend.page_size, tokens=tokens))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        return rotate(x, angles, spec.qk_rope_head_dim, spec.index_interleaved).to(x.dtype).contiguous()
