"""GGUF metadata to the config.json fields that families share. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from headrace.base.errors import ConfigError

SHARED_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
"""GGUF key after the architecture's prefix: config.json field."""

EXPERT_KEYS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""For families with a mixture of experts, which may call the fields otherwise."""

SPECIAL_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def read_gguf_config(
    metadata: dict[str, Any], architecture: str, *, keys: dict[str, str] | None = None
) -> dict[str, Any]:
    """The shared fields under ``architecture`` (a Hugging Face name); ``keys`` adds a family's own.

    GGUF does not say whether the head is tied: the caller sets ``tie_word_embeddings`` by whether the file has an
    ``output.weight``.
    """
    prefix = metadata.get("general.architecture")
    if not isinstance(prefix, str):
        raise ConfigError("the GGUF file has no general.architecture", param="general.architecture")
    config: dict[str, Any] = {"architectures": [architecture], "model_type": prefix}
    for key, field in {**SHARED_KEYS, **(keys or {})}.items():
        value = metadata.get(f"{prefix}.{key}")
        if value is not None:
            config[field] = _single(f"{prefix}.{key}", value)
    # the key is optional; a file without it has the token list
    config["vocab_size"] = metadata.get(f"{prefix}.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    for key, field in SPECIAL_TOKENS.items():
        if metadata.get(f"tokenizer.ggml.{key}") is not None:
            config[field] = metadata[f"tokenizer.ggml.{key}"]
    if "head_dim" not in config and isinstance(config.get("hidden_size"), int) and config.get("num_attention_heads"):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]  # whatever a family's own default
    _read_rope(metadata, prefix, config)
    return config


def read_sliding_pattern(metadata: dict[str, Any]) -> dict[str, Any]:
    """The config's fields of which layers have a sliding window: every so many, or a flag for each."""
    pattern = metadata.get(f"{metadata['general.architecture']}.attention.sliding_window_pattern")
    if pattern is None or isinstance(pattern, int):
        return {} if pattern is None else {"sliding_window_pattern": pattern}
    return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]}


def _single(key: str, value: Any) -> Any:
    """A value as a scalar: GGUF may state one per layer, and families here need the same for all. Raises `ConfigError`
    if they differ."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        return value
    if len(set(value)) != 1:
        raise ConfigError(f"{key} differs from layer to layer, which this model family does not serve", param=key)
    return int(value[0]) if isinstance(value[0], Integral) else float(value[0])


def _read_rope(metadata: dict[str, Any], prefix: str, config: dict[str, Any]) -> None:
    rotary_dim, head_dim = metadata.get(f"{prefix}.rope.dimension_count"), config.get("head_dim")
    if rotary_dim and head_dim and rotary_dim < head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    # old files state the factor of linear scaling as scale_linear, without a type
    factor = metadata.get(f"{prefix}.rope.scaling.factor", metadata.get(f"{prefix}.rope.scale_linear"))
    scaling = {
        "rope_type": metadata.get(f"{prefix}.rope.scaling.type", None if factor is None else "linear"),
        "factor": factor,
        "original_max_position_embeddings": metadata.get(f"{prefix}.rope.scaling.original_context_length"),
        "beta_fast": metadata.get(f"{prefix}.rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.get(f"{prefix}.rope.scaling.yarn_beta_slow"),
    }
    if "rope_freqs.weight" in metadata:
        config["rope_scaling"] = divided_frequencies(metadata["rope_freqs.weight"])
    elif scaling["rope_type"] not in (None, "none"):
        config["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}


def divided_frequencies(factors: Sequence[float]) -> dict[str, Any]:
    """Scaling that divides rotary frequency i by ``factors[i]`` at any context length, expressed as ``longrope`` with
    equal short and long factors. GGUF files store the result of llama3's formula as the tensor ``rope_freqs.weight``,
    which the caller has put into the metadata."""
    divisors = [float(factor) for factor in factors]
    return {
        "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": divisors,
        "long_factor": divisors
    }
