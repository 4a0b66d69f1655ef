"""OLMo 2 and 3: norms after the branches and none before, query and key norms over all heads together. OLMo 3 has a
sliding window in three layers of four, and extends the context of the others alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, LayerSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    make_rope,
    read_attention,
    read_decoder,
    read_rope_parameters,
    read_sliding,
    read_window,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config


def read_config(config: dict[str, Any]) -> DecoderSpec:
    is_third = config["architectures"][0].startswith("Olmo3")
    fields = Fields(config)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5), before=False, after=True)
    layers = _read_windowed(fields) if is_third else ()
    return read_decoder(fields, layers, attention=read_attention(fields, qk_norm="full"), norm=norm)


def _read_windowed(fields: Fields) -> tuple[LayerSpec, ...]:
    full, local = (
        make_rope(fields, {"rope_theta": fields.config.get("rope_theta"), **parameters}, theta=500000.0)
        for parameters in (
            read_rope_parameters(fields, "full_attention"),
            Fields(fields.section("rope_parameters")).section("sliding_attention"),
        )
    )
    window = read_window(fields, 4096)
    are_sliding = read_sliding(fields, lambda i: (i + 1) % 4 != 0)
    return tuple(LayerSpec(window, local) if is_sliding else LayerSpec(0, full) for is_sliding in are_sliding)


FAMILY = Family(
    name="olmo2",
    architectures=decoder_architectures("Olmo2", "Olmo3"),
    read_config=read_config,
    names=CheckpointNames({
        **SPLIT_NAMES,
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }),
    gguf_architectures=("olmo2",),
    gguf_config=partial(read_gguf_config, architecture="Olmo2ForCausalLM"),
)
