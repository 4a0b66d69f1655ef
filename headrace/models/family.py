"""`Family`: what a model plug-in declares. Importing a family's ``family.py`` must not import torch, as HTTP processes
do so too.

Out-of-tree families are entry points of group ``headrace.families`` naming a `Family` object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.base.registry import PLUGIN_API, load_target
from headrace.layers.media_spec import MultimodalSpec
from headrace.layers.names import CheckpointNames, GgufNaming
from headrace.layers.spec import decoder_cache_specs

if TYPE_CHECKING:
    from headrace.layers.build import Build
    from headrace.layers.model import ServedModel


MULTIMODAL = "headrace.layers.decoder.multimodal:MultimodalDecoder"
"""The class of decoders with encoders."""


DECODER_USES = ("ForCausalLM", "ForSequenceClassification", "Model")


def decoder_architectures(*kinds: str) -> tuple[str, ...]:
    """The names of text models under which a decoder is published: with the vocabulary's head, with a classifier, and
    with neither. ``kinds`` are their beginnings, as ``Llama``."""
    return tuple(kind + use for kind in kinds for use in DECODER_USES)


@dataclass(frozen=True)
class FamilyMedia:
    """``facts(config)`` says what media a model of that config.json takes, None for text alone; ``read_config`` gives a
    `headrace.layers.media_spec.MultimodalSpec` for the others. ``names`` map checkpoints of these, where they are not
    the family's. ``outputs`` is given where a processor has words of its own: it turns what the processor makes of one
    item, by name, into what processors of other families make."""

    facts: Callable[[dict[str, Any]], MediaFacts | None]
    names: CheckpointNames | None = None
    outputs: Callable[[dict[str, Any]], dict[str, Any]] = dict


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

    ``media`` is set for a family whose models take images, videos or audio.
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
    media: FamilyMedia | None = None
    plugin_api: int = PLUGIN_API

    def verifying(self, spec: Any) -> Family:
        """The family where steps verify drafts, for which some models need larger caches."""
        widen = self.model_class(spec).widen_caches

        def cache_specs(spec: Any, kv_dtype: str) -> list[CacheSpec | None]:
            return list(widen(self.cache_specs(spec, kv_dtype)))

        return replace(self, cache_specs=cache_specs)

    def narrowing(self, spec: Any) -> Family:
        """The family with an indexer's keys in MXFP4. Calls of ``cache_specs`` raise `ConfigError` where the model
        cannot."""
        narrow = self.model_class(spec).narrow_keys

        def cache_specs(spec: Any, kv_dtype: str) -> list[CacheSpec | None]:
            usual = self.cache_specs(spec, kv_dtype)
            narrowed = list(narrow(usual))
            if narrowed == usual:
                raise ConfigError(
                    f"kv_dtype fp8_fp4 is for models whose indexer keeps keys in 8 bits, and this {self.name} model "
                    "has none: take fp8", param="kv_dtype"
                )
            return narrowed

        return replace(self, cache_specs=cache_specs)

    def hosting(self, spec: Any, hot_slots: int) -> Family:
        """The family where the device keeps that many entries of each request, and host memory the others. Calls of
        ``cache_specs`` raise `ConfigError` where the model cannot."""
        host = self.model_class(spec).host_caches

        def cache_specs(spec: Any, kv_dtype: str) -> list[CacheSpec | None]:
            hosted = list(host(spec, self.cache_specs(spec, kv_dtype), hot_slots))
            if not any(place is not None and place.hot_slots for place in hosted):
                raise ConfigError(
                    f"hot_slots is for models that select the entries they attend to, and this {self.name} model "
                    "attends to all: leave it out", param="hot_slots"
                )
            return hosted

        return replace(self, cache_specs=cache_specs)

    def build_model(self, spec: Any, build: Build) -> ServedModel:
        """Import the model's class and build it with empty parameters."""
        is_multimodal = isinstance(spec, MultimodalSpec)
        names = self.media.names or self.names if is_multimodal and self.media is not None else self.names
        return self.model_class(spec)(spec, names, build)

    def model_class(self, spec: Any) -> Any:
        """Import the class of a spec's models, a `headrace.layers.model.ServedModel`."""
        return load_target(MULTIMODAL if isinstance(spec, MultimodalSpec) else self.model)
