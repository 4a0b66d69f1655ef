"""Qwen2-Audio: Qwen2 and Whisper's encoder, whose outputs are averaged in pairs; arXiv:2407.10759."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media_facts import ClipFrames, MediaFacts
from headrace.layers.media_spec import AudioSpec, MultimodalSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.models.audio_fields import audio_names, read_audio_encoder
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_rope, read_windowed_layers
from headrace.models.family import Family, FamilyMedia
from headrace.models.vision_fields import TOWER_RENAMES, read_text_part

TEXT = {
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 151936, "rms_norm_eps": 1e-6,
}
AUDIO = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
}
"""transformers' defaults, which published configs leave out."""
STRIDE = 4
"""Frames of 10 ms that one placeholder stands for."""


@dataclass(frozen=True)
class PooledAudioSpec:
    """Whisper's encoder, pooling and a projection."""

    audio: AudioSpec
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.qwen2_audio.audio:PooledAudioTower"


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """Biases are part of the architecture."""
    fields = Fields({**TEXT, **read_text_part(config)})
    attention = read_attention(fields, qkv_bias=True, output_bias=False)
    text = read_decoder(fields, read_windowed_layers(fields, read_rope(fields)), attention=attention)
    return MultimodalSpec.of(text, PooledAudioSpec(_read_encoder(config)))


def _read_encoder(config: dict[str, Any]) -> AudioSpec:
    audio = config.get("audio_config")
    if not isinstance(audio, dict):
        raise ConfigError(f"config.json: audio_config must be an object, got {audio!r:.200}", param="audio_config")
    return read_audio_encoder(Fields({**AUDIO, **audio}))


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Clips of at most 30 seconds."""
    fields, audio = Fields(config), _read_encoder(config)
    return MediaFacts(
        token_ids={"audio": fields.integer("audio_token_index", 151646)}, texts={"audio": "<|AUDIO|>"},
        vector_size=Fields({**TEXT, **read_text_part(config)}).integer("hidden_size"),
        frames=ClipFrames(audio.num_mels, audio.num_frames, STRIDE),
    )


FAMILY = Family(
    name="qwen2_audio",
    architectures=("Qwen2AudioForConditionalGeneration",),
    read_config=read_config,
    names=CheckpointNames(
        {
            **SPLIT_NAMES,
            **audio_names("audio_tower.", "encoder.audio."),
            "multi_modal_projector.linear": "encoder.projector",
        },
        renames={**TOWER_RENAMES, "model.audio_tower.": "audio_tower."},
    ),
    media=FamilyMedia(read_media),
)
