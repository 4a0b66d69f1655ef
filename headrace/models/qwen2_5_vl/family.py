"""Qwen2-VL and Qwen2.5-VL: Qwen2 with rotary positions in time, height and width, and a vision encoder, in the latter
with windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.media_facts import MediaFacts, PatchPixels
from headrace.layers.media_spec import MultimodalSpec, VisionSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import MlpSpec, NormSpec
from headrace.models.config_fields import LARGEST, Fields, architecture_of
from headrace.models.config_specs import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    read_attention,
    read_decoder,
    read_rope,
    read_windowed_layers,
)
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import read_grid_media, read_text_part, read_vision_part, with_sections

TEXT = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
VISION = {"hidden_size": 3584, "depth": 32, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}
FIRST_VISION = {"embed_dim": 1280, "depth": 32, "num_heads": 16, "mlp_ratio": 4}
"""transformers' defaults."""

FIRST = "Qwen2VLForConditionalGeneration"


@dataclass(frozen=True)
class WindowedVisionSpec:
    """``window``: side of a window in merged patches; ``full_layers`` attend within whole frames."""

    vision: VisionSpec
    merge: int
    window: int
    full_layers: tuple[int, ...]
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.qwen2_5_vl.vision:WindowedTower"


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Biases are part of the architecture."""
    fields = Fields({**TEXT, **read_text_part(config)})
    attention = read_attention(fields, qkv_bias=True, output_bias=False)
    text = read_decoder(fields, read_windowed_layers(fields, read_rope(fields, theta=1e6)), attention=attention)
    encoder, is_first = _read_encoder(config), architecture_of(config) == FIRST
    return MultimodalSpec.of(
        with_sections(text, fields, (16, 24, 24)), encoder, merge=encoder.merge,
        tokens_per_second=1.0 if is_first else read_vision_part(config).number("tokens_per_second", 4),
    )


def _read_encoder(config: dict[str, Any]) -> WindowedVisionSpec:
    if architecture_of(config) == FIRST:
        return _read_plain_encoder(Fields({**FIRST_VISION, **read_vision_part(config).config}))
    vision = Fields({**VISION, **read_vision_part(config).config})
    merge, patch = vision.integer("spatial_merge_size", 2), vision.integer("patch_size", 14)
    spec = VisionSpec(
        vision.integer("hidden_size"), vision.integer("depth"), vision.integer("num_heads"),
        input_size=vision.integer("in_channels", 3) * vision.integer("temporal_patch_size", 2) * patch**2,
        mlp=MlpSpec(vision.integer("intermediate_size"), vision.choice("hidden_act", GATED_ACTIVATIONS, "silu"), True),
        norm=NormSpec(1e-6), patch_bias=False,
    )
    return WindowedVisionSpec(
        spec, merge, vision.integer("window_size", 112) // merge // patch,
        tuple(vision.config.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def _read_plain_encoder(vision: Fields) -> WindowedVisionSpec:
    """Qwen2-VL's: layer norms, an MLP without a gate, and a window as large as any frame."""
    size, patch, num_layers = vision.integer("embed_dim"), vision.integer("patch_size", 14), vision.integer("depth")
    mlp = MlpSpec(
        int(size * vision.positive("mlp_ratio")), vision.choice("hidden_act", ACTIVATIONS, "quick_gelu"), True,
        gated=False,
    )
    spec = VisionSpec(
        size, num_layers, vision.integer("num_heads"),
        input_size=vision.integer("in_channels", 3) * vision.integer("temporal_patch_size", 2) * patch**2,
        mlp=mlp, norm=NormSpec(1e-6, kind="layer", bias=True), patch_bias=False,
    )
    return WindowedVisionSpec(spec, vision.integer("spatial_merge_size", 2), LARGEST, tuple(range(num_layers)))


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images and videos."""
    encoder = _read_encoder(config)
    return read_grid_media(config, PatchPixels(encoder.vision.input_size, encoder.merge))


FAMILY = Family(
    name="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration", FIRST),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            "visual.patch_embed.proj": "encoder.patches",
            "visual.blocks.{i}.norm1": "encoder.blocks.{i}.attention_norm",
            "visual.blocks.{i}.norm2": "encoder.blocks.{i}.mlp_norm",
            "visual.blocks.{i}.attn.qkv": "encoder.blocks.{i}.qkv",
            "visual.blocks.{i}.attn.proj": "encoder.blocks.{i}.output",
            "visual.blocks.{i}.mlp.gate_proj": "encoder.blocks.{i}.mlp.gate_up#gate",
            "visual.blocks.{i}.mlp.up_proj": "encoder.blocks.{i}.mlp.gate_up#up",
            "visual.blocks.{i}.mlp.down_proj": "encoder.blocks.{i}.mlp.down",
            "visual.blocks.{i}.mlp.fc1": "encoder.blocks.{i}.mlp.up",
            "visual.merger.ln_q": "encoder.merger.norm",
            "visual.merger.mlp.0": "encoder.merger.up",
            "visual.merger.mlp.2": "encoder.merger.down",
        },
        renames={"model.visual.": "visual.", "model.language_model.": "model.", ".mlp.fc2.": ".mlp.down_proj."},
    ),
    tool_parser="hermes",
    media=FamilyMedia(read_media),
)
