"""Builds a `DecoderSpec` or `EncoderSpec` from the common fields of config.json, in functions that families combine.
Torch-free. Not here: what only one family needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    EncoderSpec,
    EncoderTables,
    LatentAttentionSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    RopeKind,
    RopeScaling,
    RopeSpec,
    RoutingSpec,
    SwigluClamp,
    VocabularySpec,
)
from headrace.models.config_fields import (
    BARE,
    CLASSIFIERS,
    Fields,
    architecture_of,
    read_num_classes,
    read_num_layers,
)

GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_tanh": "gelu_tanh"
}
ACTIVATIONS: dict[str, Activation] = {
    **GATED_ACTIVATIONS, "gelu": "gelu", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu2": "relu2",
}
ROPE_KINDS: dict[str, RopeKind] = {
    "default": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn",
    "longrope": "longrope", "su": "longrope"
}


# In the functions below, ``special`` are fields of the resulting spec, given by a family instead of read from the
# config.


def read_head_dim(fields: Fields) -> int:
    """``head_dim``, or ``hidden_size`` divided by the number of heads."""
    return fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def read_attention(fields: Fields, **special: Any) -> AttentionSpec:
    """Heads, and biases as ``attention_bias`` says; ``special`` replaces fields of the result."""
    num_heads, head_dim = fields.integer("num_attention_heads"), read_head_dim(fields)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})",
            param="num_key_value_heads"
        )
    has_bias = fields.flag("attention_bias", False)
    usual = dict(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5, qkv_bias=has_bias,
        output_bias=has_bias
    )
    return AttentionSpec(**{**usual, **special})


def read_latent_attention(fields: Fields) -> LatentAttentionSpec:
    """Latent attention as DeepSeek's configs have it. Sets ``head_dim`` in ``fields`` to the dims that are rotated, as
    rotary embeddings are read; raises `ConfigError` for biases."""
    if fields.flag("attention_bias", False):
        raise ConfigError("config.json: attention_bias must be false for latent attention", param="attention_bias")
    qk_nope_head_dim, qk_rope_head_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.config["head_dim"] = qk_rope_head_dim
    # YaRN's attention scale for long contexts is applied to queries and to keys: logits get its square
    rope, sharpening = Fields(read_rope_parameters(fields)), 1.0
    if growth := rope.number("llama_4_scaling_beta", 0.0):
        raise ConfigError(
            f"config.json: llama_4_scaling_beta must be 0 for latent attention, got {growth}",
            param="llama_4_scaling_beta"
        )
    if rope.config.get("rope_type", "default") != "default" and rope.config.get("mscale_all_dim"):
        sharpening = yarn_sharpening(rope.number("factor"), rope.number("mscale_all_dim")) ** 2
    return LatentAttentionSpec(
        fields.integer("num_attention_heads"), qk_nope_head_dim, qk_rope_head_dim, fields.integer("v_head_dim"),
        fields.integer("kv_lora_rank"), fields.integer("q_lora_rank", 0),
        scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * sharpening,
    )


def read_decoder(fields: Fields, layers: tuple[LayerSpec, ...] = (), **special: Any) -> DecoderSpec:
    """The usual decoder: all layers alike, RMS norms before the branches, a gated SiLU MLP, an untied head unless the
    config says otherwise. ``layers`` and ``special`` replace fields of the result. Raises `ConfigError` for attention
    in both directions, which makes an encoder of a decoder."""
    _check_causal(fields)
    layers = layers or read_layers(fields, read_rope(fields))
    usual: dict[str, Callable[[], Any]] = {
        "attention": lambda: read_attention(fields),
        "vocabulary": lambda: read_vocabulary(fields),
        "mlp": lambda: read_mlp(fields, bias=fields.flag("mlp_bias", False)),
        "norm": lambda: NormSpec(fields.number("rms_norm_eps", 1e-6)),
    }
    # Read lazily: a family that gives a section itself may have a config without the usual fields of that section.
    sections = {name: read() for name, read in usual.items() if name not in special}
    return DecoderSpec(
        hidden_size=fields.integer("hidden_size"), max_model_len=_read_max_model_len(fields, layers), layers=layers,
        num_classes=_read_head(fields.config), **sections, **special,
    )


def _check_causal(fields: Fields) -> None:
    for name, wanted in (("is_causal", True), ("use_bidirectional_attention", False)):
        if fields.flag(name, wanted) is not wanted:
            raise ConfigError(
                f"config.json: {name} must be {str(wanted).lower()}; this family serves causal models", param=name
            )


def read_vocabulary(fields: Fields, *, tied: bool = False, **special: Any) -> VocabularySpec:
    """``tied`` where the config does not say; ``special`` sets other fields of the result."""
    return VocabularySpec(fields.integer("vocab_size"), fields.flag("tie_word_embeddings", tied), **special)


def read_mlp(fields: Fields, *, activation: str = "hidden_act", default: str = "silu", **special: Any) -> MlpSpec:
    """Gated unless ``special``, which sets other fields of the result, says otherwise. ``activation`` names the config
    field, ``default`` what it is where left out."""
    known = GATED_ACTIVATIONS if special.get("gated", True) else ACTIVATIONS
    return MlpSpec(fields.integer("intermediate_size"), fields.choice(activation, known, default), **special)


def _read_head(config: dict[str, Any]) -> int | None:
    architecture = architecture_of(config)
    return read_num_classes(config) if architecture.endswith((*CLASSIFIERS, BARE)) else None


def read_moe(
    fields: Fields, num_experts: str, *, intermediate_size: str, bias: bool = False, clamp: SwigluClamp | None = None,
    shared: MlpSpec | None = None, **routing: Any
) -> MoeSpec:
    """A `MoeSpec`; ``num_experts`` and ``intermediate_size`` name the config fields that hold these. ``bias``: router
    and experts have one. ``routing`` sets other fields of the `RoutingSpec`."""
    count, top_k = fields.integer(num_experts), fields.integer("num_experts_per_tok")
    if top_k > count:
        raise ConfigError(
            f"config.json: num_experts_per_tok ({top_k}) must be at most {num_experts} ({count})",
            param="num_experts_per_tok"
        )
    groups, best, counted = (routing.get(name, 1) for name in ("num_groups", "top_groups", "group_best"))
    if count % groups or best > groups or counted > count // groups or top_k > best * (count // groups):
        raise ConfigError(
            f"config.json: num_experts_per_tok ({top_k}) cannot be chosen in topk_group ({best}) of n_group ({groups}) "
            f"groups of {count} experts",
            param="n_group"
        )
    activation = fields.choice("hidden_act", GATED_ACTIVATIONS, "silu")
    expert = MlpSpec(fields.integer(intermediate_size), activation, bias, clamp)
    return MoeSpec(RoutingSpec(count, top_k, bias=bias, **routing), expert, shared)


def read_sigmoid_routing(fields: Fields) -> dict[str, Any]:
    """Routing by sigmoid scores, with a learned bias on the choice that balances the experts' load (DeepSeek-V3)."""
    return dict(
        score="sigmoid", choice_bias=True, renormalise=fields.flag("norm_topk_prob", True),
        num_groups=fields.integer("n_group"), top_groups=fields.integer("topk_group"), group_best=2,
    )


