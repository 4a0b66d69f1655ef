"""`Family`: what a model plug-in declares. Importing a family's ``family.py`` must not import torch, as HTTP processes
do so too.

Out-of-tree families are entry points of group ``headrace.families`` naming a `Family` object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.base.cache import CacheSpec
from headrace.base.media import MediaFacts
from headrace.base.registry import PLUGIN_API, load_target
from headrace.layers.names import CheckpointNames, GgufNaming
from headrace.layers.spec import decoder_cache_specs

if TYPE_CHECKING:
    from headrace.layers.build import Build
    from headrace.layers.model import ServedModel


@dataclass(frozen=True)
class Family:
    """A model family; ``name``, ``architectures`` and ``read_config`` suffice for a decoder with common tensor names.

    ``read_config`` turns a Hugging Face ``config.json`` dict into the family's own spec, a frozen dataclass; it raises
    `ConfigError` on a value it cannot serve. ``cache_specs(spec, kv_dtype)`` gives one `CacheSpec` or None per layer.
    ``names`` maps checkpoint tensors. ``model`` is ``"module:Class"`` of a
    `headrace.layers.model.ServedModel`, imported only when the family is served. ``generates`` is False for a family of
    pooling models without logits of tokens.

    ``gguf_architectures`` are values of ``general.architecture`` it serves; ``gguf_config(metadata)`` makes the
    config.json dict from GGUF metadata; ``gguf_naming`` says how its GGUF tensors differ from the common naming.

    ``chat_encoder`` is ``"module:Class"`` for a family whose chat format is code: built with the model's folder, it
    renders as ``service.tokenization.chat_template.ChatTemplates`` does. Torch-free; used when the model brings no
    template.

    ``media(config)`` says what media a model of that config.json takes; its model class is then a
    `headrace.layers.decoder.multimodal.MultimodalModel`. None: text alone.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[dict[str, Any]], Any]
    cache_specs: Callable[[Any, str], list[CacheSpec | None]] = decoder_cache_specs
    names: CheckpointNames = field(default_factory=CheckpointNames)
    model: str = "headrace.layers.decoder.decoder:Decoder"
    gguf_architectures: tuple[str, ...] = ()
    gguf_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    gguf_naming: GgufNaming = field(default_factory=GgufNaming)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    generates: bool = True
    chat_encoder: str | None = None
    media: Callable[[dict[str, Any]], MediaFacts | None] | None = None
    plugin_api: int = PLUGIN_API

    def build_model(self, spec: Any, build: Build) -> ServedModel:
        """Import the model's class and build it with empty parameters."""
        return load_target(self.model)(spec, self.names, build)
