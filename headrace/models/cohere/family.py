"""Cohere's Command R (both generations) and Aya: attention and MLP in parallel after one layer norm."""

from __future__ import annotations

from typing import Any

from headrace.layers.spec import DecoderSpec, LayerSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_rope,
    read_sliding,
    read_vocabulary,
    read_window,
)
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 0.0625}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Logits are multiplied by ``logit_scale``. Command R+ alone normalises queries and keys."""
    fields = Fields({**DEFAULTS, **config})
    qk_norm = "layer" if fields.flag("use_qk_norm", False) else "none"
    return read_decoder(
        fields, _read_layers(fields, is_second=config["architectures"][0].startswith("Cohere2")),
        attention=read_attention(fields, qk_norm=qk_norm),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer"),
        vocabulary=read_vocabulary(fields, tied=True, logits_divisor=1.0 / fields.positive("logit_scale")),
        block="parallel_one_norm",
    )


def _read_layers(fields: Fields, *, is_second: bool) -> tuple[LayerSpec, ...]:
    """Cohere2: layers with a sliding window have rotary embeddings; one layer in four has full attention and none."""
    if not is_second:
        return read_layers(fields, read_rope(fields, theta=500000.0, interleaved=True))
    rope, window = read_rope(fields, interleaved=True), read_window(fields, 4096)
    pattern = fields.integer("sliding_window_pattern", 4)
    are_sliding = read_sliding(fields, lambda i: (i + 1) % pattern != 0)
    return tuple(LayerSpec(window, rope) if is_sliding else LayerSpec(0, None) for is_sliding in are_sliding)


FAMILY = Family(
    name="cohere",
    architectures=decoder_architectures("Cohere2", "Cohere"),
    read_config=read_config,
)
