"""`DeepseekV4Model`: the served model. T tokens, S streams, D hidden size, V vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from headrace.base.errors import WeightError
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.model import ServedModel, number_layers
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.moe.narrowing import ExpertNarrowing
from headrace.layers.names import CheckpointNames, find_elsewhere
from headrace.layers.narrowing import Narrowing
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.layers.vocabulary import Embedding, Head
from headrace.models.deepseek_v4.attention import V4Attention
from headrace.models.deepseek_v4.experts import HashRouter, V4Moe
from headrace.models.deepseek_v4.hyper_connections import HyperConnection, StreamHead, Streams
from headrace.models.deepseek_v4.naming import DRAFT, EXPERTS, HASH_TABLE, MATRICES, is_of_other_expert, rename
from headrace.models.deepseek_v4.spec import DeepseekV4Spec, V4LayerSpec, host_caches, narrow_keys, places, widen_caches

logger = logging.getLogger(__name__)


class V4Block(nn.Module):
    """One layer: attention, then experts; each reads its input from the streams and writes its output back."""

    def __init__(self, spec: DeepseekV4Spec, layer: V4LayerSpec, rotary: RotaryTable, build: Build):
        super().__init__()
        self.attention_mix, self.mlp_mix = (
            HyperConnection(spec.hyper, spec.hidden_size, spec.norm_eps, build) for _ in range(2)
        )
        self.attention_norm, self.mlp_norm = (RmsNorm(build, spec.hidden_size, spec.norm_eps) for _ in range(2))
        self.attention = V4Attention(spec, layer, rotary, build)
        self.mlp = V4Moe(spec, layer, build)

    def forward(self, streams: Streams, batch: ForwardBatch) -> None:
        """Leaves the MLP's output pending in ``streams``."""
        num_tokens = len(streams.own)
        group = self.attention.down.find_row_group(num_tokens)
        x, rows = self.attention_mix.read(streams, self.attention_norm, group)
        streams.out = self.attention(x, batch, rows)
        streams.group = self.attention.group
        group = self.mlp.shared.gate_up.find_row_group(num_tokens)
        x, rows = self.mlp_mix.read(streams, self.mlp_norm, group)
        streams.out, streams.more = self.mlp(x, batch.token_ids, rows)
        streams.group = self.mlp.group


class Collapse(nn.Module):
    """What comes behind the layers: ``streams [T, S, D] -> [T, D]``."""

    def __init__(self, spec: DeepseekV4Spec, build: Build):
        super().__init__()
        self.collapse = StreamHead(spec.hyper, spec.hidden_size, spec.norm_eps, build)
        self.norm = RmsNorm(build, spec.hidden_size, spec.norm_eps)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        return self.norm(self.collapse(streams))


class Ending(Collapse):
    """The same with the head."""

    def __init__(self, spec: DeepseekV4Spec, build: Build):
        super().__init__(spec, build)
        self.head = Head(build, spec.vocab_size, spec.hidden_size)


