"""`ServedModel`: the contract between a model and what runs it. T tokens, D hidden size, S sampled positions, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from headrace.base.cache import CacheSpec
from headrace.kernels.decoder_layers.table import FusedDecode
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.lora.contract import AdapterSites
from headrace.layers.lora.sites import AdapterBanks
from headrace.layers.media import MediaModel
from headrace.layers.narrowing import Narrowing
from headrace.layers.pooling import PoolingHead
from headrace.layers.quantization.storage import StorableModel
from headrace.layers.vocabulary import Embedding, Head


def number_layers(layers: Sequence[nn.Module], first: int) -> nn.ModuleList:
    """Layers registered under their numbers in the whole model, from ``first`` on: parameters have the same names in
    every pipeline stage."""
    numbered = nn.ModuleList()
    for number, layer in enumerate(layers, first):
        numbered.add_module(str(number), layer)
    return numbered


def keep_caches(specs: list[CacheSpec | None]) -> list[CacheSpec | None]:
    """The same: of models whose caches have no other form."""
    return specs


class ServedModel(StorableModel):
    """Base class of every model. A family names its class as ``"module:Class"``; it is built as ``Class(spec, names,
    build)``, which creates every parameter uninitialised on the device of ``build``, most of them in its dtype. Then
    ``load_weights`` and ``bind_cache`` are called, and ``forward`` any number of times.

    Capabilities are attributes with defaults here, which a model overrides. ``is_capturable``: steps may be recorded as
    CUDA graphs; False for a model that waits for the device or reads host lengths. ``captures_prefill``: so may steps
    with prefill. ``captures_features``: `forward`
    fills ``ForwardBatch.features``, which drafters that read hidden states need; ``num_streams``: how many parallel
    residual streams these have. ``prediction``: ``"module:Class"`` of a multi-token prediction module of its own kind,
    a `headrace.layers.draft.DraftModel` built as ``Class(spec, query)``; its tensors' names begin with its ``prefix``.
    ``supports_stages``: it is built with
    the layers of ``Build.stage`` alone, of which the first stage embeds tokens and the last one has norm and head; the
    others pass on ``carried_width`` numbers per token. ``media``: its encoders, None for text alone. ``scores``: the
    classifier, [S, D] to logits [S, classes] in float32, if the checkpoint has one. ``pooling_head``: set by the loader
    of a pooling model. ``adapters``: its banks, set by the loader where adapters are served. ``layer_kinds``: for each
    of ``layers``, what its kernels depend on, where layers return nothing but change what they are called with; else
    empty. ``narrow_keys`` turns the family's cache specs in 8 bits into those with an indexer's keys in MXFP4; without
    such keys they stay as they are.
    """

    is_capturable: bool = True
    captures_prefill: bool = True
    captures_features: bool = False
    num_streams: int = 1
    prediction: ClassVar[str] = ""
    supports_stages: bool = False
    carried_width: int = 0
    narrow_keys: ClassVar[Callable[[list[CacheSpec | None]], list[CacheSpec | None]]] = staticmethod(keep_caches)
    media: MediaModel | None = None

    def __init__(self) -> None:
        super().__init__()
        # Set here and not in the class body: a class attribute would hide the registered submodule.
        self.scores: nn.Module | None = None
        self.pooling_head: PoolingHead | None = None
        self.adapters: AdapterBanks | None = None
        self.layer_kinds: Sequence[Hashable] = ()

    @property
    def prunes_last_layer(self) -> bool:
        """Whether `forward` obeys ``ForwardBatch.wanted``: computes the last layer for the wanted tokens only."""
        return False

    @property
    def vocabulary(self) -> tuple[Embedding, Head] | None:
        """Embedding and head, for drafters that share them; None if the model has no such layers."""
        return None

    @property
    def divided_head(self) -> Head | None:
        """What `compute_logits` calls and does nothing else, if its ranks have the logits of some tokens each."""
        return None

    def wants(self, name: str) -> bool:
        """Whether `load_weights` needs the tensor of that checkpoint name. Those of other pipeline stages are left out.
        """
        return True

    @staticmethod
    def widen_caches(specs: list[CacheSpec | None]) -> list[CacheSpec | None]:
        """The family's cache specs where steps verify drafts."""
        return specs

    @staticmethod
    def host_caches(spec: Any, specs: list[CacheSpec | None], hot_slots: int) -> list[CacheSpec | None]:
        """The cache specs of a model with this ``spec`` where entries are in host memory, but for ``hot_slots`` of each
        request: of layers that select what they attend to. Raises `ConfigError` for fewer than they select."""
        return specs

    def find_narrowing(self) -> Narrowing | None:
        """What to cut of checkpoint tensors before they are read; None where all of them is needed."""
        return None

    def find_adapter_sites(self) -> AdapterSites | None:
        """Which checkpoint modules adapters may change; None for a model that takes none. For one that was built with
        ``Build.adapters``."""
        return None

    def own_caches(self, count: int) -> range:
        """Which of the family's ``count`` cache specs are those of layers here."""
        return range(count)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from ``(checkpoint name, tensor)`` pairs in any order. A tensor is valid only until the
        next one is requested. Raises `WeightError` naming missing or unexpected ones."""
        raise NotImplementedError

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """Attach caches before the first step; may be called again with other pages. ``pages[layer]`` is that layer's
        `KvPages`, None for a layer without cache or of another pipeline stage; ``group_of_layer[layer]`` indexes
        ``ForwardBatch.groups``."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] after the final norm; [S, D] of the wanted tokens where ``batch.wanted`` is set. In
        pipeline stages before the last, what the next one needs, [T, carried_width]."""
        raise NotImplementedError

    def take_part(self, replica_tokens: list[int]) -> None:
        """Compute the experts that are here for a step in which this replica has no token, and others have that many.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] to logits [S, V] in float32, with the model's own scaling and soft-cap applied."""
        raise NotImplementedError

    def fuse_decode(self) -> FusedDecode | None:
        """One native CPU call that computes a step of decodes only, from token ids to sampled tokens. None if the model
        does not allow it, or not yet: weights may still have to be packed."""
        return None
