"""Gemma 2: Gemma with norms before and after every branch, soft-capped attention and logits, and a sliding window in
every other layer."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames, GgufNaming
from headrace.layers.spec import DecoderSpec, LayerSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_mlp,
    read_rope,
    read_sliding,
    read_vocabulary,
    read_window,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

DEFAULTS = {
    "head_dim": 256, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}
GGUF_KEYS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Soft-caps that are null are none."""
    fields = Fields({**DEFAULTS, **config})
    return read_decoder(
        fields, _read_layers(fields),
        attention=read_attention(
            fields, scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            softcap=fields.number("attn_logit_softcapping", 0.0),
        ),
        mlp=read_mlp(fields, activation="hidden_activation", default="gelu_pytorch_tanh"),
        norm=NormSpec(fields.number("rms_norm_eps", 1e-6), offset=1.0, after=True),
        vocabulary=read_vocabulary(
            fields, tied=True, embedding_scale=fields.integer("hidden_size") ** 0.5,
            softcap=fields.number("final_logit_softcapping", 0.0),
        ),
    )


def _read_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    rope, window = read_rope(fields), read_window(fields, 4096)
    return tuple(
        LayerSpec(window if is_sliding else 0, rope) for is_sliding in read_sliding(fields, lambda i: i % 2 == 0)
    )


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The head is always tied. ``query_pre_attn_scalar``, whose square root divides q.k, is not in the file: it is
    ``head_dim``, but in the 27B model (known by its 46 layers) ``hidden_size`` divided by the number of heads."""
    config = read_gguf_config(metadata, "Gemma2ForCausalLM", keys=GGUF_KEYS)
    is_27b = config["num_hidden_layers"] == 46
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config.get("head_dim", 256)
    return {**config, "tie_word_embeddings": True, "query_pre_attn_scalar": scalar}


FAMILY = Family(
    name="gemma2",
    architectures=decoder_architectures("Gemma2"),
    read_config=read_config,
    names=CheckpointNames({
        **SPLIT_NAMES,
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }),
    gguf_architectures=("gemma2",),
    gguf_config=gguf_config,
    gguf_naming=GgufNaming(norm_offset=1.0),
)
