"""`DecoderSpec` and `EncoderSpec`: everything by which one transformer differs from another, as plain numbers.
Torch-free.

A spec type of attention or MLP names the class that computes it (``branch``), imported when a model is built. A family
or an out-of-tree package adds a type by declaring such a dataclass; no table here has to list it.
Not here: names of families and of checkpoint tensors (``models/``), and tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.parallel.division import Divisible, Division

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled for long contexts; fields that ``kind`` does not use keep their default.

    ``original_max_position`` is the context length before scaling. ``attention_factor`` multiplies cos and sin
    (None: the formula's own). ``short_factor`` and ``long_factor`` divide the frequencies under ``longrope``.
    ``query_growth`` b multiplies queries at position p by ``1 + b * ln(1 + floor(p / original_max_position))``.
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
    query_growth: float = 0.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first ``rotary_dim`` dims of each head. ``interleaved`` rotates the pairs (0, 1), (2,
    3)... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1)... Layers with equal specs share one table.

    ``sections``: how many frequencies rotate by a token's position in time, height and width (none: it has one
    position), one axis after the other or, with ``alternates_sections``, in turn as long as an axis has any, time then
    having the rest."""

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: RopeScaling | None = None
    sections: tuple[int, ...] = ()
    alternates_sections: bool = False


class AttentionKind(Protocol):
    """A spec type for attention, or for a layer used instead of it. ``branch`` is ``"module:Class"`` of a
    `headrace.layers.self_attention.AttentionLayer`."""

    @property
    def branch(self) -> str: ...

    def cache_spec(self, layer: LayerSpec, kv_dtype: str) -> CacheSpec | None:
        """What a layer caches between steps; None if it has no cache."""


class MlpKind(Protocol):
    """A spec type for an MLP. ``branch`` is ``"module:Class"`` of a `headrace.layers.residual.Branch`, built as
    ``Class(spec, hidden_size, build)``."""

    @property
    def branch(self) -> str: ...


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention. ``scale`` multiplies q.k. ``qk_norm`` normalises queries and keys before rotation, per
    head or over all heads together (``full``), or per head after it (``rotated``), by RMS norms; ``layer`` is a layer
    norm per head before it, each with weights of its own. ``sinks``: each head has a learned logit that takes part in
    its softmax and has no value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full", "rotated", "layer"] = "none"
    sinks: bool = False

    branch: ClassVar[str] = "headrace.layers.self_attention:Attention"

    def cache_spec(self, layer: LayerSpec, kv_dtype: str) -> CacheSpec:
        """``sliding_window`` where the layer has a window, else ``full``."""
        return CacheSpec(
            kind="sliding_window" if layer.window else "full", num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            value_dim=self.head_dim, dtype=kv_dtype, window=layer.window,
        )

    def check_division(self, division: Division) -> None:
        """See `Divisible`, here and below."""
        division.check_heads(self.num_heads, self.num_kv_heads)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention. Keys and values of all heads are projected up from one cached latent of
    ``kv_lora_rank`` dims per token; all heads share ``qk_rope_head_dim`` more key dims, which are rotated. A query head
    has ``qk_nope_head_dim`` dims without rotation and ``qk_rope_head_dim`` with it, a value head ``v_head_dim``.
    Queries are projected up from ``q_lora_rank`` dims (0: from the hidden state). DeepSeek-V2, arXiv:2405.04434."""

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int
    scale: float
    norm_eps: float = 1e-6

    branch: ClassVar[str] = "headrace.layers.latent_attention:LatentAttention"

    def cache_spec(self, layer: LayerSpec, kv_dtype: str) -> CacheSpec:
        """One row a token: the latent, then the rotated dims; values are the latent."""
        return CacheSpec("mla", 1, self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank, kv_dtype)

    def check_division(self, division: Division) -> None:
        """All ranks cache the latent."""
        division.check_heads(self.num_heads, 1)


class SelectingAttention(ABC):
    """Attention to entries that it selects, so that most of its cache may be in host memory."""

    @abstractmethod
    def host_cache(self, place: CacheSpec, hot_slots: int) -> CacheSpec:
        """What is cached where the device keeps ``hot_slots`` entries of each request; ``place`` is what is cached
        else. Raises `ConfigError` for fewer than it selects."""


@dataclass(frozen=True)
class SwigluClamp:
    """SwiGLU with bounded inputs: ``g * sigmoid(alpha * g) * (u + up_offset)``, where g is the gate's output, at most
    ``limit``, and u the up projection's, between ``-limit`` and ``limit``."""

    limit: float
    alpha: float = 1.0
    up_offset: float = 0.0


