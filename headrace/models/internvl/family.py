"""InternVL 3 in the format of transformers: a decoder of the Llama line and InternViT; large images come in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.layers.media_spec import ImageSpec, MultimodalSpec, VisionSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import Activation, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import ACTIVATIONS, read_mlp
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import (
    PROJECTOR_NAMES,
    TOWER_RENAMES,
    image_pixels,
    read_text_decoder,
    read_text_fields,
    read_vision_part,
)

VISION = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14,
}
"""transformers' defaults."""


@dataclass(frozen=True)
class ShuffledImageSpec:
    """``merge`` x ``merge`` patches make a vector."""

    image: ImageSpec
    merge: int
    activation: Activation
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.internvl.vision:ShuffledTower"


def _square(fields: Fields, name: str) -> int:
    """A size that may be given as a pair of equal numbers."""
    pair = fields.config.get(name)
    value = pair[0] if isinstance(pair, list) and len(pair) == 2 and pair[0] == pair[1] else pair
    return Fields({name: value}).integer(name)


def _read_encoder(config: dict[str, Any]) -> ShuffledImageSpec:
    fields, whole = Fields({**VISION, **read_vision_part(config).config}), Fields(config)
    if not fields.flag("use_absolute_position_embeddings", True):
        raise ConfigError("config.json: use_absolute_position_embeddings must be true", param="vision_config")
    if config.get("vision_feature_layer", -1) != -1:
        raise ConfigError("config.json: vision_feature_layer must be -1", param="vision_feature_layer")
    whole.choice("vision_feature_select_strategy", {"default": 0}, "default")
    patch, has_bias = _square(fields, "patch_size"), fields.flag("attention_bias", False)
    kind = fields.choice("norm_type", {"layer_norm": "layer", "rms_norm": "rms"}, "layer_norm")
    spec = VisionSpec(
        fields.integer("hidden_size"), fields.integer("num_hidden_layers"), fields.integer("num_attention_heads"),
        input_size=fields.integer("num_channels", 3) * patch**2,
        mlp=read_mlp(fields, default="gelu", gated=False, bias=True),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-6), kind="layer" if kind == "layer" else "rms", bias=True),
        qkv_bias=has_bias, qk_norm=fields.flag("use_qk_norm", False), has_scales=True,
    )
    image = ImageSpec(
        spec, _square(fields, "image_size"), patch, has_class_token=True,
        last_norm=not fields.flag("use_mean_pooling", True),
    )
    ratio = whole.positive("downsample_ratio", 0.5)
    merge = round(1 / ratio)
    if not math.isclose(merge * ratio, 1) or image.side % merge:
        raise ConfigError(
            f"config.json: downsample_ratio must be 1 / n, n a divisor of {image.side}; got {ratio}",
            param="downsample_ratio",
        )
    return ShuffledImageSpec(image, merge, whole.choice("projector_hidden_act", ACTIVATIONS, "gelu"))


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Raises `ConfigError` for features of inner layers, or with the class token."""
    return MultimodalSpec.of(read_text_decoder(read_text_fields(config, "qwen2")), _read_encoder(config))


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images alone."""
    encoder = _read_encoder(config)
    return MediaFacts(
        token_ids={"image": Fields(config).integer("image_token_id", 151667)}, texts={"image": "<IMG_CONTEXT>"},
        vector_size=read_text_fields(config, "qwen2").integer("hidden_size"),
        pixels=image_pixels(encoder.image, (encoder.image.side // encoder.merge) ** 2),
    )


_LAYER, _BLOCK = "vision_tower.encoder.layer.{i}", "encoder.image.blocks.{i}"

FAMILY = Family(
    name="internvl",
    architectures=("InternVLForConditionalGeneration",),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **PROJECTOR_NAMES,
            "vision_tower.embeddings.patch_embeddings.projection": "encoder.image.patches",
            "vision_tower.embeddings.cls_token": "encoder.image.class_token",
            "vision_tower.embeddings.position_embeddings": "encoder.image.positions",
            "vision_tower.layernorm": "encoder.image.last_norm",
            f"{_LAYER}.layernorm_before": f"{_BLOCK}.attention_norm",
            f"{_LAYER}.layernorm_after": f"{_BLOCK}.mlp_norm",
            f"{_LAYER}.attention.q_proj": f"{_BLOCK}.qkv#q",
            f"{_LAYER}.attention.k_proj": f"{_BLOCK}.qkv#k",
            f"{_LAYER}.attention.v_proj": f"{_BLOCK}.qkv#v",
            f"{_LAYER}.attention.q_norm": f"{_BLOCK}.q_norm",
            f"{_LAYER}.attention.k_norm": f"{_BLOCK}.k_norm",
            f"{_LAYER}.attention.projection_layer": f"{_BLOCK}.output",
            f"{_LAYER}.lambda_1": f"{_BLOCK}.attention_scale",
            f"{_LAYER}.lambda_2": f"{_BLOCK}.mlp_scale",
            f"{_LAYER}.mlp.fc1": f"{_BLOCK}.mlp.up",
            f"{_LAYER}.mlp.fc2": f"{_BLOCK}.mlp.down",
        },
        renames=TOWER_RENAMES,
        ignored=tuple(f"{prefix}vision_tower.embeddings.mask_token" for prefix in ("", "model.")),
    ),
    tool_parser="hermes",
    media=FamilyMedia(read_media),
)
