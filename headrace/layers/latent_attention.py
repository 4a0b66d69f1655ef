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
from headrace.kernels.rowwise.reference import latent_write
from headrace.layers.attention.contract import AttentionInputs, AttentionParams, KvPages
from headrace.layers.batch import GroupStep
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.layers.self_attention import AttentionLayer
from headrace.layers.spec import LatentAttentionSpec, LayerSpec, NormSpec
from headrace.parallel.share import Share


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
        self._write = partial(latent_write, interleaved=layer.rope.interleaved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, spec, pages = self.step.batch, self.spec, self.pages
        assert pages is not None, "bind comes first"
        step = batch.groups[self.group]
        # q [T, q_lora_rank or H * (N + E)], latent [T, L], k_rope [T, E]: one rotated key part for all heads
        q, latent, k_rope = self.down(x).split(self.widths, dim=-1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split(
            (spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1
        )
        # before any attention: tokens of one step read each other's rows from the pages
        q_rope = self._write(
            q_rope, self.kv_norm(latent), k_rope, batch.positions, self.rotary.cos_sin, step.inputs.slots, pages.k
        )
        if has_whole_prompts(step.inputs):
            return self.output(self._attend_expanded(torch.cat((q_nope, q_rope), dim=-1), pages, step.inputs))
        return self.output(self._attend_absorbed(q_nope, q_rope, pages, step))

    def _attend_absorbed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, pages: KvPages, step: GroupStep
    ) -> torch.Tensor:
        """``q_nope`` [T, H, N] and ``q_rope`` [T, H, E] to [T, H * V]."""
        spec = self.spec
        # [H, N, L] and [H, V, L]
        to_keys, to_values = self.kv_up.weight.unflatten(0, (self.num_heads, -1)).split(
            (spec.qk_nope_head_dim, spec.v_head_dim), dim=1
        )
        # q.(W c) = (W' q).c: [H, T, N] by [H, N, L]
        q_latent = torch.bmm(q_nope.transpose(0, 1), to_keys).transpose(0, 1)
        rows = self.step.batch.adapters if self.kv_up.lora is not None else None
        if rows is not None:
            self._adapt_keys(rows, q_nope, q_latent)
        mixed = self._attend_latents(torch.cat((q_latent, q_rope), dim=-1), pages, step)
        # [H, T, L] by [H, L, V]
        values = torch.bmm(mixed.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)
        if rows is not None:
            self._adapt_values(rows, mixed, values)
        return values.flatten(1)

    def _attend_latents(self, q: torch.Tensor, pages: KvPages, step: GroupStep) -> torch.Tensor:
        """``q`` [T, H, L + E] to [T, H, L]: the latents, mixed."""
        return step.backend.attend(q, pages, self.params)

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

    def _attend_expanded(self, q: torch.Tensor, pages: KvPages, inputs: AttentionInputs) -> torch.Tensor:
        """``q`` [T, H, N + E] to [T, H * V], over the page rows [T, L + E] that this step has written: these hold the
        normalised latents and rotated keys. Each request attends to its own tokens only."""
        spec, rows = self.spec, pages.k.flatten(0, 2).index_select(0, inputs.slots).to(q.dtype)
        k_nope, v = self.kv_up(rows[:, : spec.kv_lora_rank]).unflatten(-1, (self.num_heads, -1)).split(
            (spec.qk_nope_head_dim, spec.v_head_dim), dim=-1
        )
        k_rope = rows[:, None, spec.kv_lora_rank : spec.kv_lora_rank + spec.qk_rope_head_dim]
        k = torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1)), dim=-1)
        # rows of q, k and v are in step order, so requests are consecutive spans; [query_len, H, N + E] each
        spans = zip(*(t.split(inputs.query_lens_cpu) for t in (q, k, v)), strict=True)
        mixed = [
            F.scaled_dot_product_attention(
                own_q.transpose(0, 1)[None], own_k.transpose(0, 1)[None], own_v.transpose(0, 1)[None], is_causal=True,
                scale=spec.scale,
            )[0].transpose(0, 1)
            for own_q, own_k, own_v in spans
        ]
        return torch.cat(mixed).flatten(1)


def has_whole_prompts(inputs: AttentionInputs) -> bool:
    """Whether every request starts in this step, so that no earlier rows are read; False where only the device knows.
    The host's lengths are those of the device but for decodes, of which there are none then."""
    return not inputs.has_dynamic_lengths and not inputs.num_decodes and inputs.kv_lens_cpu == inputs.query_lens_cpu
