"""Reads what configs of models for text and images have in common. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.media_facts import ImagePixels, MediaFacts, PatchPixels, SizedPixels
from headrace.layers.media_spec import ImageSpec, SizedImageSpec, VisionSpec
from headrace.layers.spec import DecoderSpec, MlpSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_mlp,
    read_rope,
    read_window,
    read_windowed_layers,
)


def read_text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of ``text_config`` before the config's own, which older files have alone.
    Rope type ``mrope`` is left out, as it says nothing of frequencies."""
    text = {**config, **(config.get("text_config") or {})}
    if "tie_word_embeddings" in config:  # the whole model's word counts
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    for name in ("rope_parameters", "rope_scaling"):
        part = text.get(name)
        if isinstance(part, dict) and "mrope" in (part.get("type"), part.get("rope_type")):
            text[name] = {key: value for key, value in part.items() if key not in ("type", "rope_type")}
    return text


TEXT = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "head_dim": 128},
}
"""transformers' defaults of decoders, which published configs leave out."""


def read_text_fields(config: dict[str, Any], default: str) -> Fields:
    """The fields of a text model of the Llama line with transformers' defaults; ``default`` is its type where the
    config does not say."""
    part = read_text_part(config)
    kind = Fields(config.get("text_config") or {}).choice("model_type", {name: name for name in TEXT}, default)
    common = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
        "rms_norm_eps": 1e-6,
    }
    return Fields({**common, **TEXT[kind], **part, "model_type": kind})


def read_text_decoder(fields: Fields) -> DecoderSpec:
    """A decoder of the Llama line; ``fields`` are those of `read_text_fields`."""
    kind, rope = fields.config["model_type"], read_rope(fields, theta=1e4)
    special: dict[str, dict[str, Any]] = {
        "qwen2": {"qkv_bias": True, "output_bias": False}, "qwen3": {"qk_norm": "head"}
    }
    if kind in special:
        attention = read_attention(fields, **special[kind])
        return read_decoder(fields, read_windowed_layers(fields, rope), attention=attention)
    window = read_window(fields, 4096) if kind == "mistral" else 0
    return read_decoder(fields, read_layers(fields, rope, window=window))


def read_vision_part(config: dict[str, Any]) -> Fields:
    """``vision_config``; raises `ConfigError` without one."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ConfigError(f"config.json: vision_config must be an object, got {vision!r:.200}", param="vision_config")
    return Fields(vision)


def with_sections(
    spec: DecoderSpec, text: Fields, default: tuple[int, ...], *, alternates: bool = False
) -> DecoderSpec:
    """The spec with ``mrope_section`` of its rope parameters in every layer's rotary embedding."""
    parameters = {**text.section("rope_parameters"), **text.section("rope_scaling")}
    sections = tuple(parameters.get("mrope_section") or default)
    rotary_dim = next(layer.rope.rotary_dim for layer in spec.layers if layer.rope is not None)
    if len(sections) != 3 or any(type(size) is not int for size in sections) or sum(sections) != rotary_dim // 2:
        raise ConfigError(
            f"config.json: mrope_section must be three numbers that add up to {rotary_dim // 2}, got {sections}",
            param="mrope_section",
        )
    layers = tuple(
        replace(layer, rope=layer.rope and replace(layer.rope, sections=sections, alternates_sections=alternates))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def read_grid_media(
    config: dict[str, Any], pixels: PatchPixels, *, num_parts: int = 1, images: int = 151655, videos: int = 151656
) -> MediaFacts:
    """Media of the Qwen line: images and videos between their marks."""
    fields = Fields(config)
    hidden_size = Fields(read_text_part(config)).integer("hidden_size")
    marks = "<|vision_start|><|{}_pad|><|vision_end|>"
    return MediaFacts(
        token_ids={
            "image": fields.integer("image_token_id", images), "video": fields.integer("video_token_id", videos)
        },
        texts={"image": marks.format("image"), "video": marks.format("video")}, vector_size=hidden_size * num_parts,
        pixels=pixels,
    )


CLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224,
}
"""transformers' defaults of CLIP and SigLIP."""


def read_image_encoder(vision: Fields) -> ImageSpec:
    """The vision part of a CLIP or SigLIP model."""
    kinds = {"clip_vision_model": True, "siglip_vision_model": False}
    is_clip = vision.choice("model_type", kinds, "clip_vision_model")
    fields = Fields({**CLIP, "patch_size": 32 if is_clip else 16, **vision.config})
    patch = fields.integer("patch_size")
    spec = VisionSpec(
        fields.integer("hidden_size"), fields.integer("num_hidden_layers"), fields.integer("num_attention_heads"),
        input_size=fields.integer("num_channels", 3) * patch**2,
        mlp=read_mlp(fields, default="quick_gelu" if is_clip else "gelu_pytorch_tanh", gated=False, bias=True),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5 if is_clip else 1e-6), kind="layer", bias=True),
        patch_bias=not is_clip,
    )
    return ImageSpec(spec, fields.integer("image_size"), patch, has_class_token=is_clip, first_norm=is_clip)


