"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import GgufNaming
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields, read_num_layers
from headrace.models.config_specs import read_decoder, read_rope, read_vocabulary, read_windowed_layers
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``no_rope_layers`` has 0 for layers that are not rotated, 1 for the others. The former have the window, if there
    is one and ``layer_types`` does not say otherwise."""
    fields = Fields({**DEFAULTS, **config})
    are_rotated = _read_rotated(fields)
    layers = read_windowed_layers(
        fields, read_rope(fields, theta=2e6), has_window=lambda i: not are_rotated[i], length=0
    )
    layers = tuple(
        layer if is_rotated else replace(layer, rope=None)
        for layer, is_rotated in zip(layers, are_rotated, strict=True)
    )
    return read_decoder(fields, layers, vocabulary=read_vocabulary(fields, tied=True))


def _read_rotated(fields: Fields) -> list[bool]:
    num_layers, interval = read_num_layers(fields), fields.integer("no_rope_layer_interval", 4)
    stated = fields.config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    if not isinstance(stated, list) or len(stated) < num_layers:
        raise ConfigError(
            f"config.json: no_rope_layers must have a number for each of {num_layers} layers, got {stated!r:.200}",
            param="no_rope_layers",
        )
    return [bool(number) for number in stated[:num_layers]]


FAMILY = Family(
    name="smollm3",
    architectures=decoder_architectures("SmolLM3"),
    read_config=read_config,
    gguf_architectures=("smollm3",),
    gguf_config=partial(read_gguf_config, architecture="SmolLM3ForCausalLM"),
    gguf_naming=GgufNaming(is_rotary_interleaved=True),
    tool_parser="hermes",
)
