"""HunYuan dense and A13B: Llama whose queries and keys are normalised per head after the rotation; A13B has experts
beside an MLP of all tokens."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, MlpKind, MlpSpec, RopeSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    make_rope,
    read_attention,
    read_decoder,
    read_head_dim,
    read_layers,
    read_mlp,
    read_moe,
    read_rope,
    read_rope_parameters,
)
from headrace.models.family import Family, decoder_architectures


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Raises `ConfigError` for layers that share keys and values (``use_cla``)."""
    fields = Fields({"rms_norm_eps": 1e-5, **config})
    if fields.flag("use_cla", False):
        raise ConfigError("config.json: use_cla must be false; layers share no keys and values", param="use_cla")
    is_mixture = config["architectures"][0].startswith("HunYuanMoE")
    qk_norm = "rotated" if fields.flag("use_qk_norm", True) else "none"
    return read_decoder(
        fields, read_layers(fields, _read_rope(fields)), attention=read_attention(fields, qk_norm=qk_norm),
        mlp=_read_mixture(fields) if is_mixture else read_mlp(fields, bias=fields.flag("mlp_bias", False)),
    )


def _read_rope(fields: Fields) -> RopeSpec:
    """``dynamic`` scaling with an ``alpha`` stretches the base alone, whatever the length."""
    rope = Fields(read_rope_parameters(fields))
    if "alpha" not in rope or rope.config.get("rope_type", "default") not in ("default", "dynamic"):
        return read_rope(fields)
    head_dim = read_head_dim(fields)
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    theta *= rope.positive("alpha") ** (head_dim / (head_dim - 2))
    return make_rope(fields, {"rope_theta": theta}, theta=theta)


def _read_mixture(fields: Fields) -> MlpKind:
    """Sizes may be given for each layer; they are the same for all."""
    sizes = {
        "num_experts": 1, "moe_topk": 1, "num_shared_expert": 1,
        "moe_intermediate_size": fields.integer("intermediate_size"),
    }
    found = Fields({**fields.config, **{name: _read_single(fields, name, usual) for name, usual in sizes.items()}})
    found.config["num_experts_per_tok"] = found.integer("moe_topk")
    mlp = read_mlp(fields)
    shared = MlpSpec(mlp.intermediate_size * found.integer("num_shared_expert"), mlp.activation)
    return read_moe(
        found, "num_experts", intermediate_size="moe_intermediate_size", shared=shared, renormalise=True,
        in_float32=True,
    )


def _read_single(fields: Fields, name: str, usual: int) -> int:
    value = fields.config.get(name)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise ConfigError(f"config.json: {name} must be the same for all layers, got {value!r:.200}", param=name)
        value = value[0]
    return Fields({name: value}).integer(name, usual)


FAMILY = Family(
    name="hunyuan",
    architectures=decoder_architectures("HunYuanDenseV1", "HunYuanMoEV1"),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **EXPERT_NAMES,
            "model.layers.{i}.mlp.gate.wg": ROUTER,
            "model.layers.{i}.mlp.shared_mlp.gate_proj": "layers.{i}.mlp.shared.gate_up#gate",
            "model.layers.{i}.mlp.shared_mlp.up_proj": "layers.{i}.mlp.shared.gate_up#up",
            "model.layers.{i}.mlp.shared_mlp.down_proj": "layers.{i}.mlp.shared.down",
        },
        renames={".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."},
    ),
)