@dataclass(frozen=True)
class MlpSpec:
    """``down(activation(gate(x)) * up(x))`` where ``gated``, else ``down(activation(up(x)))``. ``clamp`` replaces the
    activation. A gated MLP takes ``silu`` and ``gelu_tanh``; ``relu2`` is the square of ReLU."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    clamp: SwigluClamp | None = None
    gated: bool = True

    @property
    def branch(self) -> str:
        return "headrace.layers.mlp:GatedMlp" if self.gated else "headrace.layers.mlp:Mlp"

    def check_division(self, division: Division) -> None:
        """See `Divisible`."""
        division.check_dims(self.intermediate_size)


@dataclass(frozen=True)
class RoutingSpec:
    """How each token is routed to ``top_k`` of ``num_experts``.

    ``score`` is the function from logits to scores. The top k experts are those with the highest scores plus a learned
    bias if ``choice_bias`` is set (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), among the best ``top_groups`` of
    ``num_groups`` groups; a group's score is the sum of its best ``group_best``. The weights of the chosen experts are
    their scores without that bias: ``renormalise`` divides them by their sum, ``scale`` multiplies them. ``bias``: the
    logits have one. ``in_float32``: logits are computed in float32.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    bias: bool = False
    choice_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    in_float32: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: each token goes through its top k experts and, if there is one, the ``shared`` MLP.
    ``shared_gate``: the sigmoid of a product with each token multiplies what that MLP yields for it."""

    routing: RoutingSpec
    expert: MlpSpec
    shared: MlpSpec | None = None
    shared_gate: bool = False

    branch: ClassVar[str] = "headrace.layers.moe.layer:MoeMlp"

    def check_division(self, division: Division) -> None:
        """See `Divisible`."""
        division.check_experts(self.routing.num_experts, self.expert.intermediate_size)
        if self.shared is not None:
            self.shared.check_division(division)


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer: the attention window in tokens (0: all), the rotary embedding (None: no
    rotation), the MLP and the attention (None: the decoder's). ``follows``: it needs what an earlier layer has left, so
    no pipeline stage begins with it."""

    window: int
    rope: RopeSpec | None
    mlp: MlpKind | None = None
    attention: AttentionKind | None = None
    follows: bool = False


@dataclass(frozen=True)
class NormSpec:
    """RMS norms or layer norms (these with a ``bias`` or without): multiply by ``weight + offset``; placed before each
    branch, after it (before its output is added to the residual), or both."""

    eps: float
    offset: float = 0.0
    before: bool = True
    after: bool = False
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False


@dataclass(frozen=True)
class VocabularySpec:
    """Token embedding and head. ``tied``: both are one matrix. Embeddings are multiplied by ``embedding_scale``, logits
    divided by ``logits_divisor`` and then soft-capped (0: not). ``head_bias``: the head has one."""

    size: int
    tied: bool
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    softcap: float = 0.0
    head_bias: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. ``max_model_len`` is the longest context the checkpoint claims, in tokens.
    ``attention`` and ``mlp`` are those of every layer that names no other. ``residual_scale`` multiplies each branch
    before it is added to the residual. ``num_classes``: outputs of a classifier in place of the vocabulary's head
    (None: the vocabulary's; 0: no head).

    ``block``: "sequential" is attention, then MLP; in "parallel" ones both read the same residual and both are added to
    it, each through a norm of its own, or through one (``parallel_one_norm``)."""

    hidden_size: int
    max_model_len: int
    vocabulary: VocabularySpec
    attention: AttentionKind
    mlp: MlpKind
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    residual_scale: float = 1.0
    num_classes: int | None = None
    block: Literal["sequential", "parallel", "parallel_one_norm"] = "sequential"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def stage_begins(self) -> list[int]:
        """The layers that a pipeline stage may begin with, in order: those that need nothing of an earlier one but its
        hidden states."""
        return [i for i, layer in enumerate(self.layers) if not layer.follows]

    def check_division(self, division: Division) -> None:
        """See `Divisible`."""
        division.check_vocabulary(self.vocab_size)
        mlps = {layer.mlp or self.mlp for layer in self.layers}
        if all(isinstance(mlp, MlpSpec) for mlp in mlps):
            division.check_has_experts(0)
        for part in (*{layer.attention or self.attention for layer in self.layers}, *mlps):
            if isinstance(part, Divisible):
                part.check_division(division)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size


def decoder_cache_specs(spec: DecoderSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """One `CacheSpec` per layer, as its attention declares it. Raises `ConfigError` for a type no pool holds."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {kv_dtype}: this model keeps keys and values in {', '.join(KV_DTYPES)}", param="kv_dtype"
        )
    return [(layer.attention or spec.attention).cache_spec(layer, kv_dtype) for layer in spec.layers]


@dataclass(frozen=True)
class EncoderTables:
    """The embeddings that are added up for each token: words, positions (the first token has number
    ``first_position``), and which of ``num_kinds`` texts of a pair it belongs to."""

    vocab_size: int
    num_positions: int
    first_position: int
    num_kinds: int


@dataclass(frozen=True)
class EncoderSpec:
    """A transformer with bidirectional attention and a norm after each branch. ``mlp`` has no gate.
    ``num_classes`` is 0 without a classifier. ``norm_eps`` is that of the layer norms."""

    hidden_size: int
    num_heads: int
    num_layers: int
    mlp: MlpSpec
    norm_eps: float
    tables: EncoderTables
    num_classes: int = 0

    @property
    def vocab_size(self) -> int:
        return self.tables.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens for which there is a position embedding."""
        return self.tables.num_positions - self.tables.first_position

    def check_division(self, division: Division) -> None:
        """See `Divisible`."""
        division.check_has_experts(0)
        division.check_heads(self.num_heads, self.num_heads)
        self.mlp.check_division(division)


def encoder_cache_specs(spec: EncoderSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """No layer has a cache: a text is computed in one step."""
    return [None] * spec.num_layers
