"""`Family`: what a model plug-in declares. Importing a family's ``family.py`` must not import torch.

Out-of-tree families are entry points of group ``headrace.families`` naming a `Family` object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.base.cache import CacheSpec
from headrace.base.registry import PLUGIN_API


@dataclass(frozen=True)
class Family:
    """A model family. ``read_config`` turns a Hugging Face ``config.json`` dict into the family's own spec (a frozen
    dataclass; raises `ConfigError` on a value it cannot serve). ``cache_specs(spec, kv_dtype)`` gives one `CacheSpec`
    or None per layer. ``model`` is ``"module:Class"`` of a `headrace.layers.model.ServedModel`, imported only when the
    family is served.

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
