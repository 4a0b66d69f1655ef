"""`LatentAttention` (MLA): the cache has one latent vector per token, from which all heads' keys and values are made.

Decodes, and chunks after a cached prefix, absorb the up-projections into query and output: attention runs over the
latents themselves, as multi-query attention with one kv head. A step of whole prompts expands keys and values instead:
per head these are several times narrower than a latent. DeepSeek-V2, arXiv:2405.04434, section 2.1.

T tokens, D hidden size, H heads, N nope and E rope dims of a head, L latent dim (``kv_lora_rank``), V value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from headrace.kernels.lora import SlotRows
from headrace.kernels.rowwise import LATENT_WRITE
from headrace.layers.attention.contract import AttentionInputs, AttentionParams
from headrace.layers.batch import GroupStep
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.layers.self_attention import AttentionLayer
from headrace.layers.spec import LatentAttentionSpec, LayerSpec, NormSpec
from headrace.parallel.share import Share

MOST_FLASH_DIM = 256
"""The largest head that flash attention has kernels for."""


class LatentAttention(AttentionLayer):
    """``x [T, D] -> [T, D]``. Pages hold rows of L + E: the normalised latent, which is the value, then the rotated
    part of the key."""

    values_in_keys = True

    def __init__(
        self, spec: LatentAttentionSpec, layer: LayerSpec, *, hidden_size: int, norm: NormSpec,
        rotary: RotaryTable | None, build: Build
    ):
        heads, _ = build.tensor.share_heads(spec.num_heads, 1)  # all ranks cache the latent, which all heads read
        super().__init__(heads.length, AttentionParams(spec.scale, layer.window), build)
        assert layer.rope is not None and rotary is not None, "latent attention rotates a part of each head"
        self.spec, self.rotary = spec, rotary
        heads_width = heads.times(spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        q_width = Share.whole(spec.q_lora_rank) if spec.q_lora_rank else heads_width
        self.widths = (q_width.length, spec.kv_lora_rank, spec.qk_rope_head_dim)
        self.down = Linear(build, hidden_size, {"q": q_width, "kv": spec.kv_lora_rank + spec.qk_rope_head_dim})
        self.q_norm = RmsNorm(build, spec.q_lora_rank, spec.norm_eps) if spec.q_lora_rank else None
        self.q_up = Linear(build, spec.q_lora_rank, heads_width) if spec.q_lora_rank else None
        self.kv_norm = RmsNorm(build, spec.kv_lora_rank, spec.norm_eps)
        # not storable: `_attend_absorbed` reads the plain weight; what it does not compute, adapters may not have
        self.kv_up = Linear(
            build, spec.kv_lora_rank, heads.times(spec.qk_nope_head_dim + spec.v_head_dim), is_storable=False
        )
        if self.kv_up.lora is not None:
            self.kv_up.lora.is_capturable = False  # `_find_additions` needs to know rows on the host
        self.output = Linear(build, heads.times(spec.v_head_dim), hidden_size)
        self._latent_write = partial(LATENT_WRITE.choose(build.query()), interleaved=layer.rope.interleaved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, pages = self.step.batch, self.pages
        assert pages is not None, "bind comes first"
        step = batch.groups[self.group]
        # q [T, q_lora_rank or H * (N + E)], latent [T, L], k_rope [T, E]: one rotated key part for all heads
        q, latent, k_rope = self.down(x).split(self.widths, dim=-1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        return self.output(self._attend(
            q.unflatten(-1, (self.num_heads, -1)), (latent, k_rope), pages.k, step,
            is_expanded=has_whole_prompts(step.inputs)
        ))

    def _attend(
        self, q: torch.Tensor, key: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, step: GroupStep, *,
        is_expanded: bool
    ) -> torch.Tensor:
        """``q`` [T, H, N + E], which is overwritten, to [T, H * V]. Writes ``key``, the latents [T, L] and the rotated
        part [T, E], to the page rows before any attention: tokens of one step read each other's."""
        spec, batch = self.spec, self.step.batch
        q_nope, q_rope = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
        q_rows = q if is_expanded else q.new_empty(len(q), self.num_heads, spec.kv_lora_rank + spec.qk_rope_head_dim)
        self._latent_write(
            (q_rope, *key), (batch.positions, self.rotary.cos_sin, step.inputs.slots), rows,
            q_rows[..., -spec.qk_rope_head_dim :], norm_weight=self.kv_norm.weight, norm_eps=spec.norm_eps
        )
        if is_expanded:
            return self._attend_expanded(q, rows, step.inputs)
        return self._attend_absorbed(q_nope, q_rows, step)

    def _attend_absorbed(self, q_nope: torch.Tensor, q: torch.Tensor, step: GroupStep) -> torch.Tensor:
        """``q_nope`` [T, H, N], and ``q`` [T, H, L + E] whose last E are the rotated ones and whose others are filled
        here, to [T, H * V]."""
        spec, (num_tokens, num_heads) = self.spec, q.shape[:2]
        # [H, N, L] and [H, V, L]
        to_keys, to_values = self.kv_up.weight.unflatten(0, (num_heads, -1)).split(
            (spec.qk_nope_head_dim, spec.v_head_dim), dim=1
        )
        # q.(W c) = (W' q).c: [H, T, N] by [H, N, L], into place
        q_latent = q[..., : spec.kv_lora_rank]
        torch.bmm(q_nope.transpose(0, 1), to_keys, out=q_latent.transpose(0, 1))
        rows = self.step.batch.adapters if self.kv_up.lora is not None else None
        if rows is not None:
            self._adapt_keys(rows, q_nope, q_latent)
        mixed = self._attend_latents(q, step)
        # [H, T, L] by [H, L, V]
        values = q.new_empty(num_tokens, num_heads, spec.v_head_dim)
        torch.bmm(mixed.transpose(0, 1), to_values.transpose(1, 2), out=values.transpose(0, 1))
        if rows is not None:
            self._adapt_values(rows, mixed, values)
        return values.flatten(1)

    def _attend_latents(self, q: torch.Tensor, step: GroupStep) -> torch.Tensor:
        """``q`` [T, H, L + E] to [T, H, L]: the latents, mixed."""
        assert self.pages is not None, "bind comes first"
        return step.backend.attend(q, self.pages, self.params)

    def _adapt_keys(self, rows: SlotRows, q_nope: torch.Tensor, q_latent: torch.Tensor) -> None:
        """Add to ``q_latent`` [T, H, L] what adapters change in the up-projection to keys; [n, H, N] by [r, H, N], then
        [n, H, r] by [r, L]."""
        dim = self.spec.qk_nope_head_dim
        for own, a, b in self._find_additions(rows):
            reduced = torch.einsum("nhd,rhd->nhr", q_nope.index_select(0, own).float(), b[..., :dim])
            q_latent.index_add_(0, own, (reduced @ a).to(q_latent.dtype))

    def _adapt_values(self, rows: SlotRows, mixed: torch.Tensor, values: torch.Tensor) -> None:
        """The same in ``values`` [T, H, V], from ``mixed`` latents [T, H, L]."""
        for own, a, b in self._find_additions(rows):
            reduced = mixed.index_select(0, own).float() @ a.t()
            added = torch.einsum("nhr,rhd->nhd", reduced, b[..., self.spec.qk_nope_head_dim :])
            values.index_add_(0, own, added.to(values.dtype))

    def _find_additions(self, rows: SlotRows) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each adapter that changes the up-projection its rows [n], ``a`` [r, L] and ``b`` [r, H, N + V]."""
        assert self.kv_up.lora is not None
        bank = self.kv_up.lora.tensors
        for slot, first, count in rows.segments:
            rank = int(bank.ranks[slot, 0])
            if rank:
                a, b = bank.factors(slot)
                by_head = b[:rank].float().unflatten(1, (self.num_heads, -1))
                yield rows.order[first : first + count], a[0, :rank].float(), by_head

    def _attend_expanded(self, q: torch.Tensor, rows: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``q`` [T, H, N + E] to [T, H * V], over the page rows [P, page_size, 1, L + E] that this step has written:
        these hold the normalised latents and rotated keys. Each request attends to its own tokens only."""
        spec, own = self.spec, rows.flatten(0, 2).index_select(0, inputs.slots).to(q.dtype)
        k_nope, v = self.kv_up(own[:, : spec.kv_lora_rank]).unflatten(-1, (self.num_heads, -1)).split(
            (spec.qk_nope_head_dim, spec.v_head_dim), dim=-1
        )
        k_rope = own[:, None, spec.kv_lora_rank :]
        k = torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1)), dim=-1)
        return attend_spans(q, k, v, inputs.query_start, inputs.query_lens_cpu, scale=spec.scale).flatten(1)


