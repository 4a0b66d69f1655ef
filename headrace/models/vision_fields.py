"""Reads what configs of models for text and images have in common. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.media import MediaFacts
from headrace.layers.spec import DecoderSpec
from headrace.models.config_fields import Fields


def read_text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of ``text_config`` before the config's own, which older files have alone.
    Rope type ``mrope`` is left out, as it says nothing of frequencies."""
    text = {**config, **(config.get("text_config") or {})}
    for name in ("rope_parameters", "rope_scaling"):
        part = text.get(name)
        if isinstance(part, dict) and "mrope" in (part.get("type"), part.get("rope_type")):
            text[name] = {key: value for key, value in part.items() if key not in ("type", "rope_type")}
    return text


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
    config: dict[str, Any], *, num_parts: int = 1, images: int = 151655, videos: int = 151656
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
    )
