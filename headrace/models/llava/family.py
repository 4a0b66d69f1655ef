"""LLaVA 1.5: a decoder of the Llama line, or Qwen2, and CLIP or SigLIP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media import MediaFacts
from headrace.layers.media_spec import ImageSpec, MultimodalSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import Activation
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    ACTIVATIONS,
    read_attention,
    read_decoder,
    read_layers,
    read_rope,
    read_window,
    read_windowed_layers,
)
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import (
    IMAGE_ENCODER_NAMES,
    TOWER_RENAMES,
    UNUSED_HEADS,
    image_pixels,
    read_image_encoder,
    read_text_part,
    read_vision_part,
)

TEXT = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "rms_norm_eps": 1e-6,
}
"""transformers' defaults of Llama, which published configs leave out."""


@dataclass(frozen=True)
class ProjectedImageSpec:
    """``last_layer`` of the image encoder is the one whose output is projected."""

    image: ImageSpec
    last_layer: int
    activation: Activation
    projector_bias: bool
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.llava.vision:ProjectedTower"

    @property
    def num_layers(self) -> int:
        return self.image.vision.num_layers


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Raises `ConfigError` for features of several layers, or with the class token."""
    fields, whole = Fields({**TEXT, **read_text_part(config)}), Fields(config)
    kind = fields.choice("model_type", {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}, "llama")
    rope = read_rope(fields, theta=1e4)
    if kind == "qwen2":
        layers, attention = read_windowed_layers(fields, rope), read_attention(fields, qkv_bias=True, output_bias=False)
    else:
        window = read_window(fields, 4096) if kind == "mistral" else 0
        layers, attention = read_layers(fields, rope, window=window), read_attention(fields)
    image, layer = read_image_encoder(read_vision_part(config)), config.get("vision_feature_layer", -2)
    count = image.vision.num_layers
    if type(layer) is not int or not -count <= layer <= count:
        raise ConfigError(
            f"config.json: vision_feature_layer must be one layer of {count}, got {layer!r}",
            param="vision_feature_layer",
        )
    whole.choice("vision_feature_select_strategy", {"default": 0} if image.has_class_token else {"full": 0},
                 "default" if image.has_class_token else "full")
    encoder = ProjectedImageSpec(
        image, layer if layer >= 0 else count + 1 + layer, whole.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        whole.flag("multimodal_projector_bias", True),
    )
    return MultimodalSpec.of(read_decoder(fields, layers, attention=attention), encoder)


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images alone."""
    fields, image = Fields(config), read_image_encoder(read_vision_part(config))
    return MediaFacts(
        token_ids={"image": fields.integer("image_token_index", 32000)}, texts={"image": "<image>"},
        vector_size=Fields({**TEXT, **read_text_part(config)}).integer("hidden_size"),
        pixels=image_pixels(image, image.side**2),
    )


FAMILY = Family(
    name="llava",
    architectures=("LlavaForConditionalGeneration",),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **IMAGE_ENCODER_NAMES,
            "multi_modal_projector.linear_1": "encoder.projector.up",
            "multi_modal_projector.linear_2": "encoder.projector.down",
        },
        renames=TOWER_RENAMES,
        ignored=UNUSED_HEADS,
    ),
    media=FamilyMedia(read_media),
)
