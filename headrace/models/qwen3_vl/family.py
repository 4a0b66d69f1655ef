"""Qwen3-VL: Qwen3, dense or with a mixture of experts, with rotary positions in time, height and width that alternate
among frequencies, and a vision encoder of which several layers' outputs enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts, PatchPixels
from headrace.layers.media_spec import MultimodalSpec, VisionSpec
from headrace.layers.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import MlpSpec, NormSpec
from headrace.models.config_fields import Fields, architecture_of
from headrace.models.config_specs import (
    ACTIVATIONS,
    add_sparse_steps,
    read_attention,
    read_decoder,
    read_layers,
    read_moe,
    read_rope,
)
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import read_grid_media, read_text_part, read_vision_part, with_sections

TEXT = {"rms_norm_eps": 1e-6, "max_position_embeddings": 128000, "head_dim": 128}
VISION = {"hidden_size": 1152, "depth": 27, "num_heads": 16, "intermediate_size": 4304}
TAPPED_LAYERS = (8, 16, 24)
"""transformers' defaults."""

WITH_EXPERTS = "Qwen3VLMoeForConditionalGeneration"


@dataclass(frozen=True)
class DeepstackVisionSpec:
    """``side`` of the square grid of learned positions; outputs of ``tapped_layers`` enter the decoder, too."""

    vision: VisionSpec
    merge: int
    side: int
    tapped_layers: tuple[int, ...]

    tower: ClassVar[str] = "headrace.models.qwen3_vl.vision:DeepstackTower"

    @property
    def num_parts(self) -> int:
        return 1 + len(self.tapped_layers)


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Raises `ConfigError` for more tapped layers than the decoder can take in."""
    has_experts = architecture_of(config) == WITH_EXPERTS
    fields = Fields({**TEXT, **read_text_part(config)})
    layers = read_layers(fields, read_rope(fields, theta=5e6))
    if has_experts:
        # newer files call it so
        name = "num_experts" if "num_experts" in fields else "num_local_experts"
        moe = read_moe(fields, name, intermediate_size="moe_intermediate_size", renormalise=True)
        layers = add_sparse_steps(fields, layers, moe)
    text = read_decoder(fields, layers, attention=read_attention(fields, qk_norm="head"))
    encoder = _read_encoder(config)
    count = len(encoder.tapped_layers)
    if count >= text.num_layers:
        raise ConfigError(
            f"config.json: deepstack_visual_indexes has {count} layers; the decoder has {text.num_layers}, and the "
            "last one takes none", param="deepstack_visual_indexes",
        )
    return MultimodalSpec.of(
        with_sections(text, fields, (24, 20, 20), alternates=True), encoder, merge=encoder.merge
    )


def _read_encoder(config: dict[str, Any]) -> DeepstackVisionSpec:
    vision = Fields({**VISION, **read_vision_part(config).config})
    merge, patch = vision.integer("spatial_merge_size", 2), vision.integer("patch_size", 16)
    spec = VisionSpec(
        vision.integer("hidden_size"), vision.integer("depth"), vision.integer("num_heads"),
        input_size=vision.integer("in_channels", 3) * vision.integer("temporal_patch_size", 2) * patch**2,
        mlp=MlpSpec(
            vision.integer("intermediate_size"), vision.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"), True,
            gated=False,
        ),
        norm=NormSpec(1e-6, kind="layer", bias=True),
    )
    side = int(vision.integer("num_position_embeddings", 2304) ** 0.5)
    tapped = tuple(vision.config.get("deepstack_visual_indexes", TAPPED_LAYERS))
    return DeepstackVisionSpec(spec, merge, side, tapped)


def read_media(config: dict[str, Any]) -> MediaFacts:
    """As for the others of the line, with longer vectors."""
    encoder = _read_encoder(config)
    return read_grid_media(
        config, PatchPixels(encoder.vision.input_size, encoder.merge), num_parts=encoder.num_parts
    )


def _name_merger(theirs: str, ours: str) -> dict[str, str]:
    parts = (("norm", "norm"), ("linear_fc1", "up"), ("linear_fc2", "down"))
    return {f"{theirs}.{a}": f"{ours}.{b}" for a, b in parts}


FAMILY = Family(
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration", WITH_EXPERTS),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **EXPERT_NAMES,
            "model.layers.{i}.mlp.gate": ROUTER,
            "visual.patch_embed.proj": "encoder.patches",
            "visual.pos_embed.weight": "encoder.positions",
            "visual.blocks.{i}.norm1": "encoder.blocks.{i}.attention_norm",
            "visual.blocks.{i}.norm2": "encoder.blocks.{i}.mlp_norm",
            "visual.blocks.{i}.attn.qkv": "encoder.blocks.{i}.qkv",
            "visual.blocks.{i}.attn.proj": "encoder.blocks.{i}.output",
            "visual.blocks.{i}.mlp.linear_fc1": "encoder.blocks.{i}.mlp.up",
            "visual.blocks.{i}.mlp.linear_fc2": "encoder.blocks.{i}.mlp.down",
            **_name_merger("visual.merger", "encoder.merger"),
            **_name_merger("visual.deepstack_merger_list.{i}", "encoder.taps.{i}"),
        },
        renames={"model.visual.": "visual.", "model.language_model.": "model."},
        stacked_experts="transposed",
    ),
    tool_parser="hermes",
    media=FamilyMedia(read_media),
)