def take_stored(
    tensors: Iterable[tuple[str, torch.Tensor]], experts: nn.Module, stored: dict[str, torch.Tensor], found: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy the tensors named in ``stored`` into their buffers and add their names to ``found``; yield the others, and
    those of another shape, but none of experts in MXFP4 that other ranks than this one have, which has ``experts``."""
    own = experts.own if isinstance(experts, Mxfp4ExpertWeights) else None
    for name, tensor in tensors:
        place = stored.get(name)
        if own is not None and place is None and is_of_other_expert(name, own):
            continue
        if place is None or tensor.shape != place.shape:
            yield name, tensor
            continue
        # codes and scales may be typed as 8-bit floats: reinterpret the bits, a copy would convert the values
        place.copy_(tensor.view(torch.uint8) if place.dtype == torch.uint8 else tensor)
        found.add(name)


def check_found(stored: dict[str, torch.Tensor], found: set[str]) -> None:
    """Raise `WeightError` unless all of these were."""
    missing = [name for name in stored if name not in found]
    if missing:
        raise WeightError(
            f"the checkpoint does not fit the model: tensors missing ({len(missing)}): {', '.join(missing[:6])}"
        )


class DeepseekV4Model(ServedModel):
    """See `ServedModel`. A layer has several caches, so pages are bound per `Place`, in the order of `spec.places`."""

    supports_stages = captures_features = True
    prediction = "headrace.models.deepseek_v4.prediction:V4Prediction"
    widen_caches, narrow_keys, host_caches = (staticmethod(make) for make in (widen_caches, narrow_keys, host_caches))

    def __init__(self, spec: DeepseekV4Spec, names: CheckpointNames, build: Build):
        super().__init__()
        self.spec, self.names, self._schemes, self.stage = spec, names, build.schemes, build.stage
        self.step = build.step
        self.num_streams = spec.hyper.streams
        self.carried_width = spec.hyper.streams * spec.hidden_size
        length = build.max_model_len or spec.max_model_len
        plain, compressed = (
            RotaryTable(rope, length=length, device=build.device) for rope in (spec.plain_rope, spec.compressed_rope)
        )
        own = self._own = self.stage.layers(spec.num_layers)
        absent = set[str]()
        self.embedding: Embedding | None = None
        self.ending: Ending | None = None
        if self.stage.is_first:
            self.embedding = Embedding(build, spec.vocab_size, spec.hidden_size)
        else:
            absent.add("embedding")
        # `_blocks` is the same list with its type: nn.ModuleList yields plain modules to the type checker
        self._blocks = [
            V4Block(spec, spec.layers[i], compressed if spec.layers[i].ratio else plain, build) for i in own
        ]
        self.layers = number_layers(self._blocks, own.start)
        self.layer_kinds = [spec.layers[i] for i in own]
        if self.stage.is_last:
            self.ending = Ending(spec, build)
        else:
            absent.add("ending")
        self.is_capturable = all(block.mlp.is_capturable for block in self._blocks)
        self._experts = build.experts.share(spec.moe.routing.num_experts)
        self._elsewhere = find_elsewhere(names.modules, own, spec.num_layers, absent)

    def wants(self, name: str) -> bool:
        """See `ServedModel`."""
        name = rename(name)
        return not (is_of_other_expert(name, self._experts) or f"{name}.".startswith(self._elsewhere))

    def find_narrowing(self) -> Narrowing | None:
        """See `ServedModel`: of stacked experts, those of other ranks are left out; single ones `wants` leaves out."""
        elsewhere = find_targets(self, self.names.modules).elsewhere
        if not elsewhere:
            return None
        return ExpertNarrowing(
            {}, elsewhere, rename, stacked_experts="gate_first", hidden_size=self.spec.hidden_size
        )

    def own_caches(self, count: int) -> range:
        """See `ServedModel`."""
        counts = [sum(1 for _ in places(self.spec, layer)) for layer in self.spec.layers]
        return range(sum(counts[: self._own.start]), sum(counts[: self._own.stop]))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter, and the buffers that keep checkpoint tensors as stored; raises `WeightError`."""
        # taken before the quantization schemes see them: these would dequantise the experts' codes
        stored, found = self._stored(), set[str]()
        plain = self._schemes.read(take_stored(self._rename(tensors), self._blocks[0].mlp.experts, stored, found))
        fill_targets(find_targets(self, self.names.modules), plain)
        check_found(stored, found)
        for i, block in zip(self._own, self._blocks, strict=True):
            router = block.mlp.router
            if isinstance(router, HashRouter) and not router.has_sound_table:
                raise WeightError(
                    f"{HASH_TABLE.replace('{i}', str(i))} names experts that the model does not have, or one twice for "
                    f"a token; it has {block.mlp.num_experts}"
                )

    def _rename(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Map names to those of the published checkpoints and split stacked experts; the multi-token prediction layers
        (drafters) are left out."""
        num_drafts = 0
        for name, tensor in tensors:
            name = rename(name)
            if name.startswith(DRAFT):
                num_drafts += 1
            else:
                apart = unstack_experts([(name, tensor)], "gate_first", self.spec.hidden_size)
                yield from ((rename(own), part) for own, part in apart)
        if num_drafts:
            logger.info("left out %d tensors of the layers that draft tokens", num_drafts)

    def _stored(self) -> dict[str, torch.Tensor]:
        """Checkpoint names to the buffers that keep tensors as stored: the hash routers' tables, MXFP4 experts."""
        stored: dict[str, torch.Tensor] = {}
        for i, block in zip(self._own, self._blocks, strict=True):
            if isinstance(block.mlp.router, HashRouter):
                stored[HASH_TABLE.replace("{i}", str(i))] = block.mlp.router.table
            if isinstance(block.mlp.experts, Mxfp4ExpertWeights):
                stored |= block.mlp.experts.places(EXPERTS.replace("{i}", str(i)), MATRICES)
        return stored

    @property
    def vocabulary(self) -> tuple[Embedding, Head] | None:
        """See `ServedModel`."""
        return None if self.embedding is None or self.ending is None else (self.embedding, self.ending.head)

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """Attach pages and cache groups; both lists have one element per place, not per layer."""
        own = [place for layer in self._blocks for place in layer.attention.places()]
        for place, number in zip(own, self.own_caches(len(pages)), strict=True):
            place.bind(pages[number], group_of_layer[number])

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `ServedModel`; stages pass on all streams."""
        self.step.batch = batch
        if batch.carried is not None:
            own = batch.carried.unflatten(1, (self.spec.hyper.streams, -1))
        else:
            assert self.embedding is not None
            # all streams start as the embedding; a view of stride 0, which nothing may write to in place
            own = self.embedding(batch.token_ids).unsqueeze(1).expand(-1, self.spec.hyper.streams, -1)
        streams, features = Streams(own), batch.features
        for layer in self._blocks:
            layer(streams, batch)
        settled = self._blocks[-1].mlp_mix.settle(streams)
        if features is not None:
            features.begin(settled[:, 0])
            if features.spec.layers:  # of the last one alone, see `V4Prediction`
                features.values.copy_(settled.flatten(1))
        if self.ending is None:
            return settled.flatten(1)
        hidden: torch.Tensor = self.ending(settled)
        if features is not None:
            features.take_final(hidden)
        return hidden

    @property
    def divided_head(self) -> Head | None:
        """See `ServedModel`."""
        return None if self.ending is None or self.ending.head.group.is_single else self.ending.head

    def take_part(self, replica_tokens: list[int]) -> None:
        """See `ServedModel`."""
        nothing = torch.empty(0, dtype=torch.int64)
        self.step.batch = ForwardBatch(nothing, nothing, [], replica_tokens=replica_tokens)
        for block in self._blocks:
            block.mlp.take_part()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] to logits [S, V] float32."""
        assert self.ending is not None, "the last stage has the head"
        return self.ending.head(hidden)