def add_experts(fields: Fields, layers: tuple[LayerSpec, ...], routing: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """The layers with a mixture of experts in all but the first few, and an MLP of all tokens beside it."""
    num_shared, inner = int(fields.config.get("n_shared_experts") or 0), fields.integer("moe_intermediate_size")
    shared = MlpSpec(inner * num_shared, fields.choice("hidden_act", GATED_ACTIVATIONS, "silu")) if num_shared else None
    moe = read_moe(
        fields, "n_routed_experts", intermediate_size="moe_intermediate_size", shared=shared,
        scale=fields.number("routed_scaling_factor", 1.0), in_float32=True, **routing
    )
    first = int(fields.config.get("first_k_dense_replace") or 0)
    return tuple(layer if i < first else replace(layer, mlp=moe) for i, layer in enumerate(layers))


def add_sparse_steps(fields: Fields, layers: tuple[LayerSpec, ...], moe: MoeSpec) -> tuple[LayerSpec, ...]:
    """The layers with a mixture of experts in every ``decoder_sparse_step``-th, but not in those of
    ``mlp_only_layers``."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.config.get("mlp_only_layers") or ()
    return tuple(layer if i in dense or (i + 1) % step else replace(layer, mlp=moe) for i, layer in enumerate(layers))


def _read_max_model_len(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """The longest context, in tokens: ``max_position_embeddings``. With YaRN at least ``original_max_position *
    factor``: many configs add YaRN and leave ``max_position_embeddings`` at the trained length."""
    longest = fields.integer("max_position_embeddings", 2048)
    scalings = {layer.rope.scaling for layer in layers if layer.rope and layer.rope.scaling}
    stretched = [int(s.original_max_position * s.factor) for s in scalings if s.kind == "yarn"]
    return max([longest, *stretched])


def read_layers(fields: Fields, rope: RopeSpec | None, *, window: int = 0) -> tuple[LayerSpec, ...]:
    """All layers alike."""
    return (LayerSpec(window, rope),) * read_num_layers(fields)


def read_windowed_layers(
    fields: Fields, rope: RopeSpec | None, *, has_window: Callable[[int], bool] | None = None, length: int = 4096
) -> tuple[LayerSpec, ...]:
    """Layers have a window only if ``use_sliding_window`` is set: those that ``layer_types`` names or, in configs older
    than that field, those for whose number ``has_window`` holds, by default from ``max_window_layers`` on. ``length``:
    of the window in tokens where a config states none."""
    if not fields.flag("use_sliding_window", False):
        return read_layers(fields, rope)
    first, window = fields.count("max_window_layers", 28), read_window(fields, length)
    are_sliding = read_sliding(fields, has_window or (lambda i: i >= first))
    return tuple(LayerSpec(window if is_sliding else 0, rope) for is_sliding in are_sliding)


def read_sliding(fields: Fields, default: Callable[[int], bool]) -> list[bool]:
    """Whether each layer has the sliding window: as ``layer_types`` says, or by its number."""
    num_layers, types = read_num_layers(fields), fields.config.get("layer_types")
    if not types:
        return [default(i) for i in range(num_layers)]
    if (
        not isinstance(types, list) or len(types) != num_layers
        or not set(types) <= {"full_attention", "sliding_attention"}
    ):
        raise ConfigError(
            f"config.json: layer_types must be {num_layers} of full_attention and sliding_attention, got "
            f"{types!r:.200}",
            param="layer_types",
        )
    return [kind == "sliding_attention" for kind in types]


def read_window(fields: Fields, default: int = 0) -> int:
    """``sliding_window`` in tokens (null: none; absent: ``default``). 0, no window, also if it covers the longest
    context: full attention gives the same results and shares one cache group with the other layers."""
    window = fields.count("sliding_window", 0 if "sliding_window" in fields.config else default)
    return 0 if window >= fields.integer("max_position_embeddings", 2048) else window


def read_rope(fields: Fields, *, theta: float = 10000.0, partial: float = 1.0, interleaved: bool = False) -> RopeSpec:
    """From ``rope_parameters`` (newer files) or ``rope_theta`` and ``rope_scaling`` (older ones); the arguments are the
    family's defaults."""
    parameters = {name: fields.config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    parameters |= read_rope_parameters(fields)
    return make_rope(fields, parameters, theta=theta, partial=partial, interleaved=interleaved)


def read_rope_parameters(fields: Fields, section: str | None = None) -> dict[str, Any]:
    """``rope_parameters``, or a section of it, overridden by ``rope_scaling``: if a config has both, the latter was
    added later to extend the context."""
    parameters = fields.section("rope_parameters")
    parts = (Fields(parameters).section(section) if section else parameters, fields.section("rope_scaling"))
    return {
        name: value for part in parts for name,
        value in {"rope_type": part.get("type"), **part}.items() if value is not None
    }


def make_rope(
    fields: Fields, parameters: dict[str, Any], *, theta: float, partial: float = 1.0, interleaved: bool = False
) -> RopeSpec:
    """A `RopeSpec` from one dict of parameters."""
    rope = Fields(parameters)
    rotary_dim = int(read_head_dim(fields) * rope.number("partial_rotary_factor", partial))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"config.json: head_dim and partial_rotary_factor rotate {rotary_dim} dims; it must be an even number",
            param="partial_rotary_factor"
        )
    return RopeSpec(
        rope.positive("rope_theta", theta), rotary_dim, interleaved, _read_scaling(fields, rope, rotary_dim)
    )


def _read_scaling(fields: Fields, rope: Fields, rotary_dim: int) -> RopeScaling | None:
    # Older configs say `type`. The original length may stand beside the scaling (Phi-3) or inside it.
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", ROPE_KINDS, "default")
    growth = rope.number("llama_4_scaling_beta", 0.0)
    if kind == "default" and not growth:
        return None
    longest = fields.integer("max_position_embeddings", 2048)
    original = fields.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", longest)
    )
    usual_factors = {"yarn": longest / original, "longrope": longest / original, "default": 1.0}
    factor = rope.positive("factor", usual_factors.get(kind))
    usual = RopeScaling(kind, factor, original)
    return RopeScaling(
        kind, factor, original, attention_factor=_read_attention_factor(rope, factor),
        low_freq_factor=rope.number("low_freq_factor", usual.low_freq_factor),
        high_freq_factor=rope.number("high_freq_factor", usual.high_freq_factor),
        beta_fast=rope.number("beta_fast", usual.beta_fast), beta_slow=rope.number("beta_slow", usual.beta_slow),
        truncate=rope.flag("truncate", usual.truncate),
        short_factor=_read_factors(rope, "short_factor", rotary_dim),
        long_factor=_read_factors(rope, "long_factor", rotary_dim),
        query_growth=growth,
    )


