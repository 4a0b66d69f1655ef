"""EXAONE 4: norms after the branches and none before, query and key norms of each head. Of a model with a sliding
window, layers with full attention are not rotated."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, LayerSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_rope,
    read_sliding,
    read_window,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config, read_sliding_pattern


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``sliding_window_pattern`` is a number of layers, of which the last has full attention, or a text with an L for
    each layer that has a window and a G for each that has none."""
    fields = Fields({"sliding_window": 4096, **config})
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5), before=False, after=True)
    return read_decoder(fields, _read_layers(fields), attention=read_attention(fields, qk_norm="head"), norm=norm)


def _read_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    rope = read_rope(fields)
    if "sliding_window" not in fields:
        return read_layers(fields, rope)
    pattern = fields.config.get("sliding_window_pattern") or 4
    kinds = pattern if isinstance(pattern, str) else "L" * (fields.integer("sliding_window_pattern", 4) - 1) + "G"
    window = read_window(fields)
    are_sliding = read_sliding(fields, lambda i: kinds[i % len(kinds)] == "L")
    return tuple(LayerSpec(window, rope) if is_sliding else LayerSpec(0, None) for is_sliding in are_sliding)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """A file without a window is of a model without one."""
    config = read_gguf_config(metadata, "Exaone4ForCausalLM")
    return {"sliding_window": None, **config, **read_sliding_pattern(metadata)}


FAMILY = Family(
    name="exaone4",
    architectures=decoder_architectures("Exaone4"),
    read_config=read_config,
    names=CheckpointNames({
        **SPLIT_NAMES,
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }),
    gguf_architectures=("exaone4",),
    gguf_config=gguf_config,
    tool_parser="hermes",
)
