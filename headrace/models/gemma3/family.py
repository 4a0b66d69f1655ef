"""Gemma 3, for text and images: five sliding-window layers to one with full attention, a rotary base for each kind,
norms before and after every branch that multiply by ``1 + weight``, scaled embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.layers.media_spec import ImageSpec, MultimodalSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames, GgufNaming
from headrace.layers.spec import DecoderSpec, LayerSpec, NormSpec
from headrace.models.config_fields import Fields, architecture_of
from headrace.models.config_specs import (
    make_rope,
    read_attention,
    read_decoder,
    read_mlp,
    read_rope_parameters,
    read_sliding,
    read_vocabulary,
    read_window,
)
from headrace.models.family import Family, FamilyMedia
from headrace.models.gguf_config import read_gguf_config, read_sliding_pattern
from headrace.models.vision_fields import (
    IMAGE_ENCODER_NAMES,
    TOWER_RENAMES,
    UNUSED_HEADS,
    image_pixels,
    read_image_encoder,
    read_vision_part,
)

DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 4096,
}
"""transformers' defaults; published configs omit fields that equal these."""

MULTIMODAL = "Gemma3ForConditionalGeneration"
"""The architecture for text and images."""

GGUF_KEYS = {
    "rope.freq_base_swa": "rope_local_base_freq", "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True)
class PooledImageSpec:
    """An image has ``tokens_per_side`` ** 2 placeholders; ``norm_eps`` is that of the norm before the projection."""

    image: ImageSpec
    tokens_per_side: int
    norm_eps: float
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.gemma3.vision:PooledTower"


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """A `MultimodalSpec` where the config has a vision part. ``attn_logit_softcapping`` is left over from Gemma 2: no
    published config sets it, and transformers does not apply it."""
    fields = Fields({**DEFAULTS, **_text_part(config)})
    text = read_decoder(
        fields, _read_layers(fields),
        attention=read_attention(fields, scale=fields.number("query_pre_attn_scalar", 256) ** -0.5, qk_norm="head"),
        mlp=read_mlp(fields, activation="hidden_activation", default="gelu_pytorch_tanh"),
        norm=NormSpec(fields.number("rms_norm_eps", 1e-6), offset=1.0, after=True),
        vocabulary=read_vocabulary(
            fields, tied=True, embedding_scale=fields.integer("hidden_size") ** 0.5,
            softcap=fields.number("final_logit_softcapping", 0.0),
        ),
    )
    return MultimodalSpec.of(text, _read_encoder(config), is_whole=True) if _takes_images(config) else text


def _takes_images(config: dict[str, Any]) -> bool:
    return architecture_of(config) == MULTIMODAL and isinstance(config.get("vision_config"), dict)


def _read_encoder(config: dict[str, Any]) -> PooledImageSpec:
    image = read_image_encoder(Fields({"model_type": "siglip_vision_model", **read_vision_part(config).config}))
    count = Fields(config).integer("mm_tokens_per_image", 256)
    side = math.isqrt(count)
    if side * side != count or image.side % side:
        raise ConfigError(
            f"config.json: mm_tokens_per_image must be a square whose side divides {image.side}, got {count}",
            param="mm_tokens_per_image",
        )
    return PooledImageSpec(image, side, image.vision.norm.eps)


def read_media(config: dict[str, Any]) -> MediaFacts | None:
    """Images alone; their tokens attend to one another."""
    if not _takes_images(config):
        return None
    encoder = _read_encoder(config)
    return MediaFacts(
        token_ids={"image": Fields(config).integer("image_token_index", 262144)},
        texts={"image": "<start_of_image>"},
        vector_size=Fields({**DEFAULTS, **_text_part(config)}).integer("hidden_size"), is_whole=True,
        pixels=image_pixels(encoder.image, encoder.tokens_per_side**2),
    )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model: a multimodal config has them in ``text_config``."""
    if config["architectures"][0] != MULTIMODAL:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: {MULTIMODAL} needs text_config, an object; got {text!r}", param="text_config")
    return {**config, **text}


def _read_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    pattern = fields.integer("sliding_window_pattern", 6)
    # ``rope_scaling`` extends the full layers only: a window never reaches beyond the trained length.
    full = {"rope_theta": fields.config.get("rope_theta"), **read_rope_parameters(fields, "full_attention")}
    local = {
        "rope_theta": fields.config.get("rope_local_base_freq"),
        **Fields(fields.section("rope_parameters")).section("sliding_attention")
    }
    full_layer = LayerSpec(0, make_rope(fields, full, theta=1e6))
    sliding_layer = LayerSpec(read_window(fields), make_rope(fields, local, theta=1e4))
    are_sliding = read_sliding(fields, lambda i: (i + 1) % pattern != 0)
    return tuple(sliding_layer if is_sliding else full_layer for is_sliding in are_sliding)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The head is always tied. ``query_pre_attn_scalar``, whose square root divides q.k, is not in the file: it is
    ``head_dim``, but in the 27B model (known by its 62 layers) ``hidden_size`` divided by the number of heads."""
    config = read_gguf_config(metadata, "Gemma3ForCausalLM", keys=GGUF_KEYS)
    config["tie_word_embeddings"] = True
    is_27b = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if is_27b else config.get("head_dim", 256)
    )
    return config | read_sliding_pattern(metadata)


MODULES = {
    **SPLIT_NAMES,
    "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
    "model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm",
    "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
}

FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", "Gemma3TextModel", MULTIMODAL),
    read_config=read_config,
    names=CheckpointNames(
        MODULES,
        # multimodal files, newer and older
        renames={"model.language_model.": "model.", "language_model.": ""},
        ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
    media=FamilyMedia(read_media, CheckpointNames(
        {
            **MODULES,
            **IMAGE_ENCODER_NAMES,
            "multi_modal_projector.mm_soft_emb_norm": "encoder.norm",
            "multi_modal_projector.mm_input_projection_weight": "encoder.projection",
        },
        renames=TOWER_RENAMES,
        ignored=UNUSED_HEADS,
    )),
    gguf_architectures=("gemma3",),
    gguf_config=gguf_config,
    gguf_naming=GgufNaming(norm_offset=1.0),
    tool_parser="gemma",
)
