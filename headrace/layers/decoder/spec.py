"""`DecoderSpec`: all that tells one decoder-only transformer from another, as plain numbers. Torch-free.

Refuses: names of families and of checkpoint tensors (``models/``), and tensors (``decoder.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.base.cache import CacheSpec

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts; fields that ``kind`` does not use keep their default.

    ``original_max_position`` is the context length before stretching. ``attention_factor`` multiplies cos and sin
    (None: the formula's own). ``short_factor`` and ``long_factor`` divide the frequencies under ``longrope``.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first ``rotary_dim`` dims of each head. ``interleaved`` rotates the pairs (0, 1), (2, 3)...
    instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1)... Layers with equal specs share one table."""

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer: the attention window in tokens (0: all) and the rotary embedding (None: no
    rotation)."""

    window: int
    rope: RopeSpec | None


@dataclass(frozen=True)
class AttentionSpec:
    """Heads of every layer. ``scale`` multiplies q.k. ``qk_norm`` normalises queries and keys per head, or over the full
    width of all heads (``full``), before rotation."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"


@dataclass(frozen=True)
class MlpSpec:
    """Gated MLP: ``down(activation(gate(x)) * up(x))``, ``width`` wide inside."""

    width: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bias: bool = False


@dataclass(frozen=True)
class NormSpec:
    """RMS norms: multiply by ``weight + offset``; placed before each branch, after it (before the residual is added),
    or both."""

    eps: float
    offset: float = 0.0
    before: bool = True
    after: bool = False


@dataclass(frozen=True)
class VocabularySpec:
    """Token embedding and head. ``tied``: both are one matrix. Embeddings are multiplied by ``embedding_scale``, logits
    divided by ``logits_divisor`` and then soft-capped (0: not)."""

    size: int
    tied: bool
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. ``max_model_len`` is the longest context the checkpoint claims, in tokens.
    ``residual_scale`` multiplies each branch before it is added to the residual."""

    width: int
    max_model_len: int
    vocabulary: VocabularySpec
    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    residual_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size


def decoder_cache_specs(spec: DecoderSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """One `CacheSpec` per layer: ``sliding_window`` where the layer has a window, else ``full``."""
    heads = spec.attention
    return [
        CacheSpec(
            kind="sliding_window" if layer.window else "full", num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
            value_dim=heads.head_dim, dtype=kv_dtype, window=layer.window,
        )
        for layer in spec.layers
    ]
