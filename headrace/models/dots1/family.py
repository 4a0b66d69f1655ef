"""dots.llm1: experts as in DeepSeek-V3, plain attention with query and key norms of each head."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import EXPERT_NAMES, SHARED_EXPERT_NAMES, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, LayerSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    add_experts,
    read_attention,
    read_decoder,
    read_rope,
    read_sigmoid_routing,
    read_sliding,
    read_window,
)
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "max_window_layers": 62}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Layers from ``max_window_layers`` on have a sliding window, if there is one."""
    given = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    fields = Fields({**DEFAULTS, **given})
    rope, first = read_rope(fields), fields.count("max_window_layers", 62)
    window = read_window(fields, 4096)
    are_sliding = read_sliding(fields, lambda i: i >= first)
    layers = tuple(LayerSpec(window if is_sliding else 0, rope) for is_sliding in are_sliding)
    return read_decoder(
        fields, add_experts(fields, layers, read_sigmoid_routing(fields)),
        attention=read_attention(fields, qk_norm="head"),
    )


FAMILY = Family(
    name="dots1",
    architectures=decoder_architectures("Dots1"),
    read_config=read_config,
    names=CheckpointNames({**SPLIT_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES}),
    tool_parser="hermes",
)
