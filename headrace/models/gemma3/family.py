"""Gemma 3, the text part: windowed layers with one full layer in six, each kind with its own rotary base, norms on both
sides of every branch that multiply by ``1 + weight``, scaled embeddings."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec, VocabularySpec, decoder_cache_specs
from headrace.models.family import Family
from headrace.models.gguf_config import read_shared
from headrace.models.reading import (
    ACTIVATIONS,
    Fields,
    check_layer_types,
    make_rope,
    read_attention,
    read_decoder,
    read_num_layers,
    read_rope_parameters,
    read_window,
)

DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 4096,
}
"""Published configs leave out what equals these."""

MULTIMODAL = "Gemma3ForConditionalGeneration"
"""Text and images; the text part is served."""

GGUF_KEYS = {
    "rope.freq_base_swa": "rope_local_base_freq", "final_logit_softcapping": "final_logit_softcapping",
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``attn_logit_softcapping`` is left over from Gemma 2: no published config sets it, and transformers does not
    apply it. Raises `ConfigError` for the bidirectional variant, which is an encoder."""
    fields = Fields({**DEFAULTS, **_text_part(config)})
    if fields.flag("use_bidirectional_attention", False):
        raise ConfigError(
            "config.json: use_bidirectional_attention must be false; this family serves causal models",
            param="use_bidirectional_attention"
        )
    hidden_size, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps", 1e-6)
    return read_decoder(
        fields, _read_layers(fields),
        attention=read_attention(fields, scale=fields.number("query_pre_attn_scalar", 256) ** -0.5, qk_norm="head"),
        mlp=MlpSpec(
            fields.integer("intermediate_size"), fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
        ),
        norm=NormSpec(eps, offset=1.0, before=True, after=True),
        vocabulary=VocabularySpec(
            fields.integer("vocab_size"), tied=fields.flag("tie_word_embeddings", True),
            embedding_scale=hidden_size**0.5,
            softcap=fields.number("final_logit_softcapping", 0.0),
        ),
    )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """A file that describes images too has all that concerns text in a part of its own."""
    if config["architectures"][0] != MULTIMODAL:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: {MULTIMODAL} needs text_config, an object; got {text!r}", param="text_config")
    return {**config, **text}


def _read_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    num_layers, pattern = read_num_layers(fields), fields.integer("sliding_window_pattern", 6)
    types = (
        fields.config.get("layer_types")
        or ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
    )
    check_layer_types(types, num_layers)
    # ``rope_scaling`` is for the full layers alone.
    full = {"rope_theta": fields.config.get("rope_theta"), **read_rope_parameters(fields, "full_attention")}
    local = {
        "rope_theta": fields.config.get("rope_local_base_freq"),
        **Fields(fields.section("rope_parameters")).section("sliding_attention")
    }
    kinds = {
        "full_attention": LayerSpec(0, make_rope(fields, full, theta=1e6)),
        "sliding_attention": LayerSpec(read_window(fields), make_rope(fields, local, theta=1e4)),
    }
    return tuple(kinds[kind] for kind in types)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The head is always tied. The scalar whose root divides the logits is ``head_dim``, but in the 27B model
    ``hidden_size`` divided by the number of heads."""
    config = read_shared(metadata, "Gemma3ForCausalLM", keys=GGUF_KEYS)
    config["tie_word_embeddings"] = True
    is_27b = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if is_27b else config.get("head_dim", 256)
    )
    pattern = metadata.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, int):
        config["sliding_window_pattern"] = pattern
    elif pattern is not None:
        config["layer_types"] = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
    return config


FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", MULTIMODAL),
    read_config=read_config,
    cache_specs=decoder_cache_specs,
    model="headrace.models.gemma3.model:Gemma3Model",
    gguf_architectures=("gemma3",),
    gguf_config=gguf_config,
    gguf_weights="headrace.models.weights.gguf_naming:unit_norm_offset_naming",
    tool_parser="gemma",
)
