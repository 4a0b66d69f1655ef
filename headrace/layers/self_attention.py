"""`Attention`: qkv projection, rotation and page write, attention, output projection.

T tokens, S queries that are kept, D hidden size, H heads, K kv heads, E head dim.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from headrace.kernels.attention.reference import read_codes
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.lora import EXPAND_ROPE_WRITE, precedes_attention
from headrace.kernels.operation import choose_fused
from headrace.kernels.rowwise import ROPE_WRITE, HeadShape
from headrace.layers.attention.contract import AttentionParams, KvPages, MediaBlock
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.norm import HeadNorm, RmsNorm
from headrace.layers.residual import Addition, Branch, Norm, Residual
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import AttentionSpec, LayerSpec, NormSpec
from headrace.parallel.cut import cut_of
from headrace.parallel.group import Group
from headrace.parallel.share import Share, share_kv_heads


class AttentionLayer(Branch):
    """Base of attention layers: number of heads, the layer's constants for the backend, the step context, and the
    layer's pages once bound. ``values_in_keys``: value pages are views into the key pages. ``prunes_queries``: obeys
    ``ForwardBatch.queries``. ``uses_backend``: an attention backend reads its pages; False where its kind of cache has
    a backend of its own.

    Built as ``Class(spec, layer, hidden_size=..., norm=..., rotary=..., build=...)``; ``spec`` names the class."""

    values_in_keys: ClassVar[bool] = False
    prunes_queries: ClassVar[bool] = False
    uses_backend: ClassVar[bool] = True

    def __init__(self, num_heads: int, params: AttentionParams, build: Build):
        super().__init__()
        self.num_heads, self.params, self.step = num_heads, params, build.step
        self.group = -1
        self.pages: KvPages | None = None

    def bind(self, pages: KvPages | None, group: int | None) -> None:
        """Attach this layer's pages and the index of their cache group; None drops the references, so that the pages'
        memory can be freed."""
        self.pages, self.group = pages, -1 if group is None else group


class NormOverRanks:
    """RMS norms of queries and of keys over the heads of all ranks, where each rank has some of them."""

    def __init__(self, q_norm: RmsNorm, k_norm: RmsNorm, kv_heads: Share, group: Group):
        self._norms, self._group = (q_norm, k_norm), group
        self._sizes = [cut_of(norm.weight).full_shape[0] for norm in self._norms]
        # a KV head that several ranks hold counts once
        is_counted = group.rank == 0 or share_kv_heads(kv_heads.size, group.size, group.rank - 1).stop <= kv_heads.start
        self._counts = (1.0, float(is_counted))

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """``qkv`` [T, (H + 2K) * E] with queries and keys normalised; v is left as it is."""
        parts = [part.float() for part in qkv.split([len(n.weight) for n in self._norms] + [self._rest(qkv)], -1)[:2]]
        squares = torch.stack(
            [part.square().sum(-1) * count for part, count in zip(parts, self._counts, strict=True)], dim=-1
        )
        squares = self._group.all_reduce(squares)  # [T, 2] float32
        at = 0
        for part, norm, size, square in zip(parts, self._norms, self._sizes, squares.unbind(-1), strict=True):
            scale = torch.rsqrt(square / size + norm.eps).unsqueeze(-1)
            qkv[:, at : at + part.shape[1]] = (part * scale * (norm.weight.float() + norm.offset)).to(qkv.dtype)
            at += part.shape[1]
        return qkv

    def _rest(self, qkv: torch.Tensor) -> int:
        return qkv.shape[1] - sum(len(norm.weight) for norm in self._norms)


class NormHeads:
    """Layer norms of the heads of queries and of keys."""

    def __init__(self, q_norm: HeadNorm, k_norm: HeadNorm):
        self._norms = (q_norm, k_norm)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """As `NormOverRanks`."""
        at = 0
        for norm in self._norms:
            part = qkv[:, at : at + norm.weight.numel()]
            part.copy_(norm(part))
            at += part.shape[1]
        return qkv


class Attention(AttentionLayer):
    """``x [T, D] -> [T, D]``, or [S, D] for the queries of the batch; reads and writes this layer's pages, which
    ``bind`` gives it before the first step. ``input_size``: last dim of ``x`` where that is not D."""

    prunes_queries = takes_slices = True
    q_norm: RmsNorm | HeadNorm | None
    k_norm: RmsNorm | HeadNorm | None

    def __init__(
        self, spec: AttentionSpec, layer: LayerSpec, *, hidden_size: int, norm: NormSpec, rotary: RotaryTable | None,
        build: Build, input_size: int | None = None
    ):
        heads, kv_heads = build.tensor.share_heads(spec.num_heads, spec.num_kv_heads)
        sinks = build.parameter(heads) if spec.sinks else None
        super().__init__(heads.length, AttentionParams(spec.scale, layer.window, spec.softcap, sinks), build)
        self.spec, self.rope, self.sinks, self.num_kv_heads = spec, layer.rope, sinks, kv_heads.length
        q_size, kv_size = heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        # one product for all three; `ROPE_WRITE` expects them in this order
        parts: dict[str, int | Share] = {"q": q_size, "k": kv_size, "v": kv_size}
        self.qkv = Linear(build, input_size or hidden_size, parts, bias=spec.qkv_bias, is_wide=True)
        self.output = Linear(build, q_size, hidden_size, bias=spec.output_bias)
        self.q_norm, self.k_norm = _make_norms(spec, norm=norm, heads=heads, kv_heads=kv_heads, build=build)
        self._unit_weight: torch.Tensor | None = None
        if spec.qk_norm == "rotated":
            self._unit_weight = torch.full((spec.head_dim,), 1.0 - norm.offset, dtype=build.dtype, device=build.device)
        # what `ROPE_WRITE` cannot do on its way
        self._norm_before: NormOverRanks | NormHeads | None = None
        if isinstance(self.q_norm, HeadNorm) and isinstance(self.k_norm, HeadNorm):
            self._norm_before = NormHeads(self.q_norm, self.k_norm)
        elif spec.qk_norm == "full" and not heads.is_whole:
            assert isinstance(self.q_norm, RmsNorm) and isinstance(self.k_norm, RmsNorm)
            self._norm_before = NormOverRanks(self.q_norm, self.k_norm, kv_heads, build.tensor)
        self.rotary = rotary
        self._norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.q_norm is not None and self.k_norm is not None and self._norm_before is None:
            unit = self._unit_weight
            self._norm_weights = (self.q_norm.weight, self.k_norm.weight) if unit is None else (unit, unit)
        rope = layer.rope
        self._head_shape = HeadShape(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=spec.head_dim,
            rotary_dim=rope.rotary_dim if rope else 0, interleaved=bool(rope and rope.interleaved), norm_eps=norm.eps,
            norm_offset=norm.offset,
        )
        self._rope_write = self._choose_rope_write(build)
        has_adapters = build.adapters is not None
        self._expand_rope_write = choose_fused(EXPAND_ROPE_WRITE, build.query()) if has_adapters else None
        # else there is something between the rotation and attention
        self._may_fuse = build.device.type == "cuda" and self._unit_weight is None and (
            rotary is None or rotary.query_scale is None
        )

    def _choose_rope_write(self, build: Build) -> partial[torch.Tensor]:
        shape, weights = self._head_shape, self._norm_weights
        sizes = {name: shape[name] for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")}
        return partial(
            ROPE_WRITE.choose(build.query(**sizes)), **shape,
            **({} if weights is None else {"q_norm": weights[0], "k_norm": weights[1]}),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self._attend(self.qkv(x)))

    def read(self, norm: Norm, residual: Residual) -> torch.Tensor:
        return self.output(self._attend_after(norm, residual))

    def add(self, norm: Norm, residual: Residual) -> None:
        x = self._attend_after(norm, residual)
        for rows, part in zip(residual.slices, residual.rows_of(x), strict=True):
            self.output.add_to(rows, part)

    def _attend_after(self, norm: Norm, residual: Residual) -> torch.Tensor:
        """Attention output [T, H * E] of the normalised stream. With ``ForwardBatch.queries``, [S, H * E], and the
        residual is pruned to the same rows."""
        adds_later = (
            self._expand_rope_write is not None and self._norm_before is None and len(residual.slices) == 1
            and precedes_attention(len(residual.stream))
        )
        x = self._attend(*self.qkv.read_all(norm, residual, adds_later=adds_later))
        if self.step.batch.queries is not None:
            residual.join()
            residual.keep_rows(self.step.batch.queries)
        return x

    def _attend(self, qkv: torch.Tensor, addition: Addition | None = None) -> torch.Tensor:
        """``addition``: what adapters still add to ``qkv``."""
        batch, pages = self.step.batch, self.pages
        assert pages is not None, "bind comes first"
        if self._norm_before is not None:
            qkv = self._norm_before(qkv)
        step = batch.groups[self.group]
        cos_sin = self.rotary.find(batch) if self.rotary else None
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        rotation = Rotation(positions, cos_sin, step.inputs.slots, self._norm_weights, self._head_shape)
        is_whole = self._may_fuse and batch.queries is None and batch.media is None and pages.hot is None
        if is_whole and addition is None:
            out = step.backend.rotate_and_attend(qkv, rotation, pages, self.params)
            if out is not None:
                return out.flatten(1)
        # Writes K and V of all T tokens, which later steps need, also if only some queries are kept below. May
        # overwrite qkv.
        q = batch.select_queries(self.rotate(qkv, rotation, pages, addition))
        if self._unit_weight is not None:
            q = q * self._rotated_weight()
        if self.rotary is not None and self.rotary.query_scale is not None:
            scale = batch.select_queries(self.rotary.query_scale.index_select(0, batch.positions))
            q = q * scale[:, None, None].to(q.dtype)
        out = step.backend.attend(q, pages, self.params)
        if batch.media is not None and batch.media.blocks:
            for block in batch.media.blocks:
                attend_block(out, q, block, pages, step.inputs.page_table, self.params)
        return out.flatten(1)

    def rotate(
        self, qkv: torch.Tensor, rotation: Rotation, pages: KvPages, addition: Addition | None
    ) -> torch.Tensor:
        """As `ROPE_WRITE`, of ``qkv`` and what adapters still add to it."""
        if addition is not None and self._expand_rope_write is not None:
            bank, begun = addition.bank, addition.begun
            q: torch.Tensor | None = self._expand_rope_write(
                begun.reduced, qkv, rotation, pages.k, pages.v, bank.tensors, begun.rows
            )
            if q is not None:
                return q
            bank.finish(begun, qkv)
        codes = {} if pages.scales is None else {"scales": pages.scales}  # an int8 cache, on CPUs only
        return self._rope_write(
            qkv, rotation.positions, rotation.cos_sin, rotation.slots, pages.k, pages.v, **codes
        )

    def _rotated_weight(self) -> torch.Tensor:
        """[E]: what queries are multiplied by if norms follow the rotation. A rotation keeps the root mean square, so
        dividing by it may come first. As only q.k counts, queries take the keys' weight too, and pages hold keys
        without one."""
        assert self.q_norm is not None and self.k_norm is not None
        of_q, of_k = (norm.weight.float() + norm.offset for norm in (self.q_norm, self.k_norm))
        return (of_q * of_k).to(self.q_norm.weight.dtype)


def _make_norms(
    spec: AttentionSpec, *, norm: NormSpec, heads: Share, kv_heads: Share, build: Build
) -> tuple[RmsNorm, RmsNorm] | tuple[HeadNorm, HeadNorm] | tuple[None, None]:
    """The norms of queries and of keys."""
    if spec.qk_norm == "none":
        return None, None
    if spec.qk_norm == "layer":
        return HeadNorm(build, heads, spec.head_dim, norm.eps), HeadNorm(build, kv_heads, spec.head_dim, norm.eps)
    # over all heads together, else per head with a shared weight [E]
    q_size, k_size = (
        share.times(spec.head_dim) if spec.qk_norm == "full" else spec.head_dim for share in (heads, kv_heads)
    )
    return RmsNorm(build, q_size, norm.eps, norm.offset), RmsNorm(build, k_size, norm.eps, norm.offset)


def attend_block(
    out: torch.Tensor, q: torch.Tensor, block: MediaBlock, pages: KvPages, page_table: torch.Tensor,
    params: AttentionParams
) -> None:
    """Replace rows of ``out`` [T, H, E] by what the block's queries, rows of ``q`` [T, H, E], see: all positions before
    the block's end, with a window the latest before each query and those behind it. ``page_table`` [R, pages] int32.
    Does not wait for the device."""
    assert not params.softcap and params.sinks is None, "no model has images of both directions, and these"
    own = slice(block.first, block.first + block.length)
    start = block.end - block.length  # position of the first query
    page_size = pages.k.shape[1]
    first_page = max(0, start - params.window + 1) // page_size if params.window else 0
    ids = page_table[block.request, first_page : -(-block.end // page_size)].long()
    if pages.scales is not None:
        k, v = (x.to(q.dtype) for x in read_codes((pages.k, pages.v), pages.scales, ids))
    else:
        k, v = (x.index_select(0, ids).flatten(0, 1).to(q.dtype) for x in (pages.k, pages.v))
    low = first_page * page_size
    k, v = (x[: block.end - low].transpose(0, 1) for x in (k, v))  # [K, L, E]
    mask = None
    if params.window:
        at = torch.arange(start, block.end, device=q.device)
        mask = torch.arange(low, block.end, device=q.device) > at[:, None] - params.window
    found = F.scaled_dot_product_attention(
        q[own].transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=params.scale, enable_gqa=True
    )
    out[own] = found[0].transpose(0, 1)
