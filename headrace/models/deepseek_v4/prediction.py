"""`V4Prediction`: the multi-token prediction module of DeepSeek-V4, which drafts the token after the next. It reads all
streams of the target's last layer and the next token's embedding, and is one more layer, over a window alone.

T tokens, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace.base.errors import ConfigError
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import FeatureSpec, ForwardBatch
from headrace.layers.draft import DraftModel
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.models.config_fields import Fields
from headrace.models.deepseek_v4.hyper_connections import Streams
from headrace.models.deepseek_v4.model import Collapse, V4Block, check_found, take_stored
from headrace.models.deepseek_v4.naming import DRAFT_MODULE, DRAFT_NAMES, MATRICES, is_of_other_expert
from headrace.models.deepseek_v4.spec import DeepseekV4Spec, V4LayerSpec, layer_cache_specs
from headrace.models.drafters.contract import DraftQuery, choose_module

OTHER_STAGES = "dspark_block_size"
"""Key of checkpoints whose ``mtp`` tensors are drafters of another kind, in stages."""


class V4Prediction(DraftModel):
    """See `DraftModel`. Features, inputs and hidden states are streams, [T, S * D]; a chain goes on with its own.
    Raises `ConfigError` for checkpoints whose drafters are of another kind."""

    prefix = f"{DRAFT_MODULE}."

    def __init__(self, spec: DeepseekV4Spec, query: DraftQuery):
        build, layer = query.build, V4LayerSpec(ratio=0, is_hashed=False)
        if Fields(query.target.source.config).config.get(OTHER_STAGES) is not None:
            raise ConfigError(
                f"the checkpoint's drafters are not served (config.json: {OTHER_STAGES}); choose another speculative "
                "method", param="speculative_config",
            )
        count = self.num_streams = spec.hyper.streams
        super().__init__(
            FeatureSpec((spec.num_layers,), streams=count), count * spec.hidden_size,
            layer_cache_specs(spec, layer, query.kv_dtype),
        )
        self._schemes = build.schemes
        self._vocabulary = query.target.share_vocabulary("mtp")  # a tuple: no modules of the drafter
        rotary = RotaryTable(
            spec.plain_rope, length=build.max_model_len or spec.max_model_len, device=build.device
        )
        self.embedding_norm, self.stream_norm = (RmsNorm(build, spec.hidden_size, spec.norm_eps) for _ in range(2))
        self.embedding_projection, self.stream_projection = (
            Linear(build, spec.hidden_size, spec.hidden_size) for _ in range(2)
        )
        self.block = V4Block(spec, layer, rotary, build)
        self.ending = Collapse(spec, build)
        self.step = build.step
        self.is_capturable = self.block.mlp.is_capturable
        self._experts = build.experts.share(spec.moe.routing.num_experts)

    def wants(self, name: str) -> bool:
        """See `DraftModel`."""
        return not is_of_other_expert(name, self._experts)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `DraftModel`; others of the target's tensors may be among them, and are left out."""
        experts, found = self.block.mlp.experts, set[str]()
        stored = {}
        if isinstance(experts, Mxfp4ExpertWeights):
            stored = experts.places(f"{DRAFT_MODULE}.ffn.experts", MATRICES)
        plain = self._schemes.read(take_stored(choose_module(tensors, self.prefix), experts, stored, found))
        fill_targets(find_targets(self, DRAFT_NAMES), plain)
        check_found(stored, found)

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """See `DraftModel`."""
        (own,), (group,) = pages, group_of_layer
        self.block.attention.window.bind(own, group)

    def forward(self, batch: ForwardBatch, inputs: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        self.step.batch = batch
        embedded = self.embedding_projection(self.embedding_norm(self._vocabulary[0](batch.token_ids)))
        before = inputs.unflatten(1, (self.num_streams, -1)).flatten(0, 1)  # [T * S, D]
        read = self.stream_projection(self.stream_norm(before)).unflatten(0, (-1, self.num_streams))
        streams = Streams(read + embedded.unsqueeze(1))
        self.block(streams, batch)
        return self.block.mlp_mix.settle(streams).flatten(1)

    def compute_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        logits: torch.Tensor = self.compute_logits(hidden)
        return logits.argmax(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Streams [n, S * D] to logits [n, V] float32."""
        logits: torch.Tensor = self._vocabulary[1](self.ending(hidden.unflatten(1, (self.num_streams, -1))))
        return logits
