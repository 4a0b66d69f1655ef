"""SigLIP: embeddings of texts and images; arXiv:2303.15343, arXiv:2502.14786."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.layers.media_spec import DualSpec
from headrace.layers.names import CheckpointNames
from headrace.models.config_fields import Fields
from headrace.models.dual_fields import DUAL_NAMES, DUAL_RENAMES, MODEL, dual_cache_specs, dual_media, read_dual
from headrace.models.family import Family, FamilyMedia

TEXT = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}
"""transformers' defaults."""
VISION = {"model_type": "siglip_vision_model"}


def read_config(config: dict[str, Any]) -> DualSpec:
    """Texts are padded to all positions, as in training, and their last one, padding or not, is projected; a learned
    query attends to the patches of an image."""
    vision = {**VISION, **Fields(config).section("vision_config")}
    if not Fields(vision).flag("vision_use_head", True):
        raise ConfigError(
            "config.json: vision_use_head must be true, as embeddings of images are made by the head",
            param="vision_use_head",
        )
    text = Fields(config).section("text_config")
    spec = read_dual(
        {**config, "vision_config": vision}, TEXT, projection="text", pools_by_attention=True, projection_bias=True,
        pad_id=Fields(text).count("pad_token_id", 1),
    )
    if spec.hidden_size != spec.image.vision.hidden_size:
        raise ConfigError(
            f"config.json: projection_size of texts is {spec.hidden_size} and images have "
            f"{spec.image.vision.hidden_size}; they must be equal to be compared", param="projection_size",
        )
    return spec


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images."""
    return dual_media(read_config(config))


FAMILY = Family(
    name="siglip",
    architectures=("SiglipModel",),
    read_config=read_config,
    cache_specs=dual_cache_specs,
    names=CheckpointNames(
        {
            **DUAL_NAMES,
            "text_model.head": "text.projection",
            "vision_tower.head.probe": "encoder.pool.probe",
            "vision_tower.head.attention.in_proj": "encoder.pool.qkv",
            "vision_tower.head.attention.out_proj": "encoder.pool.output",
            "vision_tower.head.layernorm": "encoder.pool.norm",
            "vision_tower.head.mlp.fc1": "encoder.pool.mlp.up",
            "vision_tower.head.mlp.fc2": "encoder.pool.mlp.down",
        },
        renames={**DUAL_RENAMES, ".attention.in_proj_": ".attention.in_proj."},
    ),
    model=MODEL,
    generates=False,
    media=FamilyMedia(read_media),
)
