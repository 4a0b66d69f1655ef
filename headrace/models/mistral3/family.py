"""Mistral 3 for text and images: Mistral's decoder and Pixtral's vision encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.layers.media_spec import MultimodalSpec, SizedImageSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import Activation
from headrace.models.config_fields import Fields
from headrace.models.config_specs import ACTIVATIONS, read_decoder, read_layers, read_rope, read_window
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import (
    PIXTRAL_NAMES,
    TOWER_RENAMES,
    read_pixtral,
    read_text_part,
    read_vision_part,
    sized_pixels,
)

TEXT = {
    "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "vocab_size": 131072,
    "rms_norm_eps": 1e-5,
}
MERGE = 2
"""transformers' defaults."""


@dataclass(frozen=True)
class MergedVisionSpec:
    """``merge`` x ``merge`` patches make a vector; ``norm_eps`` is that of the projector's norm."""

    image: SizedImageSpec
    merge: int
    norm_eps: float
    activation: Activation
    projector_bias: bool
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.mistral3.vision:MergedTower"


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Raises `ConfigError` for vision encoders other than Pixtral's, and for features of inner layers."""
    fields, whole = Fields({**TEXT, **read_text_part(config)}), Fields(config)
    layers = read_layers(fields, read_rope(fields, theta=1e9), window=read_window(fields))
    image = read_pixtral(read_vision_part(config))
    if config.get("vision_feature_layer", -1) != -1:
        raise ConfigError("config.json: vision_feature_layer must be -1", param="vision_feature_layer")
    encoder = MergedVisionSpec(
        image, whole.integer("spatial_merge_size", MERGE), fields.number("rms_norm_eps"),
        whole.choice("projector_hidden_act", ACTIVATIONS, "gelu"), whole.flag("multimodal_projector_bias", False),
    )
    return MultimodalSpec.of(read_decoder(fields, layers), encoder)


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images alone; between the rows of an image stand other tokens."""
    pixels = sized_pixels(read_pixtral(read_vision_part(config)), Fields(config).integer("spatial_merge_size", MERGE))
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
            **PIXTRAL_NAMES,
            "multi_modal_projector.norm": "encoder.norm",
            "multi_modal_projector.patch_merger.merging_layer": "encoder.merger",
            "multi_modal_projector.linear_1": "encoder.projector.up",
            "multi_modal_projector.linear_2": "encoder.projector.down",
        },
        renames=TOWER_RENAMES,
    ),
    tool_parser="mistral",
    media=FamilyMedia(read_media),
)