def _read_attention_factor(rope: Fields, factor: float) -> float | None:
    """``attention_factor`` if given; else, if the config has both ``mscale`` and ``mscale_all_dim`` (DeepSeek), the
    quotient of their YaRN scales; else None."""
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    if not rope.config.get("mscale") or not rope.config.get("mscale_all_dim"):
        return None
    of_rotation, of_all = (yarn_sharpening(factor, rope.number(name)) for name in ("mscale", "mscale_all_dim"))
    return of_rotation / of_all


def yarn_sharpening(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention scale ``0.1 * weight * ln(factor) + 1``, 1 without extension. Peng et al., arXiv:2309.00071,
    equation 22."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _read_factors(rope: Fields, name: str, rotary_dim: int) -> tuple[float, ...]:
    is_wanted = ROPE_KINDS.get(str(rope.config.get("rope_type", rope.config.get("type")))) == "longrope"
    factors = rope.config.get(name) or ()
    if is_wanted and len(factors) != rotary_dim // 2:
        raise ConfigError(f"config.json: {name} must have {rotary_dim // 2} numbers, got {len(factors)}", param=name)
    return tuple(float(f) for f in factors)


def read_encoder(fields: Fields, *, first_position: int, norm_eps: float) -> EncoderSpec:
    """The encoder a config describes; raises `ConfigError` for relative positions and for one made into a decoder."""
    fields.choice("position_embedding_type", {"absolute": "absolute"}, "absolute")
    if fields.flag("is_decoder", False):
        raise ConfigError("config.json: is_decoder must be false; this family serves encoders", param="is_decoder")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})",
            param="num_attention_heads"
        )
    tables = EncoderTables(
        fields.integer("vocab_size"), fields.integer("max_position_embeddings", 512), first_position,
        fields.integer("type_vocab_size", 2),
    )
    return EncoderSpec(
        hidden_size=hidden_size, num_heads=num_heads, num_layers=read_num_layers(fields),
        mlp=read_mlp(fields, default="gelu", bias=True, gated=False),
        norm_eps=fields.number("layer_norm_eps", norm_eps),
        tables=tables,
        num_classes=read_num_classes(fields.config),
    )
