"""CLIP: embeddings of texts and images; arXiv:2103.00020."""

from __future__ import annotations

from typing import Any

from headrace.base.media_facts import MediaFacts
from headrace.layers.media_spec import DualSpec
from headrace.layers.names import CheckpointNames
from headrace.models.dual_fields import DUAL_NAMES, DUAL_RENAMES, MODEL, dual_cache_specs, dual_media, read_dual
from headrace.models.family import Family, FamilyMedia

TEXT = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}
"""transformers' defaults."""


def read_config(config: dict[str, Any]) -> DualSpec:
    """Texts attend to the left; the embedding is made of their last token, and of an image's class token."""
    return read_dual(config, TEXT, projection="top", is_causal=True)


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images."""
    return dual_media(read_config(config))


FAMILY = Family(
    name="clip",
    architectures=("CLIPModel",),
    read_config=read_config,
    cache_specs=dual_cache_specs,
    names=CheckpointNames(
        {**DUAL_NAMES, "text_projection": "text.projection", "visual_projection": "encoder.projection"},
        renames=DUAL_RENAMES,
    ),
    model=MODEL,
    generates=False,
    media=FamilyMedia(read_media),
)
