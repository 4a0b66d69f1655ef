"""`Decoder`: a decoder-only transformer from a `DecoderSpec`, fulfilling the contract of a served model.

Knows no families: a family provides its spec and its checkpoint names. T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.kernels.decoder_layers.table import FusedDecode, LayerTable
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import Features, ForwardBatch
from headrace.layers.build import Build
from headrace.layers.cache_scales import CacheScales
from headrace.layers.decoder.block import make_block
from headrace.layers.decoder.fused import fuse_layers, fuse_step, run_layers
from headrace.layers.linear import Linear
from headrace.layers.loading import Targets, fill_targets, find_targets
from headrace.layers.lora.contract import AdapterSites
from headrace.layers.lora.sites import find_sites
from headrace.layers.model import ServedModel, number_layers
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.moe.narrowing import ExpertNarrowing
from headrace.layers.names import SCORE_NAMES, CheckpointNames, add_prefix, find_elsewhere, prefix_one
from headrace.layers.narrowing import Narrowing
from headrace.layers.norm import NoNorm, make_norm
from headrace.layers.residual import Residual
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import DecoderSpec, RopeSpec, SelectingAttention
from headrace.layers.vocabulary import Embedding, Head
from headrace.parallel.limits import slice_rows

HARMLESS: tuple[str, ...] = ("rotary_emb.inv_freq",)
"""Name endings of tensors that old checkpoints have and no model needs."""


def _check_begin(spec: DecoderSpec, start: int) -> None:
    if start not in spec.stage_begins:
        earlier = max(i for i in spec.stage_begins if i < start)
        raise ConfigError(
            f"a pipeline stage begins with layer {start}, which needs what an earlier layer selects; set "
            f"pipeline_layers so that it begins with layer {earlier}, or with another that selects by itself",
            param="pipeline_layers",
        )


def _rename_one(names: CheckpointNames, is_bare: bool, name: str) -> str:
    return names.rename_one(prefix_one(name) if is_bare else name)


class Decoder(ServedModel):
    """The model class of all families whose decoder a `DecoderSpec` describes; see `ServedModel` for the order of
    calls. Raises `ConfigError` for a stage that cannot begin where it does."""

    captures_features = supports_stages = True

    def __init__(self, spec: DecoderSpec, names: CheckpointNames, build: Build):
        super().__init__()
        self.spec, self.names, self.step, self.stage = spec, names, build.step, build.stage
        self._rename_one = partial(_rename_one, names, spec.num_classes == 0)  # no method: adapters keep it
        self.carried_width = spec.hidden_size
        self._schemes, self._keeps_blocks = build.schemes, build.keeps_blocks
        self._scales_cache, self._tensor = build.scales_cache, build.tensor
        vocabulary, own = spec.vocabulary, build.stage.layers(spec.num_layers)
        _check_begin(spec, own.start)
        # one table per distinct rope spec, shared by its layers
        tables: dict[RopeSpec, RotaryTable] = {
            rope: RotaryTable(rope, length=build.max_model_len or spec.max_model_len, device=build.device)
            for rope in dict.fromkeys(spec.layers[i].rope for i in own) if rope is not None
        }
        self.embedding: Embedding | None = None
        has_head = build.stage.is_last and spec.num_classes is None
        if build.stage.is_first or (has_head and vocabulary.tied):
            self.embedding = Embedding(build, vocabulary.size, spec.hidden_size, vocabulary.embedding_scale)
        self._blocks = [
            make_block(spec, layer, tables[layer.rope] if layer.rope else None, build)
            for layer in (spec.layers[i] for i in own)
        ]
        self.layers = number_layers(self._blocks, own.start)
        self.layer_kinds = [spec.layers[i] for i in own]
        self.norm = make_norm(spec.norm, spec.hidden_size, build) if build.stage.is_last else NoNorm()
        self.head: Head | None = None
        if has_head:
            tied = self.embedding.weight if self.embedding is not None and vocabulary.tied else None
            self.head = Head(
                build, vocabulary.size, spec.hidden_size, weight=tied,
                divisor=vocabulary.logits_divisor, softcap=vocabulary.softcap, bias=vocabulary.head_bias,
            )
        elif build.stage.is_last and spec.num_classes:  # 0: a bare decoder, for embeddings
            self.scores = Head(build, spec.num_classes, spec.hidden_size, is_shared=False)
        self._elsewhere = self._find_elsewhere()
        self._mixtures = [block.mlp for block in self._blocks if isinstance(block.mlp, MoeMlp)]
        self._banks = [layer.lora for block in self._blocks for layer in block.modules() if isinstance(layer, Linear)]
        self._takes_slices = all(block.takes_slices for block in self._blocks)
        self.is_capturable = all(mixture.is_capturable for mixture in self._mixtures)
        self._table: LayerTable | None = None
        self._segments: dict[tuple[int, ...], list[LayerTable]] = {}
        self._decodes: FusedDecode | None = None
        self._is_table_due = True

    def _find_elsewhere(self) -> tuple[str, ...]:
        stage, parts = self.stage, (("embedding", self.embedding), ("head", self.head), ("scores", self.scores))
        absent = set() if stage.is_whole else {name for name, part in parts if part is None}
        if stage.is_last:
            absent -= {"head", "scores"}  # nowhere, then
        else:
            absent.add("norm")
        count = self.spec.num_layers
        return find_elsewhere({**self.names.modules, **SCORE_NAMES}, stage.layers(count), count, absent)

    def wants(self, name: str) -> bool:
        """See `ServedModel`."""
        return not f"{self._rename_one(name)}.".startswith(self._elsewhere)

    @staticmethod
    def host_caches(spec: Any, specs: list[CacheSpec | None], hot_slots: int) -> list[CacheSpec | None]:
        """See `ServedModel`; of layers whose attention is a `SelectingAttention`."""
        kinds = [layer.attention or spec.attention for layer in spec.layers]
        return [
            kind.host_cache(place, hot_slots) if place is not None and isinstance(kind, SelectingAttention) else place
            for kind, place in zip(kinds, specs, strict=True)
        ]

    def own_caches(self, count: int) -> range:
        """See `ServedModel`."""
        return self.stage.layers(count)

    def _find_targets(self) -> tuple[Targets, tuple[str, ...]]:
        """What checkpoint tensors fill, and endings of names that may be there without."""
        modules, harmless = {**self.names.modules, **SCORE_NAMES}, HARMLESS
        # A tied head has no weight of its own, but some checkpoints store a copy: not an error.
        if self.spec.vocabulary.tied or self.head is None:
            heads = [theirs for theirs, ours in modules.items() if ours == "head"]
            modules = {theirs: ours for theirs, ours in modules.items() if ours != "head"}
            harmless = (*harmless, *(f"{theirs}.weight" for theirs in heads))
            if self.head is None:
                harmless = (*harmless, *(f"{theirs}.bias" for theirs in heads))
            else:
                modules |= {f"{theirs}.bias": "head.bias" for theirs in heads}
        return find_targets(self, modules), harmless

    def find_narrowing(self) -> Narrowing | None:
        """See `ServedModel`."""
        targets, _ = self._find_targets()
        if not targets.cuts and not targets.elsewhere:
            return None
        return ExpertNarrowing(
            targets.cuts, targets.elsewhere, self._rename_one, stacked_experts=self.names.stacked_experts,
            hidden_size=self.spec.hidden_size,
        )

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from ``(checkpoint name, tensor)`` pairs; raises `WeightError`."""
        names = self.names
        if self.spec.num_classes == 0:
            tensors = add_prefix(tensors)
        # schemes see, and name in errors, the checkpoint's own names: they run before renaming
        scales, wanted = CacheScales(), names.leave_out(tensors, self.spec.num_layers)
        plain = names.rename(self._schemes.read(scales.take(wanted) if self._scales_cache else wanted))
        apart = unstack_experts(
            plain, names.stacked_experts, self.spec.hidden_size, keeps_blocks=self._keeps_blocks
        )
        targets, harmless = self._find_targets()
        fill_targets(targets, self._fit_tensors(apart, targets), harmless=harmless)
        own = self.stage.layers(self.spec.num_layers)
        scales.apply({i: block.attention for i, block in zip(own, self._blocks, strict=True)})
        self._is_table_due = True

    def _fit_tensors(
        self, tensors: Iterable[tuple[str, torch.Tensor]], targets: Targets
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Checkpoint tensors in the shapes of their targets, for layers that keep them in others."""
        return tensors

    def find_adapter_sites(self) -> AdapterSites:
        """See `ServedModel`."""
        names = self.names
        return AdapterSites(
            find_sites(self, {**names.modules, **SCORE_NAMES}, self.spec.num_layers), self._rename_one,
            names.stacked_experts, self.spec.hidden_size, self.spec.vocabulary.tied, names.ignored,
        )

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """Attach each layer's pages and cache group. Drops the fused table, which holds references to the old pages."""
        own = self.stage.layers(self.spec.num_layers)
        for layer, i in zip(self._blocks, own, strict=True):
            layer_pages, group = pages[i], group_of_layer[i]
            layer.attention.bind(layer_pages, group)
        self._table, self._decodes, self._is_table_due = None, None, True  # the table keeps the pages alive
        self._segments = {}

    def notice_stored(self) -> None:
        """See `StorableModel`."""
        self._is_table_due = True

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `ServedModel`."""
        if batch.features is not None:
            return self._forward_with_features(batch, batch.features)
        self.step.batch = batch
        x = self._enter(batch)
        return self.norm.add_all(self._run_together(x, batch) or self._run_layers(x, batch))

    def _enter(self, batch: ForwardBatch) -> torch.Tensor:
        """What enters the first layer here [T, D]; layers overwrite it."""
        if batch.carried is not None:
            return batch.carried.clone()  # a captured graph's padding would grow from replay to replay
        assert self.embedding is not None
        return self.embedding(batch.token_ids)

    def _forward_with_features(self, batch: ForwardBatch, features: Features) -> torch.Tensor:
        wanted = batch.wanted
        if wanted is not None and features.spec.needs_last_layer(len(self._blocks)):
            batch = replace(batch, wanted=None)
        self.step.batch = batch
        x = self._enter(batch)
        features.begin(x)
        residual = self._run_segments(x, batch, features) or self._run_layers(x, batch)
        features.take(len(self._blocks), residual)
        hidden = self.norm.add(residual)
        features.take_final(hidden)
        return hidden if wanted is None or batch.wanted is wanted else hidden.index_select(0, wanted.indices)

    def _run_together(self, x: torch.Tensor, batch: ForwardBatch) -> Residual | None:
        """All layers in one native CPU call. None, with ``x`` unchanged, where the layers or the step do not allow it.
        """
        table = None if self._has_adapter_extras(batch) else self._find_table()
        return None if table is None else run_layers(table, x, batch)

    def _has_adapter_extras(self, batch: ForwardBatch) -> bool:
        """Whether adapters do more in layers than the native call adds."""
        return batch.adapters is not None and not all(bank is None or bank.is_low_rank for bank in self._banks)

    def _run_segments(self, x: torch.Tensor, batch: ForwardBatch, features: Features) -> Residual | None:
        """As `_run_together`, in a call for the layers between two whose inputs are read."""
        if batch.adapters is not None or self._find_table() is None:
            return None
        num_layers = len(self._blocks)
        bounds = sorted({0, num_layers, *features.spec.layers})
        tables = self._segments.get(features.spec.layers)
        if tables is None:
            made = [fuse_layers(self._blocks[start:stop]) for start, stop in pairwise(bounds)]
            tables = self._segments[features.spec.layers] = [table for table in made if table is not None]
        residual = Residual(x)
        for (start, stop), table in zip(pairwise(bounds), tables, strict=True):
            features.take(start, residual)
            part = batch if stop == num_layers else replace(batch, wanted=None)
            after = run_layers(table, residual.add_pending(), part)
            if after is None:
                assert not start, "what stands in the way of one segment does so of all"
                return None
            residual = after
        return residual

    def fuse_decode(self) -> FusedDecode | None:
        """See `ServedModel`. Every attention backend must say ``fuses_layers`` for the step to be run by it."""
        self._find_table()
        return self._decodes

    def _find_table(self) -> LayerTable | None:
        # Made lazily: weights may be packed on another thread while requests run, which sets the flag again.
        if self._is_table_due:
            self._is_table_due = False  # before the table is made: another thread may set it again meanwhile
            self._table, self._segments, self._decodes = fuse_layers(self._blocks), {}, None
            if self._table is not None and self.stage.is_whole:
                self._decodes = fuse_step(self._table, self)
        return self._table

    def _run_layers(self, x: torch.Tensor, batch: ForwardBatch) -> Residual:
        residual, features = Residual(x), batch.features
        # what is not a matter of a row alone takes all of them
        is_by_row = self._takes_slices and features is None and batch.adapters is None and batch.media is None
        if is_by_row and self._tensor.can_slice:
            residual.split(slice_rows(len(x), x.shape[1] * x.element_size()))
        *others, last = self._blocks
        for i, layer in enumerate(others):
            if features is not None:
                features.take(i, residual)
            layer(residual)
            self._after_layer(self.stage.start + i, residual, batch)
        if features is not None:
            features.take(len(others), residual)
        # prepares the last layer's backend again, so only once all layers before it have attended
        self.step.batch = batch.for_last_layer(last.attention.group)
        last(residual)
        if not self.stage.is_last:
            self._after_layer(self.stage.start + len(others), residual, batch)
        return residual

    def _after_layer(self, i: int, residual: Residual, batch: ForwardBatch) -> None:
        """Called behind every layer ``i`` of the model but its last where layers run one after the other."""

    @property
    def vocabulary(self) -> tuple[Embedding, Head] | None:
        """See `ServedModel`."""
        return None if self.head is None or self.embedding is None else (self.embedding, self.head)

    @property
    def divided_head(self) -> Head | None:
        """See `ServedModel`."""
        return None if self.head is None or self.head.group.is_single else self.head

    @property
    def prunes_last_layer(self) -> bool:
        """See `ServedModel`."""
        return self.stage.is_last and self._blocks[-1].attention.prunes_queries

    def take_part(self, replica_tokens: list[int]) -> None:
        """See `ServedModel`."""
        nothing = torch.empty(0, dtype=torch.int64)
        self.step.batch = ForwardBatch(nothing, nothing, [], replica_tokens=replica_tokens)
        for mixture in self._mixtures:
            mixture.take_part()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] to logits [S, V] float32."""
        assert self.head is not None, "a classifier or a bare decoder has no logits"
        return self.head(hidden)
