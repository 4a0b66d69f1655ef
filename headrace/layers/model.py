"""`ServedModel`: the contract between a model and what runs it. T tokens, D hidden size, S sampled positions, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headrace.kernels.decoder_layers.table import FusedDecode
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.pooling import PoolingHead
from headrace.layers.quantization.storage import StorableModel


class ServedModel(StorableModel):
    """Base class of every model. A family names it as ``"module:Class"``; it is built as ``Class(spec, build)`` with a
    `headrace.layers.build.Build` under which every parameter is created empty on the device in the model dtype. Then
    come ``load_weights``, ``bind_cache``, and ``forward`` any number of times.

    What a model can do is declared by attributes with defaults here, which a model overrides. ``is_capturable``: steps
    may be recorded as CUDA graphs; False for a model that waits for the device or reads host lengths. ``scores``: the
    classifier, [S, D] to logits [S, classes] in float32, if the checkpoint has one. ``pooling_head``: set by the loader
    of a pooling model.
    """

    is_capturable: bool = True

    def __init__(self) -> None:
        super().__init__()
        # Set here and not in the class body: a class attribute would hide the registered submodule.
        self.scores: nn.Module | None = None
        self.pooling_head: PoolingHead | None = None

    @property
    def prunes_last_layer(self) -> bool:
        """Whether `forward` obeys ``ForwardBatch.wanted``."""
        return False

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take ``(checkpoint name, tensor)`` pairs in any order; raises `WeightError` naming missing or unexpected
        ones."""
        raise NotImplementedError

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """``pages[layer]`` is that layer's `KvPages`, None for a layer without cache."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] after the final norm; [S, D] of the wanted tokens where ``batch.wanted`` is set."""
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] to logits [S, V] in float32, with the model's own scaling and soft-cap applied."""
        raise NotImplementedError

    def fuse_decode(self) -> FusedDecode | None:
        """One native CPU call that computes a step of decodes alone; None where there is none, or not yet."""
        return None