def has_whole_prompts(inputs: AttentionInputs) -> bool:
    """Whether every request starts in this step, so that no earlier rows are read; False where only the device knows.
    The host's lengths are those of the device but for decodes, of which there are none then."""
    return not inputs.has_dynamic_lengths and not inputs.num_decodes and inputs.kv_lens_cpu == inputs.query_lens_cpu


def attend_spans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: list[int], *, scale: float
) -> torch.Tensor:
    """``q`` and ``k`` [T, H, E] and ``v`` [T, H, V], their last dims contiguous, to [T, H, V]. Each token attends to
    those of its own span up to itself. Spans are consecutive; ``lengths`` are on the host, their prefix sum ``starts``
    [spans + 1] int32 on the device."""
    dim, value_dim = q.shape[-1], v.shape[-1]
    if q.is_cuda and q.element_size() == 2 and value_dim <= dim <= MOST_FLASH_DIM and dim % 8 == 0:
        from torch.nn.attention.varlen import varlen_attn  # takes a while, and is for GPUs only

        longest = max(lengths)
        # flash attention has one dim for keys and values: zeros behind values cost less than kernels that have two
        out = varlen_attn(
            q, k, F.pad(v, (0, dim - value_dim)), starts, starts, longest, longest, scale=scale, window_size=(-1, 0)
        )
        assert isinstance(out, torch.Tensor)
        return out[..., :value_dim]
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    for own in zip(*(t.split(lengths) for t in (q, k, v, out)), strict=True):
        own_q, own_k, own_v, own_out = (t.transpose(0, 1)[None] for t in own)  # [1, H, length, E]
        own_out.copy_(F.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True, scale=scale))
    return out
