"""`DraftKind`: what a drafter plug-in declares, and the registry of them.

A kind reads a checkpoint's configuration and builds a `headrace.layers.draft.DraftModel` for a served model. Entry
points of group ``headrace.draft_models`` add kinds, under the name by which a configuration asks for them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from headrace.base.errors import ConfigError, PluginError, WeightError
from headrace.base.registry import PLUGIN_API, Registry
from headrace.layers.batch import FeatureSpec
from headrace.layers.build import Build
from headrace.layers.draft import DraftModel
from headrace.layers.model import ServedModel
from headrace.layers.vocabulary import Embedding, Head
from headrace.models.family import Family
from headrace.models.source import ModelSource

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headrace.draft_models"


@dataclass(frozen=True)
class DraftTarget:
    """The served model that tokens are drafted for; ``tokenizer``: the user's choice instead of the model's own."""

    source: ModelSource
    family: Family
    spec: Any
    model: ServedModel
    tokenizer: str | None = None

    @property
    def num_layers(self) -> int:
        """Of a decoder; 0 if the family counts no layers."""
        return len(self.spec.layers) if self.model.captures_features else 0

    def share_vocabulary(self, kind: str) -> tuple[Embedding, Head]:
        """The model's embedding and head; raises `ConfigError` if it has none that can be shared."""
        if self.model.vocabulary is None:
            raise ConfigError(
                f"{kind} shares embedding and head with the served model, and model family {self.family.name} has none "
                "to share; choose another method", param="speculative_config",
            )
        return self.model.vocabulary

    def check_features(self, kind: str, features: FeatureSpec) -> None:
        """Raise `ConfigError` unless the model can give these."""
        if not self.model.captures_features:
            raise ConfigError(
                f"{kind} reads hidden states of the served model, and model family {self.family.name} does not give "
                "them; choose another method", param="speculative_config",
            )
        if features.layers and features.streams != self.model.num_streams:
            raise ConfigError(
                f"{kind} reads one residual stream of the served model, and model family {self.family.name} has "
                f"{self.model.num_streams}; choose another method", param="speculative_config",
            )
        wrong = [layer for layer in features.layers if not 0 <= layer <= self.num_layers]
        if wrong:
            raise ConfigError(
                f"{kind} reads what enters layers {', '.join(map(str, features.layers))} of the served model, which "
                f"has {self.num_layers}: it was made for another model, or its config.json needs "
                "eagle_aux_hidden_state_layer_ids", param="speculative_config",
            )


@dataclass(frozen=True)
class DraftQuery:
    """What a drafter is built from. ``source``: the checkpoint of the drafter, the target's own for a kind without
    one. ``tensors``: names in that checkpoint; None for random weights, where every optional part is left out.
    ``build``: device, dtype and context of the target, the drafter's own schemes and step. ``kv_dtype``: of caches."""

    source: ModelSource
    tensors: frozenset[str] | None
    target: DraftTarget
    build: Build
    kv_dtype: str

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name or with that ending."""
        return self.tensors is not None and any(tensor.endswith(name) for tensor in self.tensors)


class DraftKind(ABC):
    """A kind of drafter; the registry's entries are instances. ``has_checkpoint``: its weights are a model of their
    own, which the user names; otherwise they are in the target's files. ``is_random``: they are random even where the
    target's are not, and nothing is read."""

    plugin_api: ClassVar[int] = PLUGIN_API
    has_checkpoint: ClassVar[bool] = True
    is_random: ClassVar[bool] = False

    def fits(self, source: ModelSource) -> bool:
        """Whether a checkpoint, by its configuration alone, has a drafter of this kind: the one that the user named,
        or the target's for a kind without one of its own. Asked by the automatic choice; False: only by name."""
        return False

    @abstractmethod
    def build_model(self, query: DraftQuery) -> DraftModel:
        """The drafter with empty parameters; raises `ConfigError` if it cannot draft for the target."""

    def wants(self, query: DraftQuery) -> Callable[[str], bool] | None:
        """Which tensors of the checkpoint `DraftModel.load_weights` is to be given; None: all."""
        return None


DRAFT_KINDS: Registry[DraftKind] = Registry("drafter")
"""The automatic choice takes the first one that fits. Out-of-tree kinds come before ``draft_model``, which fits any
checkpoint."""
DRAFT_KINDS.add(
    "eagle3", "headrace.models.drafters.eagle3:EAGLE3", priority=20,
    doc="a head over hidden states of three layers (EAGLE-3)",
)
DRAFT_KINDS.add(
    "mtp", "headrace.models.drafters.mtp:MTP", priority=20,
    doc="the multi-token prediction module of the served checkpoint",
)
DRAFT_KINDS.add(
    "draft_model", "headrace.models.drafters.own_model:OWN_MODEL", doc="a smaller model with the same tokenizer"
)
DRAFT_KINDS.add(
    "bench", "headrace.models.drafters.bench:BENCH_HEAD", doc="for benchmarks: random, right at a set rate"
)
OUT_OF_TREE_PRIORITY = 10


def add_installed_kinds() -> None:
    """Register the kinds of installed packages."""
    DRAFT_KINDS.add_installed(ENTRY_POINT_GROUP, priority=OUT_OF_TREE_PRIORITY)


def is_draft_kind(method: str) -> bool:
    """Whether a method names a kind of this package or an installed one."""
    if method not in DRAFT_KINDS:
        add_installed_kinds()
    return method in DRAFT_KINDS


def find_draft_kind(method: str) -> DraftKind:
    """The kind of a method; raises `PluginError` if it is unknown or cannot be loaded."""
    if method not in DRAFT_KINDS:
        add_installed_kinds()
    return DRAFT_KINDS.load(method)


def choose_draft_kind(source: ModelSource, *, has_checkpoint: bool) -> str | None:
    """The first kind, by priority, that a checkpoint fits: of those with checkpoints of their own, or of the others.
    None if there is none. A kind that cannot be loaded is left out with a warning."""
    add_installed_kinds()
    for name in DRAFT_KINDS.names():
        try:
            kind = DRAFT_KINDS.load(name)
        except PluginError as error:
            logger.warning("left out: %s", error)
            continue
        if kind.has_checkpoint is has_checkpoint and kind.fits(source):
            return name
    return None


def choose_module(tensors: Iterable[tuple[str, torch.Tensor]], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint's own prediction module, whose names begin with ``prefix``; raises `WeightError` at
    the end if there was none."""
    is_there = False
    for name, tensor in tensors:
        if name.startswith(prefix):
            is_there = True
            yield name, tensor
    if not is_there:
        raise WeightError(
            f"the checkpoint has no tensors {prefix}*: its multi-token prediction module was left out when it was "
            "saved; choose another speculative method, or the original checkpoint"
        )
