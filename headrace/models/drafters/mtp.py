"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a module in the target's own checkpoint that
reads the target's last hidden state and the next token's embedding, and is one more layer of the target's kind.

Serves every family whose `CheckpointNames` have ``has_draft_layers``: tensors of layer N of a model of N layers; and
those that bring a module of their own. The
paper has a module per further token; published checkpoints have one, which is used again for each of them, as peers do.
T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from headrace.base.errors import ConfigError
from headrace.base.registry import load_target
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import FeatureSpec, ForwardBatch
from headrace.layers.decoder.block import make_block
from headrace.layers.draft import DraftModel
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.names import CheckpointNames
from headrace.layers.norm import make_norm
from headrace.layers.residual import Residual
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields
from headrace.models.drafters.contract import DraftKind, DraftQuery, choose_module
from headrace.models.source import ModelSource

NUM_MODULES = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json: as published, and as newer versions of transformers and other families write it."""

PARTS = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "shared_head.norm": "norm"}
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and head, which the paper shares; not read."""


class MtpModel(DraftModel):
    """See `DraftModel`. Hidden states are those after the final norm, as the target's are."""

    def __init__(self, spec: DecoderSpec, names: CheckpointNames, query: DraftQuery):
        build, last = query.build, spec.layers[-1]
        cache_spec = (last.attention or spec.attention).cache_spec(last, query.kv_dtype)
        super().__init__(FeatureSpec(has_final=True), spec.hidden_size, [cache_spec])
        self.step, self._schemes, self._keeps_blocks = build.step, build.schemes, build.keeps_blocks
        self._names, self._layer = names, spec.num_layers
        self._vocabulary = query.target.share_vocabulary("mtp")  # a tuple: no modules of the drafter
        rotary = RotaryTable(
            last.rope, length=build.max_model_len or spec.max_model_len, device=build.device
        ) if last.rope else None
        self.embedding_norm = make_norm(spec.norm, spec.hidden_size, build)
        self.hidden_norm = make_norm(spec.norm, spec.hidden_size, build)
        self.projection = Linear(build, 2 * spec.hidden_size, spec.hidden_size)
        self.block = make_block(spec, last, rotary, build)
        self.norm = make_norm(spec.norm, spec.hidden_size, build)

    @property
    def prefix(self) -> str:
        """What the names of the module's tensors begin with."""
        return f"model.layers.{self._layer}."

    @property
    def prunes_last_layer(self) -> bool:
        """See `DraftModel`."""
        return self.block.attention.prunes_queries

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `DraftModel`; others of the target's tensors may be among them, and are left out."""
        layer, names = str(self._layer), self._names
        modules = {
            theirs.replace("{i}", layer): ours.replace("layers.{i}", "block") for theirs, ours in names.modules.items()
            if "{i}" in theirs
        }
        modules |= {self.prefix + theirs: ours for theirs, ours in PARTS.items()}
        plain = names.rename(self._schemes.read(choose_module(tensors, self.prefix)))
        apart = unstack_experts(
            plain, names.stacked_experts, self.input_size, keeps_blocks=self._keeps_blocks
        )
        fill_targets(find_targets(self, modules), apart, harmless=("rotary_emb.inv_freq", *SHARED))

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """See `DraftModel`."""
        (own,), (group,) = pages, group_of_layer
        self.block.attention.bind(own, group)

    def forward(self, batch: ForwardBatch, inputs: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        self.step.batch = batch
        embedded = self.embedding_norm(self._vocabulary[0](batch.token_ids))
        residual = Residual(self.projection(torch.cat((embedded, self.hidden_norm(inputs)), dim=1)))
        self.step.batch = batch.for_last_layer(self.block.attention.group)
        self.block(residual)
        return self.norm.add(residual)

    def compute_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        return self._vocabulary[1](hidden).argmax(-1)


class Mtp(DraftKind):
    """See `DraftKind`."""

    has_checkpoint = False

    def fits(self, source: ModelSource) -> bool:
        """Whether config.json counts such modules; raises `ConfigError` where it has something else than a count."""
        fields = Fields(source.config)
        return any(fields.count(name, 0) for name in NUM_MODULES)

    def build_model(self, query: DraftQuery) -> DraftModel:
        """Raises `ConfigError` for a target without such a module."""
        target = query.target
        is_stated, names = self.fits(target.source), target.family.names
        if is_stated and target.model.prediction:
            model: DraftModel = load_target(target.model.prediction)(target.spec, query)
            target.check_features("mtp", model.features)
            return model
        if not is_stated or not isinstance(target.spec, DecoderSpec) or not names.has_draft_layers:
            raise ConfigError(
                f"{target.source.name} ({target.source.architecture}) brings no multi-token prediction module that is "
                f"served (config.json: {NUM_MODULES[0]}); choose another speculative method",
                param="speculative_config",
            )
        model = MtpModel(target.spec, names, query)
        target.check_features("mtp", model.features)
        return model

    def wants(self, query: DraftQuery) -> Callable[[str], bool]:
        """The module's tensors alone: the target's files hold everything."""
        own = query.target.model.prediction
        prefix = load_target(own).prefix if own else f"model.layers.{query.target.num_layers}."
        return lambda name: name.startswith(prefix)


MTP = Mtp()
