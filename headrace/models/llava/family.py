"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a decoder of the Llama line, and CLIP, SigLIP or (Pixtral 12B) Pixtral's
vision encoder. The later two cut images into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.media import MOST_SIDE
from headrace.base.media_facts import MediaFacts, PixelLayout, TiledPixels
from headrace.layers.media_spec import ImageSpec, MultimodalSpec, SizedImageSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import Activation
from headrace.models.config_fields import Fields, architecture_of
from headrace.models.config_specs import ACTIVATIONS
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import (
    IMAGE_ENCODER_NAMES,
    PIXTRAL_NAMES,
    PROJECTOR_NAMES,
    TOWER_RENAMES,
    UNUSED_HEADS,
    image_pixels,
    read_image_encoder,
    read_pixtral,
    read_text_decoder,
    read_text_fields,
    read_vision_part,
    sized_pixels,
)

NEXT, ONEVISION = "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"
CLIP = {
    "model_type": "clip_vision_model", "intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14,
    "image_size": 336, "num_hidden_layers": 24, "num_attention_heads": 16,
}
SIGLIP = {
    "model_type": "siglip_vision_model", "intermediate_size": 4304, "hidden_size": 1152, "patch_size": 14,
    "image_size": 384, "num_hidden_layers": 26, "num_attention_heads": 16,
}
"""transformers' defaults, of configs without any field of the vision part."""
NEXT_RESOLUTIONS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
MOST_RESOLUTIONS = 4096


@dataclass(frozen=True)
class ProjectedImageSpec:
    """``last_layer`` of the image encoder is the one whose output is projected. ``tiles``: how images are cut, None
    where they are not."""

    image: ImageSpec | SizedImageSpec
    last_layer: int
    activation: Activation
    projector_bias: bool
    tiles: TiledPixels | None = None
    num_parts: int = 1

    @property
    def tower(self) -> str:
        kind = "SizedTower" if isinstance(self.image, SizedImageSpec) else "ProjectedTower"
        return f"headrace.models.llava.vision:{kind}"


@dataclass(frozen=True)
class _Defaults:
    """What differs among the three where a config leaves it out."""

    vision: dict[str, Any]
    feature_layer: int
    select: str
    image_token: int
    text: str


DEFAULTS = {
    "": _Defaults(CLIP, -2, "default", 32000, "llama"), NEXT: _Defaults(CLIP, -2, "default", 32000, "llama"),
    ONEVISION: _Defaults(SIGLIP, -1, "full", 151646, "qwen2"),
}


def _defaults(config: dict[str, Any]) -> _Defaults:
    return DEFAULTS.get(architecture_of(config), DEFAULTS[""])


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Raises `ConfigError` for features of several layers, or with the class token."""
    whole, image = Fields(config), _read_image(config)
    layer, count = config.get("vision_feature_layer", _defaults(config).feature_layer), image.vision.num_layers
    if type(layer) is not int or not -count <= layer <= count:
        raise ConfigError(
            f"config.json: vision_feature_layer must be one layer of {count}, got {layer!r}",
            param="vision_feature_layer",
        )
    has_class_token = isinstance(image, ImageSpec) and image.has_class_token
    wanted = "default" if has_class_token else "full"
    whole.choice("vision_feature_select_strategy", {wanted: 0}, _defaults(config).select)
    if isinstance(image, SizedImageSpec) and layer not in (-1, count):
        raise ConfigError("config.json: vision_feature_layer must be -1", param="vision_feature_layer")
    encoder = ProjectedImageSpec(
        image, layer if layer >= 0 else count + 1 + layer, whole.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        whole.flag("multimodal_projector_bias", True), _read_tiles(config, image),
    )
    return MultimodalSpec.of(read_text_decoder(read_text_fields(config, _defaults(config).text)), encoder)


def _read_image(config: dict[str, Any]) -> ImageSpec | SizedImageSpec:
    vision = read_vision_part(config)
    if vision.config.get("model_type") == "pixtral":
        return read_pixtral(vision)
    return read_image_encoder(vision if vision.config else Fields(_defaults(config).vision))


def _read_tiles(config: dict[str, Any], image: ImageSpec | SizedImageSpec) -> TiledPixels | None:
    architecture = architecture_of(config)
    if architecture not in (NEXT, ONEVISION) or isinstance(image, SizedImageSpec):
        return None
    size, most = image.image_size, 0
    sizes = range(size, 7 * size, size)
    known = NEXT_RESOLUTIONS if architecture == NEXT else [(height, width) for height in sizes for width in sizes]
    given = config.get("image_grid_pinpoints") or known
    if architecture == ONEVISION:
        ratio = str(config.get("vision_aspect_ratio") or "anyres_max_9")
        number = ratio.removeprefix("anyres_max_")
        if not number.isdecimal() or not 0 < int(number) <= MOST_RESOLUTIONS:
            raise ConfigError(
                f"config.json: vision_aspect_ratio must be anyres_max_ and a number, got {ratio!r}",
                param="vision_aspect_ratio",
            )
        most = int(number)
    are_pairs = isinstance(given, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given)
    resolutions = [(pair[0], pair[1]) for pair in given] if are_pairs else []
    lengths = [length for pair in resolutions for length in pair]
    are_tiled = all(type(each) is int and 0 < each <= MOST_SIDE and each % size == 0 for each in lengths)
    if not are_tiled or not 0 < len(resolutions) <= MOST_RESOLUTIONS:
        raise ConfigError(
            f"config.json: image_grid_pinpoints must be pairs of multiples of {size} pixels",
            param="image_grid_pinpoints",
        )
    return TiledPixels(
        image.vision.input_size // image.patch_size**2, size, image.side, resolutions, most
    )


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images alone."""
    image = _read_image(config)
    tiles = _read_tiles(config, image)
    pixels: PixelLayout
    if isinstance(image, SizedImageSpec):
        pixels, mark = sized_pixels(image, 1), "[IMG]"
    else:
        pixels, mark = tiles or image_pixels(image, image.side**2), "<image>"
    token = Fields(config).integer(
        "image_token_index", Fields(config).integer("image_token_id", _defaults(config).image_token)
    )
    size = read_text_fields(config, _defaults(config).text).integer("hidden_size")
    return MediaFacts(token_ids={"image": token}, texts={"image": mark}, vector_size=size, pixels=pixels)


FAMILY = Family(
    name="llava",
    architectures=("LlavaForConditionalGeneration", NEXT, ONEVISION),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES, **IMAGE_ENCODER_NAMES, **PIXTRAL_NAMES, **PROJECTOR_NAMES,
            "image_newline": "encoder.newline",
        },
        renames={**TOWER_RENAMES, "model.image_newline": "image_newline"},
        ignored=UNUSED_HEADS,
    ),
    media=FamilyMedia(read_media),
)
