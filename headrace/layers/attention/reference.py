"""Paged attention in plain torch: any geometry on any device. On a CPU it serves until native kernels are compiled; on
a GPU its ``prepare`` waits for the lengths, as those on the host are bounds only, so it is an oracle for tests there.

Decodes of similar length run as one batch, padded to the longest; prefill runs request by request, in tiles of queries
so that masks stay small. With a window, only the pages it reaches are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.kernels.attention.reference import attend_densely, read_codes
from headrace.layers.attention.contract import (
    AttentionBackend,
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)

TILE_QUERIES = 256


@dataclass(slots=True)
class _DecodeBucket:
    """n decodes of similar length. ``rows``: their indices in the step (a slice if they are all its decodes).
    ``page_ids`` [n * count]; ``mask`` [n, 1, 1, count * page_size] is added to the logits; ``unseen``: indices of the
    masked positions among the gathered ones. Another request may have left NaN there, so they must be zeroed."""

    rows: slice | torch.Tensor
    page_ids: torch.Tensor
    mask: torch.Tensor
    unseen: torch.Tensor


@dataclass(slots=True)
class _Tile:
    """Rows ``queries`` of the step's q against rows ``keys`` of the gathered ones. ``mask`` [queries, keys] is added to
    the logits; None with ``is_causal``."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    is_causal: bool = False


@dataclass(slots=True)
class _Span:
    """One request: the rows of its queries in the step's q, the ids of its pages from the first visible one on, and the
    number of positions written there (``length``)."""

    queries: slice
    page_ids: torch.Tensor
    length: int
    tiles: list[_Tile]


