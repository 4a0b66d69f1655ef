"""`Family`: what a model plug-in declares. Importing a family's ``family.py`` must not import torch.

Out-of-tree families are entry points of group ``headrace.families`` naming a `Family` object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.base.cache import CacheSpec
from headrace.base.registry import PLUGIN_API


@dataclass(frozen=True)
class Family:
    """A model family. ``read_config`` turns a Hugging Face ``config.json`` dict into the family's own spec (a frozen
    dataclass; raises `ConfigError` on a value it cannot serve). ``cache_specs(spec, kv_dtype)`` gives one `CacheSpec`
    or None per layer. ``model`` is ``"module:Class"`` of a `ServedModel`, imported only when the family is served.

    ``generates`` is False for a family whose models read texts, and have no logits of tokens.

    ``gguf_architectures`` are values of ``general.architecture`` it serves; ``gguf_config(metadata)`` makes the
    config.json dict from GGUF metadata; ``gguf_weights`` is ``"module:function"`` ``(spec) -> GgufNaming``, or None for
    the naming shared by decoders.

    ``chat_encoder`` is ``"module:Class"`` for a family whose chat format is code: built with the model's folder, it
    renders as ``service.tokenization.chat_template.ChatTemplates`` does. Torch-free; used when the model brings no
    template.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[dict[str, Any]], Any]
    cache_specs: Callable[[Any, str], list[CacheSpec | None]]
    model: str
    gguf_architectures: tuple[str, ...] = ()
    gguf_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    gguf_weights: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    generates: bool = True
    chat_encoder: str | None = None
    plugin_api: int = PLUGIN_API


class ServedModel(Protocol):
    """A built model, a ``torch.nn.Module``. Letters: T tokens, D width, S sampled positions, V vocabulary.

    Built as ``Class(spec, build)`` with a `headrace.layers.build.Build` under which every parameter is created empty on
    the device in the model dtype; then ``load_weights``, then ``bind_cache``, then ``forward`` any number of times. A
    model with a classifier has it as ``scores``, [S, D] to logits [S, classes] in float32. Who loads a model that reads
    sets its ``read_out``, a `headrace.layers.pooling.ReadOut`. A model may have ``join_decodes()``: what computes a
    step of decodes alone in one call on a CPU, a `headrace.kernels.decoder_layers.decode_step.DecodeStep`, or None for
    now.
    """

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take ``(checkpoint name, tensor)`` pairs in any order; raises `WeightError` naming what misses or is
        extra."""

    def bind_cache(self, pages: list[Any], group_of_layer: list[int | None]) -> None:
        """``pages[layer]`` is that layer's `KvPages` (None for a layer without cache)."""

    def forward(self, batch: Any) -> Any:
        """`ForwardBatch` to hidden states [T, D], after the final norm. A model whose ``narrows`` is true may be given
        a batch with wanted tokens and returns theirs alone, [S, D]."""

    def compute_logits(self, hidden: Any) -> Any:
        """Hidden [S, D] to logits [S, V] in float32, with the model's own scaling and soft-cap applied."""
