"""Reads configs of models that embed texts and images, and names their tensors. Torch-free."""

from __future__ import annotations

from typing import Any

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.layers.media_spec import DualSpec, VisionSpec
from headrace.layers.spec import NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_mlp
from headrace.models.vision_fields import IMAGE_ENCODER_NAMES, image_pixels, read_image_encoder, read_vision_part

MODEL = "headrace.layers.dual_encoder:DualEncoder"

_LAYER, _OWN = "text_model.encoder.layers.{i}", "text.blocks.{i}"
DUAL_NAMES = {
    **IMAGE_ENCODER_NAMES,
    "text_model.embeddings.token_embedding.weight": "text.words",
    "text_model.embeddings.position_embedding.weight": "text.positions",
    f"{_LAYER}.layer_norm1": f"{_OWN}.attention_norm",
    f"{_LAYER}.layer_norm2": f"{_OWN}.mlp_norm",
    f"{_LAYER}.self_attn.q_proj": f"{_OWN}.qkv#q",
    f"{_LAYER}.self_attn.k_proj": f"{_OWN}.qkv#k",
    f"{_LAYER}.self_attn.v_proj": f"{_OWN}.qkv#v",
    f"{_LAYER}.self_attn.out_proj": f"{_OWN}.output",
    f"{_LAYER}.mlp.fc1": f"{_OWN}.mlp.up",
    f"{_LAYER}.mlp.fc2": f"{_OWN}.mlp.down",
    "text_model.final_layer_norm": "text.norm",
}
"""CLIP and SigLIP, but for their projections."""
DUAL_RENAMES = {"vision_model.": "vision_tower."}


def read_dual(config: dict[str, Any], text: dict[str, Any], *, projection: str, **special: Any) -> DualSpec:
    """A `DualSpec`. ``text``: transformers' defaults of the encoder of texts; ``projection`` is ``"top"`` where the
    size of embeddings is the config's own ``projection_dim``, or ``"text"`` where it is that of the texts' part.
    ``special`` sets other fields of the result."""
    part = config.get("text_config")
    if not isinstance(part, dict):
        raise ConfigError(f"config.json: text_config must be an object, got {part!r:.200}", param="text_config")
    fields, image = Fields({**text, **part}), read_image_encoder(read_vision_part(config))
    spec = VisionSpec(
        fields.integer("hidden_size"), fields.integer("num_hidden_layers"), fields.integer("num_attention_heads"),
        input_size=0, mlp=read_mlp(fields, gated=False, bias=True),
        norm=NormSpec(fields.number("layer_norm_eps"), kind="layer", bias=True),
    )
    size = (
        Fields(config).integer("projection_dim", 512) if projection == "top"
        else fields.integer("projection_size", spec.hidden_size)
    )
    return DualSpec(
        spec, image, size, fields.integer("vocab_size"), fields.integer("max_position_embeddings"), **special
    )


def dual_media(spec: DualSpec) -> MediaFacts:
    """An image is a prompt of its own."""
    return MediaFacts(
        token_ids={"image": spec.num_words}, texts={"image": "<image>"}, vector_size=spec.hidden_size,
        pixels=image_pixels(spec.image, 1), is_alone=True,
    )


def dual_cache_specs(spec: DualSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """No layer has a cache: a text is computed in one step."""
    return [None] * spec.num_layers
