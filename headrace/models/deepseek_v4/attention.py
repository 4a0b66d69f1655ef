"""Attention of DeepSeek-V4: over a sliding window of tokens and over compressed entries. One vector per token or entry
is both key and value, shared by all heads (multi-query).

T tokens, H heads, E head dim, N slots that a token sees, G groups of heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch
from torch import nn

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.coded_linear.forms import CodedWeight, multiply_in_groups
from headrace.kernels.coded_linear.reference import multiply_groups
from headrace.kernels.compressor import FINISH_PROJECTIONS, RowNorm
from headrace.kernels.latents import LatentNorm, LatentRows
from headrace.kernels.sparse_attention import ATTEND_SLOTS, Queries, SeenSlots
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import FloatLinear, Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.layers.rotary import RotaryTable
from headrace.models.deepseek_v4.backends import EntriesBackend, StateBackend, WindowBackend, has_decodes_alone
from headrace.models.deepseek_v4.compressor import Compressor
from headrace.models.deepseek_v4.indexer import Indexer
from headrace.models.deepseek_v4.layout import OVERLAPPING
from headrace.models.deepseek_v4.places import Place, open_slots
from headrace.models.deepseek_v4.spec import DeepseekV4Spec, V4LayerSpec
from headrace.parallel.share import Share


class V4Attention(nn.Module):
    """``x [T, D] -> [T, D]``, of several ranks parts that ``group`` is to add up; ``rows`` may be x in FP8, as ``down``
    takes it. Layers with a compress ratio also attend to compressed entries; those of ratio `OVERLAPPING` only to the
    entries that the indexer selects."""

    def __init__(self, spec: DeepseekV4Spec, layer: V4LayerSpec, rotary: RotaryTable, build: Build):
        super().__init__()
        heads = self.spec = spec.heads
        self.norm_eps, self.rotary, self.ratio = spec.norm_eps, rotary, layer.ratio
        self.down = Linear(build, spec.hidden_size, {"q": heads.q_lora_rank, "kv": heads.head_dim})
        self.q_norm = RmsNorm(build, heads.q_lora_rank, spec.norm_eps)
        self.kv_norm = RmsNorm(build, heads.head_dim, spec.norm_eps)
        # ranks divide whole groups of heads; all cache the same vectors, and select the same entries of them
        groups = heads.share_groups(build.tensor.size, build.tensor.rank)
        own = groups.times(heads.num_heads // heads.num_groups)
        self.num_heads = own.length
        self.q_up = Linear(build, heads.q_lora_rank, own.times(heads.head_dim))
        self.sinks = build.in_float32().parameter(own)  # concatenated with float32 logits
        self.mix = GroupedLinear(
            groups, heads.num_heads * heads.head_dim // heads.num_groups, heads.group_rank, build
        )
        self.output = Linear(build, groups.times(heads.group_rank), spec.hidden_size)
        self.group = self.output.group
        self.window = Place()
        self.compressor: Compressor | None = None
        self.project: FloatLinear | None = None
        self.indexer = Indexer(spec, rotary, build) if layer.ratio == OVERLAPPING else None
        if layer.ratio:
            own_entries = self.compressor = Compressor(
                heads.head_dim, layer.ratio, norm_eps=spec.norm_eps, rotary=rotary, build=build
            )
            # one product for all that is float32 of the layer's input
            parts: dict[str, int | Share] = {"values": own_entries.width, "gates": own_entries.width}
            if self.indexer is not None:
                keys = self.indexer.compressor.width
                parts |= {"index_values": keys, "index_gates": keys, "index_weights": spec.indexer.num_heads}
            self.project = FloatLinear(build, spec.hidden_size, parts)
        # for plain slots, and for packed ones
        queries = [
            build.query(head_dim=heads.head_dim, rotary_dim=rotary.cos_sin.shape[1], packed=packed)
            for packed in range(2)
        ]
        self._finish = [FINISH_PROJECTIONS.choose(query) for query in queries]
        self._attend = [ATTEND_SLOTS.choose(query) for query in queries]

    def places(self) -> Iterator[Place]:
        """This layer's caches, in the order of `spec.places`, by which pages are bound."""
        yield self.window
        for compressor in self.compressors:
            yield compressor.entries
            yield compressor.state

    @property
    def compressors(self) -> list[Compressor]:
        """This layer's: of what is attended to, and of the keys by which it is selected."""
        both = (self.compressor, None if self.indexer is None else self.indexer.compressor)
        return [compressor for compressor in both if compressor is not None]

    def forward(self, x: torch.Tensor, batch: ForwardBatch, rows: Fp8Rows | None = None) -> torch.Tensor:
        heads, cos_sin, is_packed = self.spec, self.rotary.cos_sin, self.window.is_packed
        down = self.down.multiply_rows(x if rows is None else rows, x.dtype)
        latent, kv = down.split((heads.q_lora_rank, heads.head_dim), dim=-1)
        # Everything is written before any read: tokens of one step attend to each other through the pages, and to the
        # window that ends in this step.
        slots, step = self.window.slots, self.window.step(batch)
        backend, compressors = step.backend, self.compressors
        assert isinstance(backend, WindowBackend)
        projected = x if self.project is None else self.project(x)
        ends = list(accumulate(2 * compressor.width for compressor in compressors))
        pools = [
            compressor.describe(projected[:, end - 2 * compressor.width : end], batch)
            for compressor, end in zip(compressors, ends, strict=True)
        ]
        is_fused = all(_has_decodes_alone(compressor, batch) for compressor in compressors)
        latent = self._finish[is_packed](  # [T, q_lora_rank]
            RowNorm(latent, self.q_norm.weight, self.norm_eps, self._find_row_group(len(x))),
            LatentRows(
                kv, LatentNorm(self.kv_norm.weight, self.norm_eps, cos_sin), batch.positions, slots, step.inputs.slots
            ),
            tuple(pools) if is_fused else (),
        )
        if not is_fused:
            for compressor, pool in zip(compressors, pools, strict=True):
                compressor.pool(pool, batch)
        window = SeenSlots(slots, backend.numbers, backend.counts)
        parts: Iterable[tuple[slice, SeenSlots | None]] = [(slice(0, len(x)), None)]
        if self.compressor is not None:
            parts = self._read_entries(self.compressor.entries, latent, projected[:, ends[-1] :], batch)
        q = self.q_up.multiply_rows(latent, x.dtype)
        q = q.unflatten(-1, (self.num_heads, heads.head_dim))  # [T, H, E]
        mixed = [
            self._attend[is_packed](
                Queries(q[tokens], batch.positions[tokens], cos_sin, self.norm_eps), window.take(tokens), entries,
                sinks=self.sinks, scale=heads.scale,
            )
            for tokens, entries in parts
        ]
        return self.output.compute_share(self.mix(mixed[0] if len(mixed) == 1 else torch.cat(mixed)))

    def _find_row_group(self, num_tokens: int) -> int | None:
        """The group of inputs by which queries' latents are rounded to FP8, if all their products take such rows."""
        products = [self.q_up] if self.indexer is None else [self.q_up, self.indexer.q]
        groups = {product.find_row_group(num_tokens) for product in products}
        return groups.pop() if len(groups) == 1 else None

    def _read_entries(
        self, place: Place, latent: torch.Tensor | Fp8Rows, weights: torch.Tensor, batch: ForwardBatch
    ) -> Iterable[tuple[slice, SeenSlots | None]]:
        """Spans of tokens, with the compressed entries that each of them attends to; ``weights`` [T, H] are those of
        index heads. A span is attended to before the next is asked for: it may overwrite what this one reads."""
        backend: EntriesBackend = place.backend(batch)
        hot = None if place.pages.hot is None else backend.open_hot(place.pages.hot)
        chosen = None if self.indexer is None else self.indexer(latent, weights, batch, backend)
        if hot is not None:
            assert place.pages.hot is not None
            return hot.read(place.pages.hot, chosen, open_slots)
        everything, view = slice(0, len(weights)), backend.view
        if chosen is None:
            return [(everything, SeenSlots(place.slots, backend.list_all(), view.visible, view.requests))]
        return [(everything, SeenSlots(place.slots, chosen, view.visible))]


def _has_decodes_alone(compressor: Compressor, batch: ForwardBatch) -> bool:
    """Whether all requests of the step have one token, none of them drafts, which share a request's pages."""
    step = compressor.state.step(batch)
    backend = step.backend
    assert isinstance(backend, StateBackend)
    return has_decodes_alone(step.inputs) and not backend.most_drafts


class GroupedLinear(StorableLayer):
    """``[T, H, E] -> [T, G * O]``: a block-diagonal product, each group of heads with its own matrix. ``weight``
    [G * O, I] with I = H * E / G; on a GPU it may be stored in codes. Of ``groups`` this rank has a share."""

    def __init__(self, groups: Share, in_features: int, out_features: int, build: Build):
        super().__init__()
        self.num_groups, self.is_storable = groups.length, build.device.type == "cuda"
        self.weight = build.parameter(groups.times(out_features), in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.flatten(1).unflatten(1, (self.num_groups, -1))  # [T, G, I]
        weight = plain_weight(self)
        if weight is not None:
            return multiply_groups(grouped, weight)
        assert isinstance(self.stored, CodedWeight)
        return multiply_in_groups(grouped, self.stored)