class ReferenceAttention(AttentionBackend):
    """See `AttentionBackend`."""

    is_capturable = False

    def __init__(self, geometry: AttentionGeometry, device: torch.device):
        self.geometry, self.device = geometry, device
        self.dtype = getattr(torch, geometry.dtype)
        # torch's fused attention has neither soft-cap nor sinks: then softmax is written out, request by request
        self._is_written_out = geometry.has_softcap or geometry.has_sinks
        self._buckets: list[_DecodeBucket] = []
        self._spans: list[_Span] = []

    def prepare(self, inputs: AttentionInputs) -> None:
        """Index the pages that each request reads and build masks, once for all layers of the group."""
        # drafts whose acceptance the host does not know yet count in its own lengths
        inputs = replace(inputs, kv_lens_cpu=inputs.kv_lens.tolist())
        num_batched = 0 if self._is_written_out else inputs.num_decodes
        self._buckets = self._make_buckets(inputs, num_batched)
        self._spans, start = [], num_batched
        for request in range(num_batched, inputs.num_requests):
            end = start + inputs.query_lens_cpu[request]
            self._spans.append(self._make_span(inputs, request, slice(start, end), with_tiles=not self._is_written_out))
            start = end

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """``q`` [T, H, E] to [T, H, E_value]."""
        is_written_out = params.softcap > 0 or params.sinks is not None
        assert params.window == self.geometry.window, "a cache group has one window"
        assert not is_written_out or self._is_written_out, "softcap and sinks are declared in the geometry"
        out = torch.empty(q.shape[0], q.shape[1], self.geometry.value_dim, dtype=q.dtype, device=q.device)
        for bucket in self._buckets:
            out[bucket.rows] = self._attend_bucket(q[bucket.rows], bucket, pages, params.scale)
        for span in self._spans:
            # [length, K, E]: the last page's unwritten rows are cut off, as they may hold NaN
            k, v = (t[: span.length].to(q.dtype) for t in self._gather(pages, span.page_ids))
            if self._is_written_out:  # then the span has no tiles
                out[span.queries] = attend_densely(
                    q[span.queries], k, v, scale=params.scale, window=params.window, softcap=params.softcap,
                    sinks=params.sinks
                )
            for tile in span.tiles:
                out[tile.queries] = self._attend_tile(q[tile.queries], k[tile.keys], v[tile.keys], tile, params.scale)
        return out

    def _first_page(self, first_query: int) -> int:
        """The first page seen by a query at that position."""
        window = self.geometry.window
        return max(0, first_query - window + 1) // self.geometry.page_size if window else 0

    def _gather(self, pages: KvPages, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [positions, K, E] of some pages."""
        if pages.scales is not None:
            return read_codes((pages.k, pages.v), pages.scales, page_ids)
        return pages.k.index_select(0, page_ids).flatten(0, 1), pages.v.index_select(0, page_ids).flatten(0, 1)

    def _make_buckets(self, inputs: AttentionInputs, num_decodes: int) -> list[_DecodeBucket]:
        """Group decodes by the bit length of their page count, so that at most half of a bucket is padding."""
        by_size: dict[int, list[int]] = {}
        for row, length in enumerate(inputs.kv_lens_cpu[:num_decodes]):
            num_pages = (length - 1) // self.geometry.page_size + 1 - self._first_page(length - 1)
            by_size.setdefault(num_pages.bit_length(), []).append(row)
        return [self._make_bucket(inputs, rows, is_all=len(rows) == num_decodes) for rows in by_size.values()]

    def _make_bucket(self, inputs: AttentionInputs, rows: list[int], *, is_all: bool) -> _DecodeBucket:
        page_size, window = self.geometry.page_size, self.geometry.window
        indices = slice(0, len(rows)) if is_all else torch.tensor(rows, device=self.device)
        firsts = [self._first_page(inputs.kv_lens_cpu[row] - 1) for row in rows]
        # pages of the longest, after its first visible one; shorter ones gather padding that the mask hides
        count = max(
            (inputs.kv_lens_cpu[row] - 1) // page_size + 1 - first for row, first in zip(rows, firsts, strict=True)
        )
        first = torch.tensor(firsts, device=self.device)[:, None]
        lengths = torch.tensor([inputs.kv_lens_cpu[row] for row in rows], device=self.device)[:, None]
        entries = (first + torch.arange(count, device=self.device)).clamp_(max=inputs.page_table.shape[1] - 1)
        page_ids = inputs.page_table[indices].gather(1, entries).flatten()
        positions = first * page_size + torch.arange(count * page_size, device=self.device)
        unseen = positions >= lengths
        if window:
            unseen |= positions < lengths - window
        mask = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, float("-inf"))
        return _DecodeBucket(indices, page_ids, mask[:, None, None], torch.where(unseen.flatten())[0])

    def _attend_bucket(self, q: torch.Tensor, bucket: _DecodeBucket, pages: KvPages, scale: float) -> torch.Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = self.geometry.num_kv_heads
        # in place on the gathered copies, not on the pages; [n, K, L, E]
        k, v = (
            t.index_fill_(0, bucket.unseen, 0).to(q.dtype).unflatten(0, (num_rows, -1)).transpose(1, 2)
            for t in self._gather(pages, bucket.page_ids)
        )
        # query heads of one kv head take the place of query positions: [n, K, H / K, E] against [n, K, L, E]
        grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, bucket.mask, scale=scale).flatten(1, 2)

    def _make_span(self, inputs: AttentionInputs, request: int, queries: slice, *, with_tiles: bool) -> _Span:
        page_size, kv_len = self.geometry.page_size, inputs.kv_lens_cpu[request]
        begin = kv_len - (queries.stop - queries.start)
        first = self._first_page(begin)
        # pages before the first visible one may have been freed, and given to another request
        page_ids = inputs.page_table[request, first : (kv_len - 1) // page_size + 1]
        offset = first * page_size
        tiles = self._make_tiles(queries, begin - offset, kv_len - offset) if with_tiles else []
        return _Span(queries, page_ids, kv_len - offset, tiles)

    def _make_tiles(self, queries: slice, begin: int, length: int) -> list[_Tile]:
        """``begin`` and ``length`` are relative to the first gathered position."""
        window = self.geometry.window
        # a whole prompt inside the window: torch's causal kernel needs no mask, and no tiles to keep it small
        if begin == 0 and not 0 < window < length:
            return [_Tile(queries, slice(0, length), None, is_causal=True)]
        tiles = []
        for start in range(begin, length, TILE_QUERIES):
            end = min(start + TILE_QUERIES, length)
            low = max(0, start - window + 1) if window else 0
            query_at = torch.arange(start, end, device=self.device)[:, None]
            key_at = torch.arange(low, end, device=self.device)
            unseen = key_at > query_at
            if window:
                unseen |= key_at <= query_at - window
            mask = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, float("-inf"))
            shift = queries.start - begin  # from positions to rows of the step's q
            tiles.append(_Tile(slice(start + shift, end + shift), slice(low, end), mask))
        return tiles

    def _attend_tile(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: _Tile, scale: float
    ) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, tile.mask, is_causal=tile.is_causal, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