def image_pixels(image: ImageSpec, num_tokens: int) -> ImagePixels:
    """What such an encoder takes; ``num_tokens`` placeholders stand for an image."""
    return ImagePixels(image.vision.input_size // image.patch_size**2, image.image_size, num_tokens)


PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
"""transformers' defaults of Pixtral's vision encoder."""


def read_pixtral(vision: Fields) -> SizedImageSpec:
    """Pixtral's vision encoder."""
    fields = Fields({**PIXTRAL, **vision.config})
    fields.choice("model_type", {"pixtral": 0}, "pixtral")
    patch = fields.integer("patch_size", 14 if "model_type" not in vision.config else 16)
    activation = fields.choice("hidden_act", {"gelu": "gelu", "silu": "silu"}, "gelu")
    spec = VisionSpec(
        fields.integer("hidden_size"), fields.integer("num_hidden_layers"), fields.integer("num_attention_heads"),
        input_size=fields.integer("num_channels", 3) * patch**2,
        mlp=MlpSpec(fields.integer("intermediate_size"), "gelu" if activation == "gelu" else "silu"),
        norm=NormSpec(1e-5), patch_bias=False, qkv_bias=False, output_bias=False,
    )
    theta = Fields(fields.section("rope_parameters")).positive("rope_theta", fields.positive("rope_theta", 1e4))
    return SizedImageSpec(spec, patch, theta)


def sized_pixels(image: SizedImageSpec, merge: int) -> SizedPixels:
    """What such an encoder takes; ``merge`` x ``merge`` patches have one placeholder."""
    return SizedPixels(image.vision.input_size // image.patch_size**2, image.patch_size, merge)


PIXTRAL_NAMES = {
    "vision_tower.patch_conv": "encoder.sized.patches",
    "vision_tower.ln_pre": "encoder.sized.first_norm",
    "vision_tower.transformer.layers.{i}.attention_norm": "encoder.sized.blocks.{i}.attention_norm",
    "vision_tower.transformer.layers.{i}.ffn_norm": "encoder.sized.blocks.{i}.mlp_norm",
    "vision_tower.transformer.layers.{i}.attention.q_proj": "encoder.sized.blocks.{i}.qkv#q",
    "vision_tower.transformer.layers.{i}.attention.k_proj": "encoder.sized.blocks.{i}.qkv#k",
    "vision_tower.transformer.layers.{i}.attention.v_proj": "encoder.sized.blocks.{i}.qkv#v",
    "vision_tower.transformer.layers.{i}.attention.o_proj": "encoder.sized.blocks.{i}.output",
    "vision_tower.transformer.layers.{i}.feed_forward.gate_proj": "encoder.sized.blocks.{i}.mlp.gate_up#gate",
    "vision_tower.transformer.layers.{i}.feed_forward.up_proj": "encoder.sized.blocks.{i}.mlp.gate_up#up",
    "vision_tower.transformer.layers.{i}.feed_forward.down_proj": "encoder.sized.blocks.{i}.mlp.down",
}
"""To be added to a table: Pixtral's vision encoder beside a decoder."""

PROJECTOR_NAMES = {
    "multi_modal_projector.layer_norm": "encoder.projector.norm",
    "multi_modal_projector.linear_1": "encoder.projector.up",
    "multi_modal_projector.linear_2": "encoder.projector.down",
}
"""To be added to a table: two products between encoder and decoder."""

IMAGE_ENCODER_NAMES = {
    "vision_tower.embeddings.patch_embedding": "encoder.image.patches",
    "vision_tower.embeddings.class_embedding": "encoder.image.class_token",
    "vision_tower.embeddings.position_embedding.weight": "encoder.image.positions",
    "vision_tower.pre_layrnorm": "encoder.image.first_norm",
    "vision_tower.post_layernorm": "encoder.image.last_norm",
    "vision_tower.encoder.layers.{i}.layer_norm1": "encoder.image.blocks.{i}.attention_norm",
    "vision_tower.encoder.layers.{i}.layer_norm2": "encoder.image.blocks.{i}.mlp_norm",
    "vision_tower.encoder.layers.{i}.self_attn.q_proj": "encoder.image.blocks.{i}.qkv#q",
    "vision_tower.encoder.layers.{i}.self_attn.k_proj": "encoder.image.blocks.{i}.qkv#k",
    "vision_tower.encoder.layers.{i}.self_attn.v_proj": "encoder.image.blocks.{i}.qkv#v",
    "vision_tower.encoder.layers.{i}.self_attn.out_proj": "encoder.image.blocks.{i}.output",
    "vision_tower.encoder.layers.{i}.mlp.fc1": "encoder.image.blocks.{i}.mlp.up",
    "vision_tower.encoder.layers.{i}.mlp.fc2": "encoder.image.blocks.{i}.mlp.down",
}
"""To be added to a table: CLIP and SigLIP beside a decoder."""

TOWER_RENAMES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head": "lm_head",
    "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector.",
    "vision_tower.vision_model.": "vision_tower.",
}
"""Names of newer and older files that have a decoder, a vision tower and a projector."""

UNUSED_HEADS = tuple(
    f"{prefix}vision_tower.{part}head." for prefix in ("", "model.") for part in ("", "vision_model.")
)
"""A pooling head of SigLIP, which a decoder does not read."""
