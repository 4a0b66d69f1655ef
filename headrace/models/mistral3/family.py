"""Mistral 3 for text and images: Mistral's decoder and Pixtral's vision encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media import MediaFacts, SizedPixels
from headrace.layers.media_spec import MultimodalSpec, VisionSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import Activation, MlpSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import ACTIVATIONS, read_decoder, read_layers, read_rope, read_window
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import TOWER_RENAMES, read_text_part, read_vision_part

TEXT = {
    "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "vocab_size": 131072,
    "rms_norm_eps": 1e-5,
}
VISION = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
}
PATCH, MERGE = 14, 2
"""transformers' defaults."""


@dataclass(frozen=True)
class MergedVisionSpec:
    """``merge`` x ``merge`` patches make a vector; ``norm_eps`` is that of the projector's norm."""

    vision: VisionSpec
    patch_size: int
    merge: int
    theta: float
    norm_eps: float
    activation: Activation
    projector_bias: bool
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.mistral3.vision:MergedTower"

    @property
    def num_layers(self) -> int:
        return self.vision.num_layers


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Raises `ConfigError` for vision encoders other than Pixtral's, and for features of inner layers."""
    fields, whole = Fields({**TEXT, **read_text_part(config)}), Fields(config)
    layers = read_layers(fields, read_rope(fields, theta=1e9), window=read_window(fields))
    vision = Fields({**VISION, **read_vision_part(config).config})
    vision.choice("model_type", {"pixtral": 0}, "pixtral")
    if config.get("vision_feature_layer", -1) != -1:
        raise ConfigError("config.json: vision_feature_layer must be -1", param="vision_feature_layer")
    patch = vision.integer("patch_size", PATCH)
    activation = vision.choice("hidden_act", {"gelu": "gelu", "silu": "silu"}, "gelu")
    spec = VisionSpec(
        vision.integer("hidden_size"), vision.integer("num_hidden_layers"), vision.integer("num_attention_heads"),
        input_size=vision.integer("num_channels", 3) * patch**2,
        mlp=MlpSpec(vision.integer("intermediate_size"), "gelu" if activation == "gelu" else "silu"),
        norm=NormSpec(1e-5), patch_bias=False, qkv_bias=False, output_bias=False,
    )
    theta = Fields(vision.section("rope_parameters")).positive("rope_theta", vision.positive("rope_theta", 1e4))
    encoder = MergedVisionSpec(
        spec, patch, whole.integer("spatial_merge_size", MERGE), theta, fields.number("rms_norm_eps"),
        whole.choice("projector_hidden_act", ACTIVATIONS, "gelu"), whole.flag("multimodal_projector_bias", False),
    )
    return MultimodalSpec.of(read_decoder(fields, layers), encoder)


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images alone; between the rows of an image stand other tokens."""
    vision = read_vision_part(config)
    pixels = SizedPixels(
        vision.integer("num_channels", 3), vision.integer("patch_size", PATCH),
        Fields(config).integer("spatial_merge_size", MERGE),
    )
    return MediaFacts(
        token_ids={"image": Fields(config).integer("image_token_index", 10)}, texts={"image": "[IMG]"},
        vector_size=Fields({**TEXT, **read_text_part(config)}).integer("hidden_size"), pixels=pixels,
    )


FAMILY = Family(
    name="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            "vision_tower.patch_conv": "encoder.patches",
            "vision_tower.ln_pre": "encoder.first_norm",
            "vision_tower.transformer.layers.{i}.attention_norm": "encoder.blocks.{i}.attention_norm",
            "vision_tower.transformer.layers.{i}.ffn_norm": "encoder.blocks.{i}.mlp_norm",
            "vision_tower.transformer.layers.{i}.attention.q_proj": "encoder.blocks.{i}.qkv#q",
            "vision_tower.transformer.layers.{i}.attention.k_proj": "encoder.blocks.{i}.qkv#k",
            "vision_tower.transformer.layers.{i}.attention.v_proj": "encoder.blocks.{i}.qkv#v",
            "vision_tower.transformer.layers.{i}.attention.o_proj": "encoder.blocks.{i}.output",
            "vision_tower.transformer.layers.{i}.feed_forward.gate_proj": "encoder.blocks.{i}.mlp.gate_up#gate",
            "vision_tower.transformer.layers.{i}.feed_forward.up_proj": "encoder.blocks.{i}.mlp.gate_up#up",
            "vision_tower.transformer.layers.{i}.feed_forward.down_proj": "encoder.blocks.{i}.mlp.down",
            "multi_modal_projector.norm": "encoder.norm",
            "multi_modal_projector.patch_merger.merging_layer": "encoder.merger",
            "multi_modal_projector.linear_1": "encoder.up",
            "multi_modal_projector.linear_2": "encoder.down",
        },
        renames=TOWER_RENAMES,
    ),
    tool_parser="mistral",
    media=FamilyMedia(read_media),
)
